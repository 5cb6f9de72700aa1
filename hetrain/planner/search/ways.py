"""Every way to cut a table that bounds are made of: cuts of the menu, and strips of columns of unequal widths."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from hetrain.planner.cut import Cut
from hetrain.planner.search.arrays import Floats, Ints
from hetrain.planner.search.menu import Menu

FEW_GROUPS = 8  # of 4 columns: all ways to cut so few are weighed one by one


@dataclass(frozen=True)
class Way:
    """One way to cut a kind of table; `parts`: (share of the ranks that they load, ms) of those not on every rank."""

    kind: int
    number: int  # of the cut in the menu; STRIPS: of unequal widths; FREE: of about one width
    everywhere: float  # ms that it adds to every rank
    hbm: float  # bytes that it adds to the mean rank
    ddr: float
    parts: tuple[tuple[float, float], ...]
    strips: tuple[Cut, ...] = ()  # where the number is STRIPS


STRIPS, FREE = -1, -2


@dataclass(frozen=True)
class WayArrays:
    """Figures of ways [N], and of the parts of each [P]."""

    kind: Ints
    everywhere: Floats
    spent: Floats  # ms on the mean rank
    hbm: Floats
    ddr: Floats
    way: Ints  # [P] the way that a part is of, ascending
    ranks: Floats
    ms: Floats


def ways_of(menu: Menu, memory: bool) -> list[Way]:
    """The ways of a menu with strips, by kind: few groups of columns in all ways, many as if of one width.

    Without `memory` those that save nothing but memory are left out.
    """
    found = []
    for kind, cuts in enumerate(menu.cuts):
        at = len(cuts)
        columns = list(range(at))
        faster = False  # whether a tier before has all strips, which time alone prefers
        for of in menu.strips[kind] if menu.there.shape[1] > at else ():
            there = menu.there[kind, at : at + of.groups - 1]
            if there.any() and of.groups > FEW_GROUPS:
                columns += range(at, at + of.groups - 1)
            elif there.any() and (memory or not faster):
                for groups in _partitions(of.groups, of.groups - 1):
                    if there[groups[0] - 1]:  # the widest
                        found.append(_in_strips(kind, tuple(of.widths[g - 1] for g in groups), menu, memory))
            faster |= bool(there.all())
            at += of.groups - 1
        found += [_of_menu(menu, kind, o) for o in _useful(menu, kind, columns, memory)]
    return sorted(found, key=lambda way: way.kind)


def arrays_of(ways: list[Way]) -> WayArrays:
    """Their figures as arrays."""
    everywhere = np.array([way.everywhere for way in ways])
    return WayArrays(
        np.array([way.kind for way in ways]),
        everywhere,
        everywhere + np.array([sum(ranks * ms for ranks, ms in way.parts) for way in ways]),
        np.array([way.hbm for way in ways]),
        np.array([way.ddr for way in ways]),
        np.repeat(np.arange(len(ways)), [len(way.parts) for way in ways]),
        np.array([ranks for way in ways for ranks, _ in way.parts]),
        np.array([ms for way in ways for _, ms in way.parts]),
    )


def _in_strips(kind: int, strips: tuple[Cut, ...], menu: Menu, memory: bool) -> Way:
    ranks = menu.cluster.world_size
    hbm = sum(strip.hbm for strip in strips) / ranks if memory else 0.0
    ddr = sum(strip.ddr for strip in strips) / ranks if memory else 0.0
    shared = sum(strip.shared_ms for strip in strips)
    return Way(kind, STRIPS, shared, hbm, ddr, tuple((1 / ranks, strip.cost) for strip in strips), strips)


def _of_menu(menu: Menu, kind: int, column: int) -> Way:
    everywhere, hbm, ddr = (float(array[kind, column]) for array in (menu.everywhere, menu.hbm, menu.ddr))
    parts = ((float(menu.ranks[kind, column]), float(menu.largest[kind, column])),)
    return Way(kind, column if column < len(menu.cuts[kind]) else FREE, everywhere, hbm, ddr, parts)


def _useful(menu: Menu, kind: int, columns: list[int], memory: bool) -> list[int]:
    """Those of the cuts that are there and to which none is equal or better in parts, time and memory at once.

    Strips as if of one width stay beside a cut of the menu that is better: a table is whole there.
    """
    there = np.array([o for o in columns if menu.there[kind, o]], dtype=np.int64)
    arrays = [menu.ranks, menu.largest, menu.ranks * menu.largest, menu.everywhere]
    arrays += [menu.hbm, menu.ddr] if memory else []
    figures = np.stack([array[kind, there] for array in arrays])
    better = (figures[:, :, None] <= figures[:, None, :]).all(0)  # [a, b]: a is nowhere worse than b
    free = there >= len(menu.cuts[kind])
    better &= free[:, None] | ~free[None, :]
    same = better & better.T
    held: list[int] = there[~((better & ~same).any(0) | np.triu(same, 1).any(0))].tolist()
    return held


def _partitions(whole: int, most: int) -> Iterator[list[int]]:
    """Every list of numbers from `most` down to 1 that add up to `whole`."""
    if whole == 0:
        yield []
    for first in range(min(whole, most), 0, -1):
        yield from ([first, *rest] for rest in _partitions(whole - first, first))
