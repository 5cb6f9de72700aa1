"""`python -m hetrain`, for torchrun."""

from hetrain.cli import main

main()
