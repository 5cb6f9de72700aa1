"""What one worker and one owner send each other in a round. Row numbers are global, int64.

Suffixes: M rows pushed, N rows fetched, K rows of these sent, C rows checked, V rows found invalid, X notices,
D embedding dim, S width of the optimizer state (0 when gradients travel).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import ClassVar, Self

import torch
from torch import Tensor


class Part(Enum):
    """Of a round. Most have but the first."""

    WHOLE = "whole"  # everything, or everything that needs not wait for the batch in flight
    LATE = "late"  # what waited for it
    ANNOUNCE = "announce"  # before the others, with capacity 0: what will be read, and so what has to wait


class Message:
    """Fields in a fixed order, each counted on one channel of the traffic report."""

    CHANNELS: ClassVar[tuple[str, ...]]

    def fields(self) -> list[tuple[str, Tensor]]:
        """(channel, tensor) in the order `from_fields` expects."""
        names = [f.name for f in fields(self)]  # type: ignore[arg-type]
        return [(channel, getattr(self, name)) for channel, name in zip(self.CHANNELS, names, strict=True)]

    @classmethod
    def from_fields(cls, tensors: Sequence[Tensor]) -> Self:
        """The message whose `fields()` gave these tensors."""
        return cls(*tensors)

    def to(self, device: torch.device) -> Self:
        """The same message with every tensor on `device`."""
        return type(self)(*(tensor.to(device) for _, tensor in self.fields()))


def none(device: torch.device | None = None) -> Tensor:
    """No rows: [0] int64."""
    return torch.empty(0, dtype=torch.int64, device=device)


def no_flags() -> Tensor:
    """[0] bool."""
    return torch.empty(0, dtype=torch.bool)


@dataclass
class Request(Message):
    """One worker to one owner. A row occurs at most once among the pushes, once among fetches and checks."""

    push_rows: Tensor  # [M] int64
    push_value: Tensor  # [M, .] gradient, or difference of store/difference.py, as RowCodec.pushes gives it
    push_state: Tensor  # [M, S] float32: difference of the optimizer state
    push_clock: Tensor  # [M] int64: c_c; [0] where gradients travel and nobody audits
    push_updates: Tensor  # [M] int64: updates in this push; [0] where nobody counts them
    fetch_rows: Tensor  # [N] int64
    fetch_again: Tensor  # [N] bool: this request pushes what the copy held back; the copy is kept
    check_rows: Tensor  # [C] int64
    check_clock: Tensor  # [C] int64: c_c

    CHANNELS = ("ids", "rows_push", "rows_push", "clocks", "clocks", "ids", "ids", "ids", "clocks")

    @staticmethod
    def empty(dim: int, state_width: int, device: torch.device | None = None) -> "Request":
        """A request that asks for nothing; values on `device`, row numbers and clocks always on the CPU."""
        nothing = none()
        value = torch.empty(0, dim, device=device)
        state = torch.empty(0, state_width, device=device)
        return Request(nothing, value, state, nothing, nothing, nothing, no_flags(), nothing, nothing)

    def pushes(self, at: Tensor) -> "Request":
        """The pushes at positions `at` [k] alone."""
        nothing, there = none(), at.to(self.push_value.device)
        return Request(
            self.push_rows[at],
            self.push_value.index_select(0, there),
            self.push_state.index_select(0, there),
            _counters(self.push_clock, at),
            _counters(self.push_updates, at),
            nothing,
            no_flags(),
            nothing,
            nothing,
        )

    @staticmethod
    def fetch(rows: Tensor, dim: int, state_width: int) -> "Request":
        """A request for distinct `rows` [N] alone: what evaluation sends."""
        request = Request.empty(dim, state_width)
        request.fetch_rows, request.fetch_again = rows, torch.zeros_like(rows, dtype=torch.bool)
        return request

    @staticmethod
    def concat_pushes(parts: Sequence["Request"]) -> "Request":
        """The pushes of all `parts`, in order; nothing fetched or checked."""
        if len(parts) == 1:
            return parts[0]
        nothing = none()
        return Request(
            torch.cat([p.push_rows for p in parts]),
            torch.cat([p.push_value for p in parts]),
            torch.cat([p.push_state for p in parts]),
            torch.cat([p.push_clock for p in parts]),
            torch.cat([p.push_updates for p in parts]),
            nothing,
            no_flags(),
            nothing,
            nothing,
        )


def _counters(counters: Tensor, at: Tensor) -> Tensor:
    """`counters` [M] at `at`; [0] where they do not travel."""
    return counters[at] if counters.numel() else counters


@dataclass
class Reply(Message):
    """The owner's answer: fetched rows in the order asked, the checked rows that were invalid, and notices.

    A fetched row that no push ever reached is not sent: whoever asked makes it (store/initial.py). Nor is a row
    fetched again that nobody else changed since the copy was fetched: with the push of this request it is the copy.
    State is [., 0] where gradients travel, and clocks are [0] there; the applied fields are [0] unless auditing is on.
    The last two are all there is in the reply to an announcement (store/flight.py), and [0] in others.
    """

    stored: Tensor  # [N] bool: whether the row is sent; K are
    value: Tensor  # [K, .] what RowCodec.rows gives; to those who look [K, D] float32
    state: Tensor  # [K, S] float32
    clock: Tensor  # [K] int64: c_g
    applied: Tensor  # [K] int64: updates the row has taken, or [0]
    invalid: Tensor  # [V] int64: positions in the request's checks, ascending
    invalid_value: Tensor  # [V, .] as value
    invalid_state: Tensor  # [V, S] float32
    invalid_clock: Tensor  # [V] int64
    invalid_applied: Tensor  # [V] int64, or [0]
    notice_rows: Tensor  # [X] int64: rows whose copy may break the others' bound from now on
    notice_clock: Tensor  # [X] int64: c_g
    late: Tensor = field(default_factory=no_flags)  # [N] bool: to be fetched in the late leg
    hot: Tensor = field(default_factory=no_flags)  # of the rows announced before these: to be pushed there

    @staticmethod
    def flags(dim: int, state_width: int, late: Tensor, hot: Tensor) -> "Reply":
        """The reply to an announcement."""
        nothing, value, state = none(), torch.empty(0, dim), torch.empty(0, state_width)
        fetched, invalid = (value, state, nothing, nothing), (nothing, value, state, nothing, nothing)
        return Reply(no_flags(), *fetched, *invalid, nothing, nothing, late, hot)

    CHANNELS = (
        "ids",
        "rows_pull",
        "rows_pull",
        "clocks",
        "audit",
        "ids",
        "rows_pull",
        "rows_pull",
        "clocks",
        "audit",
        "ids",
        "clocks",
        "ids",
        "ids",
    )
