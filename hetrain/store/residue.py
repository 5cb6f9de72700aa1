"""What a threshold kept from gradients that are pushed at once: it waits here, by row, in bounded memory.

A row that is here once stays, and takes its next gradient on top; the rows read most come first and so are here. A row
that finds no room travels whole.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from hetrain.store.index import HashIndex
from hetrain.store.messages import Request
from hetrain.store.row_codec import RowCodec
from hetrain.store.space import RowSpace
from hetrain.store.thinning import put_rest, thinned, with_waiting
from hetrain.store.threshold import Dct, Threshold
from hetrain.store.zeros import lazy_zeros

RESIDUE_BYTES = 1 << 26  # of a worker, per embedding dim


class Residue:
    """One worker's, for the rows of one embedding dim. Row numbers are global, int64, on the CPU."""

    def __init__(self, space: RowSpace, codec: RowCodec, dct: Dct, device: torch.device) -> None:
        """`device`: of the gradients."""
        self._codec, self._max_age, self.threshold = codec, dct.max_age, Threshold(dct)
        self.capacity_rows = min(space.rows, max(1, RESIDUE_BYTES // (4 * space.dim)))
        self._value = lazy_zeros((self.capacity_rows, space.dim), torch.float32, device)
        self._rows = np.empty(self.capacity_rows, np.int64)  # of each slot used, the first ones
        self._age = np.zeros(self.capacity_rows, np.int32)  # pushes that kept something since a whole one
        self.age_max = self._used = 0
        self.clear()

    def clear(self) -> None:
        """Nothing waits: all of it was pushed."""
        self._age[: self._used] = 0
        self._index, self._used = HashIndex(0), 0

    def take(self, rows: Tensor, gradient: Tensor) -> Tensor:
        """What to push, encoded, of distinct `rows` [U] whose gradient [U, D] comes on top of what waits."""
        slots = self._slots(rows.numpy())
        here = slots >= 0
        held = slots[here]
        total = with_waiting(gradient, self._value, slots)
        whole = ~here
        whole[here] = due = self._age[held] >= self._max_age
        pushed = self._codec.pushes(thinned(total, self.threshold.of(total), whole))
        put_rest(self._value, slots, total, self._codec.read_pushes(pushed))
        self._age[held] = np.where(due | (self.threshold.value == 0), 0, self._age[held] + 1)
        self.age_max = max(self.age_max, int(self._age[held].max(initial=0)))
        self.threshold.count_step()
        return pushed

    def _slots(self, rows: Any) -> Any:
        """Where each of `rows` [U] waits, -1 for those that find no room."""
        slots = self._index.find(rows)
        new = np.flatnonzero(slots < 0)[: self.capacity_rows - self._used]
        if len(new):
            first, self._used = self._used, self._used + len(new)
            slots[new], _ = self._index.insert(rows[new], np.arange(first, self._used))
            self._rows[first : self._used] = rows[new]
            self._value[first : self._used] = 0
        return slots

    def waiting(self) -> tuple[Tensor, Tensor]:
        """Rows [n] something waits for, and what [n, D]; changes nothing."""
        slots = np.flatnonzero(self._age[: self._used])
        return torch.from_numpy(self._rows[slots]), self._value[torch.from_numpy(slots).to(self._value.device)]

    @property
    def count(self) -> int:
        """Rows something waits for."""
        return int(np.count_nonzero(self._age[: self._used]))

    def merged(self, request: Request) -> Request:
        """The pushes of `request` with everything that waits on top; changes nothing."""
        rows, waits = self.waiting()
        pushed = self._codec.read_pushes(request.push_value)
        distinct, place = torch.unique(torch.cat([request.push_rows, rows]), return_inverse=True)
        total = pushed.new_zeros(len(distinct), pushed.shape[1])
        total.index_add_(0, place.to(total.device), torch.cat([pushed, waits]))
        whole = Request.empty(pushed.shape[1], 0)
        whole.push_rows, whole.push_value = distinct, self._codec.pushes(total)
        whole.push_state = total.new_empty(len(distinct), 0)
        for name in ("push_clock", "push_updates"):
            if len(numbers := getattr(request, name)):
                counts = torch.zeros_like(distinct)
                counts[place[: len(numbers)]] = numbers
                setattr(whole, name, counts)
        return whole

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        used = self._used
        return {
            "rows": torch.from_numpy(self._rows[:used].copy()),
            "value": self._value[:used].clone(),
            "age": torch.from_numpy(self._age[:used].copy()),
            "age_max": self.age_max,
            "threshold": self.threshold.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what `state_dict` gave."""
        self.clear()
        self._used = used = len(state["rows"])
        self._rows[:used] = state["rows"].numpy()
        self._index.assign(self._rows[:used], np.arange(used))
        self._value[:used] = state["value"].to(self._value.device)
        self._age[:used] = state["age"].numpy()
        self.age_max = state["age_max"]
        self.threshold.load_state_dict(state["threshold"])
