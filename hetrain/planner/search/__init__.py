"""How every table is cut and where its parts lie: bounds first, then layouts against them."""
