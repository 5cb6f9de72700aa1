"""Local search: parts change places, and tables their cuts, while the slowest ranks get faster."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetrain.planner.cut import NODE, RANK
from hetrain.planner.search.arrays import Floats, Ints
from hetrain.planner.search.place import Layout

EXCHANGES = 400  # of parts between two ranks
TRIALS = 3000  # of a table with another cut
SHARP = 24  # the power of ranks' loads that is summed: the slowest count most, but all of them count
ENOUGH = 1e-6  # a relative gain below it is none


@dataclass
class _Parts:
    """Parts of one rank each [P]: their table, milliseconds, (hbm, ddr) bytes [2, P] and rank."""

    table: Ints
    cost: Floats
    held: NDArray[np.int64]
    rank: Ints
    on: NDArray[np.bool_]  # [tables, W]: which ranks hold a part of a table, as two on one rank gain nothing


def improve(layout: Layout, goal: float) -> None:
    """Exchange parts and re-cut tables until nothing gains, `goal` ms is reached or the trials are used up."""
    trials = TRIALS
    while layout.slowest > goal:
        _exchange(layout, goal)
        before = trials
        trials = _recut(layout, goal, trials)
        if trials <= 0 or trials == before:
            return


def _exchange(layout: Layout, goal: float) -> None:
    parts = _parts(layout)
    for _ in range(EXCHANGES):
        slowest = int(layout.ms.argmax())
        if layout.slowest <= goal or not _one_exchange(layout, parts, slowest):
            return


def _parts(layout: Layout) -> _Parts:
    table, cost, hbm, ddr, rank = [], [], [], [], []
    on = np.zeros((len(layout.places), layout.world), dtype=np.bool_)
    for t, places in enumerate(layout.places):
        cut = layout.of(t)
        if cut.place != RANK:
            continue
        on[t, places] = True
        for place, part in zip(places, layout.parts[t], strict=True):
            table.append(t)
            cost.append(part.cost)
            hbm.append(part.hbm)
            ddr.append(part.ddr)
            rank.append(place)
    held = np.array([hbm, ddr], dtype=np.int64)
    return _Parts(np.array(table, dtype=np.int64), np.array(cost), held, np.array(rank, dtype=np.int64), on)


def _one_exchange(layout: Layout, parts: _Parts, rank: int) -> bool:
    """Move a part off `rank`, or swap it for a smaller one, as leaves the two ranks fastest; False: nothing helps."""
    mine = np.flatnonzero(parts.rank == rank)
    if not len(mine):
        return False
    moved, move = _best(_moves(layout, parts, mine, rank))
    others = np.flatnonzero(parts.rank != rank)
    swapped, swap = _best(_swaps(layout, parts, mine, others, rank)) if len(others) else (np.inf, (0, 0))
    if min(moved, swapped) >= layout.slowest * (1 - ENOUGH):
        return False
    if moved <= swapped:
        _shift(layout, parts, int(mine[move[0]]), move[1])
    else:
        part, other = int(mine[swap[0]]), int(others[swap[1]])
        target = int(parts.rank[other])
        _shift(layout, parts, other, rank)
        _shift(layout, parts, part, target)
    return True


def _best(after: Floats) -> tuple[float, tuple[int, int]]:
    row, column = np.unravel_index(int(after.argmin()), after.shape)
    return float(after[row, column]), (int(row), int(column))


def _moves(layout: Layout, parts: _Parts, mine: Ints, rank: int) -> Floats:
    """The slower of the two ranks after moving each part of `mine` to each rank [M, W]; infinite where it cannot."""
    cost = parts.cost[mine][:, None]
    after = np.maximum(layout.ms[rank] - cost, layout.ms[None, :] + cost)
    room = layout.limit - layout.held  # [2, W]
    full = (parts.held[:, mine, None] > room[:, None, :]).any(0) | parts.on[parts.table[mine]]
    return np.where(full, np.inf, after)


def _swaps(layout: Layout, parts: _Parts, mine: Ints, others: Ints, rank: int) -> Floats:
    """The slower of the two ranks after swapping each part of `mine` with each of `others` [M, N]."""
    less = parts.cost[mine][:, None] - parts.cost[others][None, :]
    where = parts.rank[others]
    after = np.maximum(layout.ms[rank] - less, layout.ms[where][None, :] + less)
    more = parts.held[:, mine, None] - parts.held[:, None, others]  # bytes that go to the other rank
    room = layout.limit - layout.held
    full = (more > room[:, where][:, None, :]).any(0) | (-more > room[:, rank][:, None, None]).any(0)
    full |= parts.on[parts.table[mine]][:, where] | parts.on[parts.table[others], rank][None, :]
    return np.where(full | (less <= 0), np.inf, after)


def _shift(layout: Layout, parts: _Parts, part: int, target: int) -> None:
    table, source = int(parts.table[part]), int(parts.rank[part])
    layout.add(table, target, layout.take(table, source))
    parts.rank[part] = target
    parts.on[table, source], parts.on[table, target] = False, True


def _recut(layout: Layout, goal: float, trials: int) -> int:
    """Give a table of the slowest rank the cut that helps most; the trials left, unchanged where none helps."""
    begun, ref = trials, max(layout.slowest, 1e-30)
    now = _pressure(layout, ref)
    for table in _suspects(layout, int(layout.ms.argmax())):
        kept = layout.kept(table)
        best, best_cut = now * (1 - ENOUGH), -1
        for cut in range(len(layout.menu.cuts[layout.menu.kind_of[table]])):
            if cut == kept[0] and layout.of(table).place != NODE:
                continue
            trials -= 1
            layout.remove(table)
            if layout.put(table, cut) and (pressure := _pressure(layout, ref)) < best:
                best, best_cut = pressure, cut
            layout.restore(table, kept)
        if best_cut >= 0:
            layout.remove(table)
            layout.put(table, best_cut)
            return trials if layout.slowest > goal else 0
        if trials <= 0:
            return 0
    return begun


def _pressure(layout: Layout, ref: float) -> float:
    return float(((layout.ms / ref) ** SHARP).sum())


def _suspects(layout: Layout, rank: int) -> list[int]:
    """Tables that load `rank`, those of the largest load first, one of each kind and cut."""
    node = rank // layout.local
    seen: dict[tuple[int, int], int] = {}
    for table, places in enumerate(layout.places):
        cut = layout.of(table)
        here = rank if cut.place == RANK else node if cut.place == NODE else 0
        if here in places:
            seen.setdefault((int(layout.menu.kind_of[table]), int(layout.cut[table])), table)
    return sorted(seen.values(), key=lambda t: -layout.of(t).cost)
