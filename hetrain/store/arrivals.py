"""Rows that a worker fetched: decoded from the owners' reply, or made here where the owners left them out."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hetrain.store.index import Ints
from hetrain.store.initial import InitialRows
from hetrain.store.messages import Reply
from hetrain.store.row_codec import RowCodec
from hetrain.store.scatter import put_rows


class Fetched(NamedTuple):
    """Rows as their owners have them, or as near as their codec comes."""

    value: Tensor  # [n, D]
    state: Tensor  # [n, S]
    clock: Ints  # [n] c_g
    applied: Ints  # [n] updates taken; 0 unless auditing is on

    def part(self, which: slice) -> "Fetched":
        """Some of the rows."""
        return Fetched(self.value[which], self.state[which], self.clock[which], self.applied[which])

    def replace(self, at: Ints, rows: "Fetched") -> None:
        """Put `rows` [n] at positions `at` [n], in place."""
        index = torch.from_numpy(at).to(self.value.device)
        put_rows(self.value, index, rows.value)
        put_rows(self.state, index, rows.state)
        self.clock[at], self.applied[at] = rows.clock, rows.applied


class Arrivals:
    """Takes replies in, on the cache's device."""

    def __init__(self, initial: InitialRows, codec: RowCodec, device: torch.device) -> None:
        self._initial, self._codec, self._device = initial, codec, device

    def fetched(self, reply: Reply, new: Tensor) -> Fetched:
        """The rows [N] asked for. Those not sent are initial among the first ones, rows `new` [m], and else not set."""
        sent = reply.stored.cpu().numpy()
        clock, applied = np.zeros(len(sent), np.int64), np.zeros(len(sent), np.int64)
        if len(reply.clock):
            clock[sent] = reply.clock.cpu().numpy()
        if len(reply.applied):
            applied[sent] = reply.applied.cpu().numpy()
        value, state = self._codec.read_rows(reply.value.to(self._device)), reply.state.to(self._device)
        if len(value) == len(sent):
            return Fetched(value, state, clock, applied)
        at = torch.from_numpy(np.flatnonzero(sent)).to(self._device)
        whole = put_rows(value.new_empty(len(sent), value.shape[1]), at, value)
        states = put_rows(state.new_zeros(len(sent), state.shape[1]), at, state)
        made = torch.from_numpy(np.flatnonzero(~sent[: len(new)])).to(self._device)
        if len(made):
            fresh = whole.new_empty(len(made), whole.shape[1])
            self._initial.fill(fresh, new.to(self._device)[made])
            put_rows(whole, made, fresh)
        return Fetched(whole, states, clock, applied)

    def found_invalid(self, reply: Reply) -> Fetched:
        """The rows of the copies checked in vain."""
        value = self._codec.read_rows(reply.invalid_value.to(self._device))
        numbers = (reply.invalid_clock.cpu().numpy(), reply.invalid_applied.cpu().numpy())
        return Fetched(value, reply.invalid_state.to(self._device), *numbers)
