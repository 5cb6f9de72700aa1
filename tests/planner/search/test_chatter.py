"""What C code prints is not shown, what we print is."""

import ctypes

import pytest

from hetrain.planner.search.chatter import without_chatter


def test_what_c_code_prints_is_dropped_and_nothing_else(capfd: pytest.CaptureFixture[str]) -> None:
    library = ctypes.CDLL(None)
    library.printf(b"before, ")
    with without_chatter():
        library.printf(b"meanwhile, ")
    library.printf(b"after")
    library.fflush(None)
    print(" and ours")
    assert capfd.readouterr().out == "before, after and ours\n"
