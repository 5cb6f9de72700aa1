"""Which rows leave the cache: exact LRU, and LFU with a cap (HET section 4: LRU, LFU, light LFU).

Both keep queues of uses and drop outdated entries when they meet them, so that a use and a victim
cost O(1) amortised, whatever the capacity. Uses are reported once per step and slot, in the order of
the slots' last lookups in the step's batch; this order breaks ties, so that victims are determined:

- lru: the row whose last lookup is longest ago.
- lfu: the row used in the fewest steps since it was fetched, counting no further than `HOT`; among
  equals the one that reached its count first. Rows at HOT are no longer counted and leave last.
"""

from collections import deque
from typing import Any, Protocol

import numpy as np
import torch

from hetrain.errors import ConfigError
from hetrain.store.index import Ints

HOT = 64  # uses after which light LFU counts a row no longer
SCAN = 256  # least entries looked at together


class Policy(Protocol):
    """What the cache asks of an eviction policy."""

    def used(self, slots: Ints) -> None:
        """One step used these distinct slots [u], least recent lookup first."""
        ...

    def victims(self, count: int) -> Ints:
        """The next `count` slots to leave, in order; they are forgotten."""
        ...

    def clear(self) -> None:
        """Forget every slot."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Everything that decides on later victims."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what `state_dict` gave."""
        ...


def make_policy(name: str, slots: int) -> Policy:
    """The policy `name` for slots 0 .. `slots`. Raises ConfigError for an unknown name."""
    if name == "lru":
        return Lru(slots)
    if name == "lfu":
        return Lfu(slots)
    raise ConfigError(f"consistency.cache.policy={name}: expected lru or lfu")


class _UseQueue:
    """First in, first out over (slot, stamp); an entry counts while `stamp_of[slot]` is still its stamp."""

    def __init__(self, stamp_of: Ints) -> None:
        self._stamp_of = stamp_of
        self._chunks: deque[tuple[Ints, int]] = deque()
        self._start = 0  # entries of the first chunk already taken
        self.entries = 0

    def push(self, slots: Ints, stamp: int) -> None:
        """Append distinct `slots`, whose stamp is `stamp` now."""
        if len(slots):
            self._chunks.append((slots, stamp))
            self.entries += len(slots)

    def pop(self, count: int) -> Ints:
        """Up to `count` of the oldest valid slots; fewer only when the queue has no more."""
        found: list[Ints] = []
        while count and self._chunks:
            slots, stamp = self._chunks[0]
            block = slots[self._start : self._start + max(SCAN, 2 * count)]
            valid = np.flatnonzero(self._stamp_of[block] == stamp)
            taken = len(block)
            if len(valid) > count:
                taken = int(valid[count - 1]) + 1
                valid = valid[:count]
            found.append(block[valid])
            count -= len(valid)
            self._advance(taken, len(slots))
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def _advance(self, taken: int, size: int) -> None:
        self._start += taken
        self.entries -= taken
        if self._start == size:
            self._chunks.popleft()
            self._start = 0

    def compact(self) -> None:
        """Drop the entries that no longer count."""
        kept = [(part, stamp) for slots, stamp in self.chunks() if len(part := self._valid(slots, stamp))]
        self._chunks, self._start = deque(kept), 0
        self.entries = sum(len(part) for part, _ in kept)

    def chunks(self) -> list[tuple[Ints, int]]:
        """All entries left, oldest first."""
        parts = list(self._chunks)
        if parts:
            parts[0] = (parts[0][0][self._start :], parts[0][1])
        return parts

    def _valid(self, slots: Ints, stamp: int) -> Ints:
        valid: Ints = slots[self._stamp_of[slots] == stamp]
        return valid


class _Queued:
    """What both policies share: a stamp per slot, queues by class, and compaction when entries pile up."""

    def __init__(self, slots: int, classes: int) -> None:
        self._step = 0
        self._stamp = np.full(slots, -1, np.int64)  # step of the slot's entry that counts; -1: none
        self._queues = [_UseQueue(self._stamp) for _ in range(classes)]

    def _tidy(self) -> None:
        """Once there are more outdated entries than slots, drop them: O(1) per entry, amortised."""
        if sum(queue.entries for queue in self._queues) > 2 * len(self._stamp):
            for queue in self._queues:
                queue.compact()

    def victims(self, count: int) -> Ints:
        """From the lowest class up, oldest entry first."""
        found = []
        for queue in self._queues:
            if count == 0:
                break
            slots = queue.pop(count)
            self._stamp[slots] = -1
            count -= len(slots)
            found.append(slots)
        if count:
            raise RuntimeError(f"{count} rows to evict, but no use of them is known")
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def clear(self) -> None:
        self._stamp[:] = -1
        for queue in self._queues:
            queue.compact()

    def state_dict(self) -> dict[str, Any]:
        entries: dict[str, list[Ints]] = {"slots": [], "stamps": [], "classes": []}
        for number, queue in enumerate(self._queues):
            queue.compact()
            for slots, stamp in queue.chunks():
                entries["slots"].append(slots)
                entries["stamps"].append(np.full(len(slots), stamp))
                entries["classes"].append(np.full(len(slots), number))
        empty = np.empty(0, np.int64)
        # tensors: a checkpoint is read without unpickling anything else
        arrays = {name: torch.from_numpy(np.concatenate([empty, *parts])) for name, parts in entries.items()}
        return {"step": self._step, **arrays}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.clear()
        self._step = int(state["step"])
        slots, stamps, classes = (np.asarray(state[name]) for name in ("slots", "stamps", "classes"))
        self._stamp[slots] = stamps
        cuts = np.flatnonzero((np.diff(stamps) != 0) | (np.diff(classes) != 0)) + 1
        for part in np.split(np.arange(len(slots)), cuts):
            if len(part):
                self._queues[int(classes[part[0]])].push(slots[part], int(stamps[part[0]]))


class Lru(_Queued):
    """Least recently used, exact to the order of lookups."""

    def __init__(self, slots: int) -> None:
        super().__init__(slots, classes=1)

    def used(self, slots: Ints) -> None:
        """Every use is a new entry at the queue's end."""
        self._step += 1
        self._stamp[slots] = self._step
        self._queues[0].push(slots, self._step)
        self._tidy()


class Lfu(_Queued):
    """Least frequently used, light: class c holds rows used in c + 1 steps, the last class HOT or more."""

    def __init__(self, slots: int) -> None:
        super().__init__(slots, classes=HOT)
        self._class = np.full(slots, -1, np.int8)  # of the slot; -1: not used yet

    def used(self, slots: Ints) -> None:
        """A use below HOT is a new entry in the next class's queue."""
        self._step += 1
        rising = slots[self._class[slots] < HOT - 1]
        reached = self._class[rising] + np.int8(1)
        self._class[rising] = reached
        self._stamp[rising] = self._step
        by_class = rising[np.argsort(reached, kind="stable")]  # radix sort: linear for 8 bits
        ends = np.cumsum(np.bincount(reached, minlength=HOT))
        for number in np.unique(reached):
            first = ends[number - 1] if number else 0
            self._queues[number].push(by_class[first : ends[number]], self._step)
        self._tidy()

    def victims(self, count: int) -> Ints:
        """As the base class; a victim's count starts anew."""
        slots = super().victims(count)
        self._class[slots] = -1
        return slots

    def clear(self) -> None:
        """Forget every slot and its count."""
        super().clear()
        self._class[:] = -1

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what `state_dict` gave."""
        super().load_state_dict(state)
        self._class[np.asarray(state["slots"])] = np.asarray(state["classes"])
