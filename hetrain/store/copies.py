"""The copies in a cache's slots: values, optimizer state and clocks, and what each holds back.

A held copy has c_s and c_c; its pending updates are `c_c - c_s` in number and `value - base` in amount, base being
the row as it was last fetched or pushed. What a codec or a threshold kept from a push stays in that difference. Values
and state are views of the memory that the embedding kernel reads and trains in place; clocks are host arrays. A slot
without a row, or whose row has not arrived yet, has c_s = c_c = -1.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hetrain.optim import RowOptimizer
from hetrain.store.arrivals import Fetched
from hetrain.store.difference import decode, encode
from hetrain.store.index import Ints
from hetrain.store.messages import Request
from hetrain.store.row_codec import RowCodec
from hetrain.store.scatter import put_rows
from hetrain.store.threshold import Threshold
from hetrain.store.zeros import lazy_zeros

NONE = -1


class Copies:
    """Copies by slot. Where nothing is held back there are no bases."""

    def __init__(
        self,
        value: Tensor,
        state: Tensor,
        optimizer: RowOptimizer,
        codec: RowCodec,
        *,
        held_back: bool,
        audit: bool,
        counted: bool,
    ) -> None:
        """`value` [slots, D], `state` [slots, S]. `audit`: keep how many updates each fetched row had taken.

        `counted`: pushes say how many updates they hold.
        """
        slots = len(value)
        self.value, self.state, self.held_back, self.audit = value, state, held_back, audit
        self._optimizer, self._codec, self._counted = optimizer, codec, counted
        self.start = np.full(slots, NONE, np.int64)  # c_s
        self.current = np.full(slots, NONE, np.int64)  # c_c
        self.noticed = np.full(slots, NONE, np.int64)  # c_g that the owner warned of; NONE: the copy is not doubted
        self.reading = np.zeros(slots, bool)  # of a batch admitted and not yet committed
        self.applied = np.zeros(slots if audit else 0, np.int64)  # updates in the row at its last fetch
        self.threshold = Threshold(codec.dct) if codec.dct and held_back else None
        self.age = np.zeros(slots if self.threshold else 0, np.int32)  # pushes that kept something since a whole one
        self.age_max = 0
        self._base_value = _zeros_like(value if held_back else value[:0])
        self._base_state = _zeros_like(state if held_back else state[:0])

    def _at(self, slots: Ints) -> Tensor:
        """`slots` as an index into value and state."""
        return torch.from_numpy(slots).to(self.value.device)

    def clock_at_read(self, slots: Ints) -> Ints:
        """c_c that each copy will have at its next read: one more where a batch in flight updates it; -1: no row."""
        held = self.start[slots] >= 0
        return np.where(held, self.current[slots] + self.reading[slots], NONE)

    def put(self, slots: Ints, rows: Fetched) -> None:
        """Fetch (Algorithm 1): the copies are the owner's rows, c_s = c_c = c_g."""
        if not len(slots):
            return
        at = self._at(slots)
        put_rows(self.value, at, rows.value)
        put_rows(self.state, at, rows.state)
        if self.held_back:
            put_rows(self._base_value, at, rows.value)
            put_rows(self._base_state, at, rows.state)
        self.start[slots] = self.current[slots] = rows.clock
        self.noticed[slots] = NONE
        if self.audit:
            self.applied[slots] = rows.applied

    def rebase(self, slots: Ints, rows: Fetched) -> None:
        """Copies fetched anew: the owner's rows with what is still held back on top.

        The pending step of an Adagrad copy is rescaled to the merged state, just as a push would be.
        """
        if not len(slots):
            return
        at, eps = self._at(slots), self._optimizer.eps
        pushed, pending_state = self._held_back(at)
        pending = self.pending(slots)
        self.put(slots, rows)
        merged = rows.state + pending_state
        put_rows(self.value, at, rows.value + decode(pushed, merged, eps))
        put_rows(self.state, at, merged)
        self.current[slots] += pending

    def pending(self, slots: Ints) -> Ints:
        """Updates that each copy holds back."""
        held: Ints = self.current[slots] - self.start[slots]
        return held

    def dirty(self) -> Ints:
        """Slots that hold back updates, or what a threshold kept of them, ascending."""
        return np.flatnonzero(
            (self.current > self.start) | (self.age > 0) if self.threshold else self.current > self.start
        )

    def dirty_among(self, slots: Ints) -> Ints:
        """Those of `slots`."""
        held = self.pending(slots) > 0
        return slots[held | (self.age[slots] > 0) if self.threshold else held]

    def pushes(self, slots: Ints, rows: Ints, *, whole: bool = True) -> Request:
        """The pending updates of `slots`, which hold `rows`; they stay pending. `whole`: also below the threshold."""
        request = Request.empty(self.value.shape[1], self.state.shape[1], self.value.device)
        if len(slots) == 0:
            request.push_value = self._codec.pushes(request.push_value)
            return request
        request.push_rows = torch.from_numpy(rows)
        value, request.push_state = self._held_back(self._at(slots))
        if self.threshold and not whole:
            value.masked_fill_(self._waits(slots, self.threshold), 0)
        request.push_value = self._codec.pushes(value)
        request.push_clock = torch.from_numpy(self.current[slots])
        if self._counted:
            request.push_updates = torch.from_numpy(self.pending(slots))
        return request

    def _held_back(self, at: Tensor) -> tuple[Tensor, Tensor]:
        """Pending updates of the slots `at` [n]: value [n, D] as store/difference.py encodes it, and state [n, S]."""
        state = self.state.index_select(0, at)
        step = self.value.index_select(0, at).sub_(self._base_value.index_select(0, at))
        return encode(step, state, self._optimizer.eps), state - self._base_state.index_select(0, at)

    def _waits(self, slots: Ints, threshold: Threshold) -> Tensor:
        """Which values of `slots` wait: [n, D] bool, NaN never. Steps count, not what travels in their place."""
        at, due = self._at(slots), torch.from_numpy(self._due(slots, threshold))
        step = self.value.index_select(0, at).sub_(self._base_value.index_select(0, at))
        return (step.abs() < threshold.of(step)) & ~due.to(step.device).unsqueeze(1)

    def _due(self, slots: Ints, threshold: Threshold) -> NDArray[np.bool_]:
        """Where what waits must be sent whole."""
        due: NDArray[np.bool_] = self.age[slots] >= threshold.settings.max_age
        return due

    def pushed(self, slots: Ints, request: Request) -> None:
        """`slots` were pushed, last in `request`: the copies become what the owner makes of that.

        Bit for bit, where nobody else changed the row since it was fetched (Owner merges with the same operations);
        where a codec rounds fetches, up to that rounding. What follows is held back anew, and so is what the codec
        kept from this push.
        """
        if not len(slots):
            return
        at, last = self._at(slots), slice(len(request.push_rows) - len(slots), None)
        state = self._base_state.index_select(0, at) + request.push_state[last]
        step = decode(self._codec.read_pushes(request.push_value[last]), state, self._optimizer.eps)
        value = self._base_value.index_select(0, at) + step
        for tensor in (self._base_value, self.value) if self._codec.exact else (self._base_value,):
            put_rows(tensor, at, value)
        for tensor in (self._base_state, self.state):
            put_rows(tensor, at, state)
        if self.audit:
            self.applied[slots] += self.pending(slots)
        self.start[slots] = self.current[slots]
        if self.threshold:
            keeps = ~self._due(slots, self.threshold) & (self.threshold.value > 0)
            self.age[slots] = np.where(keeps, self.age[slots] + 1, 0)
            self.age_max = max(self.age_max, int(self.age[slots].max()))

    def bases(self, slots: Ints) -> Fetched:
        """The rows as they were last fetched or pushed."""
        at = self._at(slots)
        applied = self.applied[slots] if self.audit else np.zeros(len(slots), np.int64)
        value, state = self._base_value.index_select(0, at), self._base_state.index_select(0, at)
        return Fetched(value, state, self.start[slots], applied)

    def doubt_read(self) -> None:
        """The batch admitted is not computed: doubt its copies until their next read.

        Owners took it that the batch updates what it reads (store/directory.py), and would warn too late.
        """
        self.noticed[self.reading] = np.maximum(self.noticed[self.reading], 0)
        self.reading[:] = False

    def drop(self, slots: Ints) -> None:
        """Forget the copies in `slots`."""
        self.start[slots] = self.current[slots] = self.noticed[slots] = NONE
        self.reading[slots] = False
        if self.threshold:
            self.age[slots] = 0

    def grow(self, value: Tensor, state: Tensor) -> None:
        """Move to larger memory, whose first slots hold what the present ones do."""
        more = len(value) - len(self.value)
        self.value, self.state = value, state
        for name, array in self.arrays().items():
            filler = np.full(more, NONE if array.dtype == np.int64 else False, array.dtype)
            setattr(self, name, np.concatenate([array, filler]))
        if self.held_back:
            for name, like in ("_base_value", value), ("_base_state", state):
                old, grown = getattr(self, name), _zeros_like(like)
                grown[: len(old)] = old
                setattr(self, name, grown)

    def tensors(self) -> dict[str, Tensor]:
        """Everything per slot that lies where the kernel computes."""
        tensors = {"value": self.value, "state": self.state}
        if self.held_back:
            tensors |= {"base_value": self._base_value, "base_state": self._base_state}
        return tensors

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Everything per slot that lies on the host, by attribute."""
        names = ["start", "current", "noticed", "reading"]
        names += ["applied"] if self.audit else []
        names += ["age"] if self.threshold else []
        return {name: getattr(self, name) for name in names}

    def state_dict(self, slots: Ints) -> dict[str, Any]:
        """Copies of what is in `slots`."""
        at = self._at(slots)
        kept = {"threshold": self.threshold.state_dict(), "age_max": self.age_max} if self.threshold else {}
        return {
            **kept,
            **{name: tensor.index_select(0, at) for name, tensor in self.tensors().items()},
            **{name: torch.from_numpy(array[slots]) for name, array in self.arrays().items()},
        }

    def load_state_dict(self, slots: Ints, state: dict[str, Any]) -> None:
        """Put into `slots` what `state_dict` gave."""
        at = self._at(slots)
        for name, tensor in self.tensors().items():
            put_rows(tensor, at, state[name].to(tensor.device))
        for name, array in self.arrays().items():
            array[slots] = state[name].numpy()
        if self.threshold:
            self.threshold.load_state_dict(state["threshold"])
            self.age_max = state["age_max"]


def _zeros_like(tensor: Tensor) -> Tensor:
    """Memory that is taken slot by slot, when one is first used."""
    return lazy_zeros(tuple(tensor.shape), tensor.dtype, tensor.device)
