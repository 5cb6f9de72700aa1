"""What a run tells: bytes per channel, metrics.jsonl, TensorBoard, the console."""

from dataclasses import dataclass, field

CHANNELS = ("ids", "rows_pull", "rows_push", "clocks", "pooled_fwd", "pooled_bwd", "dense", "audit")


@dataclass
class Traffic:
    """Payload bytes this rank sent, each on exactly one channel: what it was sent for."""

    bytes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CHANNELS, 0))

    def add(self, channel: str, nbytes: int) -> None:
        """Count `nbytes` on `channel`; KeyError for a channel that does not exist."""
        self.bytes[channel] += nbytes

    @property
    def total(self) -> int:
        """Bytes on all channels."""
        return sum(self.bytes.values())
