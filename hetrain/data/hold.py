"""Who reads a data set: a shared lock per reading process, so that nobody replaces what another one reads."""

import fcntl
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

_held: dict[Path, TextIO] = {}  # open while this process lives: the kernel lets go of the locks with it


def _file(path: Path) -> Path:
    return path.parent / f".{path.name}.readers"


def hold(path: Path) -> None:
    """Read the data set at `path` until this process ends; waits while it is being replaced.

    Where no lock file can be written nothing is held: a folder that cannot be written to is not replaced either.
    """
    path = path.absolute()
    if path in _held or not path.is_dir():
        return
    try:
        file = _file(path).open("a")
    except OSError:
        return
    fcntl.flock(file, fcntl.LOCK_SH)
    _held[path] = file


@contextmanager
def unread(path: Path) -> Generator[bool]:
    """Whether no process holds the data set at `path`; while open, whoever wants to read it waits."""
    with _file(path.absolute()).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
