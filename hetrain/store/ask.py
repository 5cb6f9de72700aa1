"""What a worker and an owner send each other where ranks step at their own pace: one message each way per step.

A worker's `Ask` brings the gradients of its last step and asks for what its next one reads, rows and dense parameters
alike. The owner applies the former before it answers the latter.

Suffixes: M rows pushed, N rows fetched, K rows of these sent, P dense parameters of the owner, D embedding dim, S width
of the optimizer state (0 where workers keep no copies).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from hetrain.store.messages import Message, none

NO_GATE = -1  # in place of the clock that the slowest worker must have reached


@dataclass
class RowsAsked(Message):
    """One width group's part of an Ask. Row numbers are global, ascending, int64; each occurs once per field."""

    push_rows: Tensor  # [M]
    push_gradient: Tensor  # [M, .] what RowCodec.pushes gives
    push_seen: Tensor  # [M] int64 updates in the row that the gradient was computed on; [0] unless audited
    fetch_rows: Tensor  # [N]

    CHANNELS = ("ids", "rows_push", "audit", "ids")

    @staticmethod
    def fetch(rows: Tensor, dim: int) -> "RowsAsked":
        """Nothing pushed."""
        return RowsAsked(none(), torch.empty(0, dim), none(), rows)


@dataclass
class RowsAnswered(Message):
    """A row that no push ever reached is not sent: whoever asked makes it (store/initial.py)."""

    stored: Tensor  # [N] bool: whether the row is sent; K are
    value: Tensor  # [K, .] what RowCodec.rows gives; to those who look [K, D] float32
    state: Tensor  # [K, S] float32
    applied: Tensor  # [K] int64 updates the row has taken; [0] unless auditing

    CHANNELS = ("ids", "rows_pull", "rows_pull", "audit")


@dataclass
class _Head(Message):
    numbers: Tensor  # [n] int64
    dense: Tensor  # [P, 1] or [0, 1] float32

    CHANNELS = ("clocks", "dense")


@dataclass
class Ask:
    """One worker to one owner."""

    worker: int
    clock: int  # steps the worker has pushed here, this message's push included
    pushed: int  # examples behind the gradients; 0: none are pushed
    begin: int  # examples of the step to train next; 0: it only pushes, or looks
    gate: int  # the slowest worker's clock that an answer has to wait for, or NO_GATE
    ended: bool  # the worker has nothing left to train
    dense_wanted: bool
    dense: Tensor  # [P] float32 gradient, or [0]
    rows: list[RowsAsked]  # by width group
    number: int = 0  # of the worker's Asks, ascending: what a withdrawal names, which may overtake it

    def messages(self) -> list[Message]:
        """The head, then every group's part."""
        numbers = [
            self.worker,
            self.clock,
            self.pushed,
            self.begin,
            self.gate,
            self.ended,
            self.dense_wanted,
            self.number,
        ]
        return [_Head(torch.tensor(numbers, dtype=torch.int64), self.dense.view(-1, 1)), *self.rows]

    @classmethod
    def of(cls, fields: Sequence[Sequence[Tensor]]) -> Self:
        """The Ask whose `messages()` had these fields."""
        (numbers, dense), *rows = fields
        worker, clock, pushed, begin, gate, ended, dense_wanted, number = numbers.tolist()
        parts = [RowsAsked.from_fields(part) for part in rows]
        return cls(worker, clock, pushed, begin, gate, bool(ended), bool(dense_wanted), dense.view(-1), parts, number)


@dataclass
class Answer:
    """One owner to one worker."""

    granted: bool  # False: ranks meet first; nothing was read
    slowest: int  # the slowest worker's clock as this owner knows it, at most the asking worker's own
    pushed: int  # examples whose gradients this owner has applied
    begun: int  # examples of the run granted so far, where this owner keeps the count; else 0
    dense: Tensor  # [P] float32, or [0]
    rows: list[RowsAnswered]  # by width group; [] where nothing was read

    def messages(self, dim_state: Sequence[tuple[int, int]]) -> list[Message]:
        """The head, then every group's part; `dim_state`: columns of a row and of its state, by group."""
        numbers = torch.tensor([self.granted, self.slowest, self.pushed, self.begun], dtype=torch.int64)
        rows = self.rows or [nothing_answered(*widths) for widths in dim_state]
        return [_Head(numbers, self.dense.view(-1, 1)), *rows]

    @classmethod
    def of(cls, fields: Sequence[Sequence[Tensor]]) -> Self:
        """The Answer whose `messages()` had these fields."""
        (numbers, dense), *rows = fields
        granted, slowest, pushed, begun = numbers.tolist()
        parts = [RowsAnswered.from_fields(part) for part in rows]
        return cls(bool(granted), slowest, pushed, begun, dense.view(-1), parts)


def nothing_answered(dim: int, state_width: int) -> RowsAnswered:
    """About no row."""
    return RowsAnswered(none().bool(), torch.empty(0, dim), torch.empty(0, state_width), none())


HEAD_CHANNELS = _Head.CHANNELS
HEAD_WIDTHS = (None, 1)
