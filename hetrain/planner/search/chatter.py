"""Keeps what a solver prints off the screen: HiGHS writes a line when it mends a solution, whatever it is told."""

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def without_chatter() -> Iterator[None]:
    """What C code prints to standard output meanwhile is dropped; this program must not print itself."""
    library = ctypes.CDLL(None)
    try:
        shown = os.dup(1)
    except OSError:  # standard output is closed: nothing can be printed there
        yield
        return
    sys.stdout.flush()
    library.fflush(None)
    with Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        try:
            yield
        finally:
            library.fflush(None)
            os.dup2(shown, 1)
            os.close(shown)
