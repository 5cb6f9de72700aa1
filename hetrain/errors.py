"""Exceptions a user can meet, each with the exit code the command line ends with.

A message names the key, its value, what was expected and what to do; the command line prints it
without a traceback. Anything that is not a HetrainError is a defect of ours and keeps its traceback.
"""


class HetrainError(Exception):
    """Base of every error that is the user's to mend."""

    exit_code = 1


class ConfigError(HetrainError):
    """A config key, value or combination that cannot run. Raised before anything is allocated."""

    exit_code = 2


class DataError(HetrainError):
    """Bad input data: names file, line, column and remedy."""

    exit_code = 3


class TrainingError(HetrainError):
    """Training cannot go on: a non-finite loss, a peer that stopped answering."""

    exit_code = 4


class LostPeerError(TrainingError):
    """Another rank stopped answering: most often it failed, and its own error is the cause of this one."""


class SilentPeerError(LostPeerError):
    """Another rank is there and did not answer in time: it hangs, or is far slower."""


def lost_peer(text: str, error: Exception) -> LostPeerError:
    """The error with message `text` for a peer lost by `error`, of which only the words tell what happened."""
    words = str(error).lower()
    return (SilentPeerError if "timed out" in words or "timeout" in words else LostPeerError)(text)


class CheckpointError(HetrainError):
    """A checkpoint that is missing, damaged or cannot be loaded into this run."""

    exit_code = 5
