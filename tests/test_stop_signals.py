"""Stop signals of a real process: caught all, restored all, a hangup ignored under nohup left alone."""

import os
import signal

import pytest

from hetrain.stop_signals import STOP_SIGNALS, catch, restore


@pytest.fixture(params=[signal.SIG_DFL, signal.SIG_IGN], ids=["terminal", "nohup"])
def on_hangup(request):
    before = signal.signal(signal.SIGHUP, request.param)
    yield request.param
    signal.signal(signal.SIGHUP, before)


def test_all_are_caught_but_for_a_hangup_under_nohup(on_hangup):
    as_found = [signal.getsignal(number) for number in STOP_SIGNALS]
    caught = []
    before = catch(lambda number, frame: caught.append(number))
    try:
        for number in STOP_SIGNALS:
            os.kill(os.getpid(), number)
        expected = [n for n in STOP_SIGNALS if n != signal.SIGHUP or on_hangup == signal.SIG_DFL]
        assert caught == list(before) == expected
    finally:
        restore(before)
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == as_found
