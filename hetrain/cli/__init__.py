"""The command line: arguments, what each verb does (command), sweeps, help texts, doctor."""

from hetrain.cli.command import main

__all__ = ["main"]
