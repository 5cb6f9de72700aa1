"""What parts are worth, by their table and size, where no rank can hold parts that are worth more than 1.

The parts that a choice of cuts asks for fill ranks by patterns (Gilmore and Gomory, 1961); the dual of that linear
program values them, and where they are worth more than the ranks there are, the choice has no plan. Parts of one table
lie on different ranks, so that a pattern has at most one of them. Sizes that were not asked for are then given the most
that they may be worth (lifting), so that the values speak of other choices, too.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hetrain.planner.search.arrays import Floats, Ints

ITERATIONS = 200  # linear programs for one demand
TURNS = 4  # orders of the kinds, each with a best pattern of its own
MANY = 20  # tables of a kind that may have a part on one rank, roughly
OVERHEAD = 100  # rows of a linear program that setting one up takes, roughly
SURE = 1e-6
TINY = 1e-12

Part = tuple[int, int]  # kind of table, size in steps of the grid
Items = Sequence[tuple[int, float]]  # size, value


@dataclass(frozen=True)
class Valued:
    """`ranks`: what the parts asked for are worth; `values` of them, by kind and size; `patterns` that were tried."""

    ranks: float
    values: dict[Part, float]
    patterns: list[tuple[Part, ...]]
    work: int  # rows of linear programs


def with_items(best: Floats, items: Items) -> Floats:
    """The most that a room may be worth [room], with at most one of the items of one more table."""
    new, capacity = best.copy(), len(best) - 1
    for size, value in items:
        if value > TINY and 0 < size <= capacity:
            np.maximum(new[size:], best[: capacity + 1 - size] + value, out=new[size:])
    return new


def values_of(demand: Mapping[Part, float], copies: Ints, capacity: int, known: Iterable[tuple[Part, ...]]) -> Valued:
    """Values of the parts asked for that make them worth most; copies: [C] tables of each kind.

    `known` are patterns of earlier demands, which spare some of the work.
    """
    from scipy.optimize import linprog

    parts = sorted(part for part in demand if part[1] > 0)
    if not parts:
        return Valued(0.0, {}, [], 0)
    at = {part: k for k, part in enumerate(parts)}
    asked = np.array([demand[part] for part in parts])
    patterns: dict[tuple[Part, ...], None] = dict.fromkeys((part,) for part in parts)
    patterns.update(dict.fromkeys(kept for p in known if (kept := tuple(part for part in p if part in at))))
    worth, values, work = 1.0, np.zeros(len(parts)), 0
    each = OVERHEAD + TURNS * tables_on_a_rank({kind for kind, _ in parts}, copies)
    for _ in range(ITERATIONS):
        matrix, work = np.zeros((len(patterns), len(parts))), work + len(patterns) + each
        for row, pattern in enumerate(patterns):
            np.add.at(matrix[row], [at[part] for part in pattern], 1.0)
        values = np.maximum(linprog(-asked, matrix, np.ones(len(patterns)), bounds=(0, None), method="highs").x, 0.0)
        worth, found = _best(dict(zip(parts, values.tolist(), strict=True)), copies, capacity)
        before = len(patterns)
        patterns.update(dict.fromkeys(found))
        if worth <= 1 + SURE or len(patterns) == before:
            break
    values /= max(worth, 1.0)
    return Valued(float(asked @ values), dict(zip(parts, values.tolist(), strict=True)), list(patterns), work)


def lifted(values: Mapping[Part, float], sizes: Mapping[int, Ints], copies: Ints, capacity: int) -> dict[Part, float]:
    """Values of all `sizes` (ascending) of each kind, none less than before; still no rank holds more than 1.

    A kind of one table: what the best of all others leaves beside a part of the size, one kind after the other. A kind
    of several: the value of its largest part that is no larger.
    """
    held = by_kind(values)
    order = sorted(sizes, key=lambda kind: (kind not in held, -int(sizes[kind].max(initial=0))))
    after = [np.zeros(capacity + 1)]
    for kind in reversed(order):
        after.append(_with_kind(after[-1], held.get(kind, []), int(copies[kind])))
    after.reverse()
    before = np.zeros(capacity + 1)
    found: dict[Part, float] = {}
    for k, kind in enumerate(order):
        mine = sizes[kind]
        if copies[kind] == 1:
            worth = np.maximum(1.0 - _together(before, after[k + 1])[capacity - mine], 0.0)
        else:
            worth = with_items(np.zeros(capacity + 1), held.get(kind, []))[mine]
        items = list(zip(mine.tolist(), worth.tolist(), strict=True))
        before = _with_kind(before, items, int(copies[kind]))
        found |= {(kind, size): value for size, value in items}
    return found


def tables_on_a_rank(kinds: Iterable[int], copies: Ints) -> int:
    """How many tables of these kinds a knapsack problem goes through, roughly."""
    return sum(min(int(copies[kind]), MANY) for kind in kinds)


def by_kind(values: Mapping[Part, float]) -> dict[int, list[tuple[int, float]]]:
    """The sizes and values of each kind that are worth something."""
    held: dict[int, list[tuple[int, float]]] = {}
    for (kind, size), value in values.items():
        if value > TINY:
            held.setdefault(kind, []).append((size, value))
    return held


def _with_kind(best: Floats, items: Items, tables: int) -> Floats:
    for _ in range(_fitting(items, tables, len(best) - 1)):
        best = with_items(best, items)
    return best


def _fitting(items: Items, tables: int, capacity: int) -> int:
    """How many of so many tables may have a part on one rank."""
    return min(tables, capacity // min(size for size, _ in items)) if items else 0


def _together(a: Floats, b: Floats) -> Floats:
    """The most that rooms shared between two are worth, from what each makes of a room: both rise in steps."""
    total: Floats = a + b[0]
    for room in (np.flatnonzero(np.diff(b) > TINY) + 1).tolist():
        np.maximum(total[room:], a[:-room] + b[room], out=total[room:])
    return total


def _best(values: Mapping[Part, float], copies: Ints, capacity: int) -> tuple[float, list[tuple[Part, ...]]]:
    """(worth of the best pattern, some that are worth as much): a knapsack problem, of tables in different orders."""
    tables = [
        (kind, items)
        for kind, items in by_kind(values).items()
        for _ in range(_fitting(items, int(copies[kind]), capacity))
    ]
    worth, found = 0.0, []
    for _ in range(TURNS):
        rooms = [np.zeros(capacity + 1)]
        for _, items in tables:
            rooms.append(with_items(rooms[-1], items))
        worth = float(rooms[-1][-1])
        found.append(_traced(rooms, tables))
        turn = len(tables) // TURNS + 1
        tables = tables[turn:] + tables[:turn]
    return worth, found


def _traced(rooms: list[Floats], tables: list[tuple[int, list[tuple[int, float]]]]) -> tuple[Part, ...]:
    """The parts, at most one of a table, that make the last of `rooms` worth what it is."""
    room, pattern = len(rooms[0]) - 1, []
    for (kind, items), before, after in zip(reversed(tables), reversed(rooms[:-1]), reversed(rooms[1:]), strict=True):
        if after[room] > before[room] + TINY:
            _, size = max((float(before[room - size]) + value, size) for size, value in items if size <= room)
            pattern.append((kind, size))
            room -= size
    return tuple(sorted(pattern))
