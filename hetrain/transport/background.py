"""One piece of work at a time on a thread of its own: a round, or a sum of gradients, while a batch is computed."""

import queue
import threading
from collections.abc import Callable
from typing import Any


class Background:
    """Runs what `start` gives it and hands the result, or the error, to `result`.

    The thread is a daemon: when the step fails meanwhile, nobody has to wait for the ranks the round waits for.
    """

    def __init__(self, name: str) -> None:
        self._work: queue.SimpleQueue[Callable[[], Any]] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def start(self, work: Callable[[], Any]) -> None:
        """Begin `work`; `result` must have been called for the work before it."""
        self._work.put(work)

    def result(self) -> Any:
        """Wait for the work and return what it returned; raises what it raised."""
        value, error = self._done.get()
        if error is not None:
            raise error
        return value

    def _run(self) -> None:
        while True:
            work = self._work.get()
            try:
                self._done.put((work(), None))
            except BaseException as error:  # noqa: BLE001 - raised again where the result is asked for
                self._done.put((None, error))
