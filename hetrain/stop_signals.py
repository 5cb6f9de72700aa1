"""The signals that stop a run: Ctrl-C, SIGTERM and a closed terminal (SIGHUP), which `nohup` has ignored before us."""

import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

Handlers = dict[signal.Signals, Any]  # as signal.getsignal gives them


def catch(handler: Callable[[int, FrameType | None], None]) -> Handlers:
    """Let `handler` have the stop signals from now on, SIGHUP only where it is not ignored; what had them before."""
    ours = [n for n in STOP_SIGNALS if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in ours}


def restore(before: Handlers) -> None:
    """Undo a `catch`."""
    for number, handler in before.items():
        signal.signal(number, handler)
