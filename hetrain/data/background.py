"""Runs an iterator on a thread of its own, a bounded number of items ahead of its consumer, or inline."""

import queue
import threading
import time
from collections.abc import Callable, Generator
from contextlib import closing
from typing import TypeVar

T = TypeVar("T")
_POLL_S = 0.05  # how soon a producer blocked on a full queue sees that its consumer has gone


class _End:
    """Last item of the queue: the error the producer ended with, if any."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


def ahead(items: Generator[T], depth: int, waited: Callable[[float], None] | None = None) -> Generator[T]:
    """Yield `items`, produced on a thread at most `depth` ahead.

    The thread ends with the iterator: exhausted, closed early, or failed; an error of the producer is
    raised in the consumer. `waited` is told the seconds the consumer waited for each item.
    """
    box: queue.Queue[T | _End] = queue.Queue(maxsize=max(depth, 1))
    gone = threading.Event()
    thread = threading.Thread(target=_produce, args=(items, box, gone), name="hetrain-reader", daemon=True)
    thread.start()
    try:
        while True:
            started = time.perf_counter()
            item = box.get()
            if waited is not None:
                waited(time.perf_counter() - started)
            if isinstance(item, _End):
                if item.error is not None:
                    raise item.error
                return
            yield item
    finally:
        gone.set()
        thread.join()


def inline(items: Generator[T], waited: Callable[[float], None] | None = None) -> Generator[T]:
    """Yield `items`, each produced when it is asked for; `waited` is told the seconds that took."""
    with closing(items):
        while True:
            started = time.perf_counter()
            item = next(items, None)
            if waited is not None:
                waited(time.perf_counter() - started)
            if item is None:
                return
            yield item


def _produce(items: Generator[T], box: "queue.Queue[T | _End]", gone: threading.Event) -> None:
    error: BaseException | None = None
    try:
        for item in items:
            if not _put(box, item, gone):
                break
    except BaseException as caught:  # noqa: BLE001 - carried to the consumer, which raises it
        error = caught
    finally:
        items.close()
    _put(box, _End(error), gone)


def _put(box: "queue.Queue[T | _End]", item: "T | _End", gone: threading.Event) -> bool:
    while not gone.is_set():
        try:
            box.put(item, timeout=_POLL_S)
        except queue.Full:
            continue
        return True
    return False
