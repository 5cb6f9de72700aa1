"""Bytes that a rank sends, by what they were sent for."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

logger = logging.getLogger(__name__)

CHANNELS = ("ids", "rows_pull", "rows_push", "clocks", "pooled_fwd", "pooled_bwd", "dense", "audit")


def _no_bytes() -> dict[str, int]:
    return dict.fromkeys(CHANNELS, 0)


@dataclass
class Traffic:
    """Payload bytes this rank sent, each on exactly one channel: what it was sent for. Several threads may count."""

    bytes: dict[str, int] = field(default_factory=_no_bytes)
    aside: dict[str, int] = field(default_factory=_no_bytes)  # by evaluation and checkpoints, not by training
    clipped: int = 0  # values sent that were too large for their codec
    _looking: bool = False
    _lock: Any = field(default_factory=threading.Lock, repr=False, compare=False)

    def add(self, channel: str, nbytes: int) -> None:
        """Count `nbytes` on `channel`; KeyError for a channel that does not exist."""
        with self._lock:
            (self.aside if self._looking else self.bytes)[channel] += nbytes

    def clip(self, values: int) -> None:
        """Count `values` that a codec clipped, and say so once; not those of evaluation and checkpoints."""
        if self._looking:
            return
        with self._lock:
            first, self.clipped = self.clipped == 0, self.clipped + values
        if first:
            logger.warning(
                "comms: %d values were too large for fp16 and were clipped; summary.json counts them as "
                "clipped_values. Set comms=bf16, which has the range of fp32, or lower the learning rates.",
                values,
            )

    def only_aside(self) -> "Traffic":
        """A counter that adds to `aside` whatever this one does: for answers to ranks that look."""
        return Traffic(self.aside, self.aside, _lock=self._lock)

    @property
    def total(self) -> int:
        """Bytes of training on all channels."""
        return sum(self.bytes.values())

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Count what is sent inside as `aside`, so that looking more often does not look like more traffic."""
        before, self._looking = self._looking, True
        try:
            yield
        finally:
            self._looking = before
