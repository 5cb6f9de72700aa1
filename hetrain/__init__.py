"""hetrain: trains recommendation models whose embedding tables outgrow a machine."""

__version__ = "0.1.0"
