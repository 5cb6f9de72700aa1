"""Which rows leave the cache (HET section 4): exact LRU, exact LFU, and light LFU.

Uses are reported once per step and slot, in the order of the slots' last lookups in the step's batch; this order
breaks ties, so that victims are determined:

- lru: the row whose last lookup is longest ago.
- lfu: the row used in the fewest steps since it was fetched; among equals the one that reached its count first.
- light_lfu: as lfu, but a row used in `HOT` steps has a permanent place and is no longer counted: it leaves only
  when nothing else can, in the order in which rows became hot.

All slots lie in one doubly linked list, next victim first: `links` [slots + 1, 2] holds (before, after), its last
entry being both ends. LFU keeps, per count that occurs, where in the list the slots of that count end; a use moves
a slot behind the last one of the next count. So a use and a victim cost O(1), whatever the capacity. Victims that
are spared stay where they are in the list, at the cost of stepping over them.
"""

from typing import Any, Protocol

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray

from hetrain.errors import ConfigError
from hetrain.store.index import Ints

HOT = 64  # steps after which light LFU counts a row no longer
NO_LIMIT = np.iinfo(np.int64).max
Mask = NDArray[np.bool_]
_NOBODY = np.empty(0, np.bool_)


class Policy(Protocol):
    """What the cache asks of an eviction policy."""

    def used(self, slots: Ints) -> None:
        """One step used these distinct slots [u], least recent lookup first."""
        ...

    def victims(self, count: int, spared: Mask | None = None) -> Ints:
        """The next `count` slots to leave, in order, or fewer when no more are known; they are forgotten.

        Slots marked in `spared` [slots] are passed over and keep their place.
        """
        ...

    def clear(self) -> None:
        """Forget every slot."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Everything that decides on later victims, as tensors."""
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
    if name == "light_lfu":
        return LightLfu(slots)
    raise ConfigError(f"consistency.cache.policy={name}: expected lru, lfu or light_lfu")


class Lru:
    """Least recently used: a use moves the slot to the end of the list. 8 bytes a slot."""

    def __init__(self, slots: int) -> None:
        self._links = np.empty((slots + 1, 2), np.int32)
        self.clear()

    def used(self, slots: Ints) -> None:
        """See Policy."""
        _to_end(self._links, slots)

    def victims(self, count: int, spared: Mask | None = None) -> Ints:
        """See Policy."""
        slots: Ints = _take(self._links, _NOBODY if spared is None else spared, count)
        return slots

    def clear(self) -> None:
        """See Policy."""
        _clear_list(self._links)

    def state_dict(self) -> dict[str, Any]:
        """See Policy."""
        return {"slots": torch.from_numpy(_order(self._links))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See Policy."""
        self.clear()
        self.used(state["slots"].numpy())


class Lfu:
    """Least frequently used, every use counted. 12 bytes a slot, and 40 per distinct count."""

    def __init__(self, slots: int, limit: int = NO_LIMIT) -> None:
        """`limit`: counts stop there."""
        self._limit = limit
        self._links = np.empty((slots + 1, 2), np.int32)
        self._group = np.empty(slots, np.int32)  # of each slot: its count's entry in `_groups`
        # there are no more counts than slots, but for entry 0, which stands before all, and one being made; pages
        # of entries that never occur are not touched and take no memory
        self._groups = np.empty((min(slots, limit) + 2, 5), np.int64)
        self._unused = np.empty(2, np.int64)  # the last entry given back (0: none), and the first one never taken
        self.clear()

    def used(self, slots: Ints) -> None:
        """See Policy."""
        _count(self._links, self._group, self._groups, self._unused, slots, self._limit)

    def victims(self, count: int, spared: Mask | None = None) -> Ints:
        """See Policy. A victim's count starts anew."""
        mask = _NOBODY if spared is None else spared
        slots: Ints = _take_counted(self._links, self._group, self._groups, self._unused, mask, count)
        return slots

    def clear(self) -> None:
        """See Policy."""
        _clear_list(self._links)
        self._group[:] = 0
        self._groups[0] = (0, len(self._group), 0, 0, 0)
        self._unused[:] = (0, 1)

    def state_dict(self) -> dict[str, Any]:
        """See Policy."""
        slots = _order(self._links)
        counts = self._groups[self._group[slots], _COUNT]
        return {"slots": torch.from_numpy(slots), "counts": torch.from_numpy(counts)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See Policy."""
        self.clear()
        slots, counts = state["slots"].numpy(), state["counts"].numpy()
        _rebuild(self._links, self._group, self._groups, self._unused, slots, counts)


class LightLfu(Lfu):
    """Least frequently used, counting no further than `HOT`."""

    def __init__(self, slots: int) -> None:
        super().__init__(slots, HOT)


# -- the list -------------------------------------------------------------------------------------


def _clear_list(links: NDArray[np.int32]) -> None:
    """Nothing in the list: the ends meet, and -1 marks a slot outside."""
    links[:] = -1
    links[-1] = len(links) - 1


@njit(cache=True, nogil=True)
def _unlink(links: Any, slot: Any) -> None:
    before, after = links[slot, 0], links[slot, 1]
    links[before, 1] = after
    links[after, 0] = before


@njit(cache=True, nogil=True)
def _link(links: Any, before: Any, slot: Any) -> None:
    after = links[before, 1]
    links[slot, 0], links[slot, 1] = before, after
    links[before, 1] = slot
    links[after, 0] = slot


@njit(cache=True, nogil=True)
def _to_end(links: Any, slots: Any) -> None:
    end = len(links) - 1
    for slot in slots:
        if links[slot, 0] >= 0:
            _unlink(links, slot)
        _link(links, links[end, 0], slot)


@njit(cache=True, nogil=True)
def _first(links: Any, spared: Any, count: Any) -> Any:
    """The first `count` slots that are not spared."""
    end, found = len(links) - 1, 0
    out = np.empty(max(0, min(count, end)), np.int64)
    slot = links[end, 1]
    while found < len(out) and slot != end:
        if len(spared) == 0 or not spared[slot]:
            out[found] = slot
            found += 1
        slot = links[slot, 1]
    return out[:found]


@njit(cache=True, nogil=True)
def _take(links: Any, spared: Any, count: Any) -> Any:
    slots = _first(links, spared, count)
    for slot in slots:
        _unlink(links, slot)
        links[slot, 0] = -1
    return slots


@njit(cache=True, nogil=True)
def _order(links: Any) -> Any:
    return _first(links, np.empty(0, np.bool_), len(links) - 1)


# -- the groups of slots of equal count, in a list of their own -----------------------------------

_COUNT, _LAST, _SIZE, _BEFORE, _AFTER = range(5)  # columns: last slot of the count, slots of it, neighbours


@njit(cache=True, nogil=True)
def _group_after(groups: Any, unused: Any, before: Any, count: Any) -> Any:
    """A new empty group for `count` behind group `before`; slots go behind that one's last."""
    group = unused[0]
    if group:
        unused[0] = groups[group, _AFTER]
    else:
        group = unused[1]
        unused[1] += 1
    after = groups[before, _AFTER]
    groups[group, _COUNT], groups[group, _LAST], groups[group, _SIZE] = count, groups[before, _LAST], 0
    groups[group, _BEFORE], groups[group, _AFTER] = before, after
    groups[before, _AFTER] = group
    groups[after, _BEFORE] = group
    return group


@njit(cache=True, nogil=True)
def _leave(links: Any, groups: Any, unused: Any, group: Any, slot: Any) -> None:
    """`slot`, still linked, belongs to `group` no more."""
    groups[group, _SIZE] -= 1
    if groups[group, _LAST] == slot:
        groups[group, _LAST] = links[slot, 0]
    if groups[group, _SIZE] == 0:
        before, after = groups[group, _BEFORE], groups[group, _AFTER]
        groups[before, _AFTER] = after
        groups[after, _BEFORE] = before
        groups[group, _AFTER] = unused[0]
        unused[0] = group


@njit(cache=True, nogil=True)
def _count(links: Any, group: Any, groups: Any, unused: Any, slots: Any, limit: Any) -> None:
    """A use of each slot: behind the last slot of the next count."""
    for slot in slots:
        old = np.int64(group[slot])  # 0 for a slot that is new: the entry before all
        count = groups[old, _COUNT]
        if count == limit:
            continue
        new = groups[old, _AFTER]
        if new == 0 or groups[new, _COUNT] != count + 1:
            new = _group_after(groups, unused, old, count + 1)
        last = groups[new, _LAST]
        if old:
            _leave(links, groups, unused, old, slot)
        if last != slot:  # the last of its count, and nobody has the next: it is in place already
            if old:
                _unlink(links, slot)
            _link(links, last, slot)
        groups[new, _LAST] = slot
        groups[new, _SIZE] += 1
        group[slot] = new


@njit(cache=True, nogil=True)
def _take_counted(links: Any, group: Any, groups: Any, unused: Any, spared: Any, count: Any) -> Any:
    slots = _first(links, spared, count)
    for slot in slots:
        _leave(links, groups, unused, np.int64(group[slot]), slot)
        _unlink(links, slot)
        links[slot, 0] = -1
        group[slot] = 0
    return slots


@njit(cache=True, nogil=True)
def _rebuild(links: Any, group: Any, groups: Any, unused: Any, slots: Any, counts: Any) -> None:
    """Into an empty list: `slots` in order, their counts ascending."""
    current = np.int64(0)
    for i in range(len(slots)):
        if counts[i] != groups[current, _COUNT]:
            current = _group_after(groups, unused, current, counts[i])
        _link(links, groups[current, _LAST], slots[i])
        groups[current, _LAST] = slots[i]
        groups[current, _SIZE] += 1
        group[slots[i]] = current
