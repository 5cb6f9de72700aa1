"""Networks over an injected embedding bag collection."""
