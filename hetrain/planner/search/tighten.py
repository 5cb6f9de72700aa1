"""A larger lower bound where tables are few kinds, and the mixtures of cuts that just escape it.

Slowest ranks a little above the bound are refuted one after the other, each for every interval of what all ranks do:
by sums over all parts where that suffices, else with whole tables.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from hetrain.planner.search.arrays import Floats
from hetrain.planner.search.bound import Bound, binding
from hetrain.planner.search.menu import MANY, Menu, with_strips
from hetrain.planner.search.packing import Packing
from hetrain.planner.search.ways import Way, ways_of
from hetrain.planner.search.whole import WholeTables

WIDTH, NARROWEST = 0.02, 0.005  # of the slowest rank's time: intervals of what all ranks do, at first and at last
STEPS = (0.005, 0.002)  # relative: by how much more than the last a slowest rank is tried, each until it fails
FAR = 1 / 8  # of the way to the plan: a first step, where that is much longer
FOR_MIXTURES = 0.3  # of the work
ABOVE = (1.003, 1.015)  # multiples of the bound, at first and at last, that mixtures are wanted for


@dataclass(frozen=True)
class Mixture:
    """Tables in each way to cut them, as they fill ranks of `ms` but for fractions."""

    ms: float
    ways: list[Way]
    tables: Floats  # [ways]


def tightened(menu: Menu, bound: Bound, slowest: float, work: int) -> tuple[Bound, list[Mixture]]:
    """A larger bound, if one below `slowest` ms is found, and mixtures of cuts that fit a little above it.

    slowest: ms of the slowest rank of the best plan known. work: rows of linear programs, at most, roughly; part of it
    goes to the mixtures.
    """
    if len(menu.cuts) > MANY:
        return bound, []
    all_ways = with_strips(menu)
    memory = any(Packing(all_ways).prices(bound.ms))
    packing = _relaxed(all_ways, memory)
    ways = ways_of(packing.menu, memory)
    limits = (float(menu.cluster.hbm_bytes), float(menu.cluster.ddr_bytes))
    whole = WholeTables(ways, menu.copies, limits, menu.cluster.world_size)
    first = bound.ms
    far = (slowest / bound.ms - 1) * FAR
    for step in (far, *STEPS) if far > 2 * STEPS[0] else STEPS:
        until = work * (1 - FOR_MIXTURES)
        while bound.ms < slowest and _refuted(packing, whole, ms := min(bound.ms * (1 + step), slowest), until):
            bound = Bound(ms, f"no whole tables fill the ranks{binding(packing, ms)}", True)
    wanted = sorted({ms * above for ms in (first, bound.ms) for above in ABOVE})
    return bound, list(_mixtures(packing, whole, wanted, ways, work * FOR_MIXTURES / len(wanted)))


def _relaxed(menu: Menu, memory: bool) -> Packing:
    """The packing problem of a menu with strips, held to the memory of the mean rank or not.

    Ways are left out that are nowhere better than others; without memory, those that only save it, too. What refutes a
    plan must refute the one that takes those others in their place: either both are held to memory, or none is.
    """
    fitting = replace(menu, there=menu.there & (menu.chunk <= 1), chunk=np.zeros_like(menu.chunk))
    return Packing(fitting if memory else replace(fitting, hbm=np.zeros_like(menu.hbm), ddr=np.zeros_like(menu.ddr)))


def _refuted(packing: Packing, whole: WholeTables, ms: float, until: float) -> bool:
    waiting = list(_intervals(packing, ms))
    while waiting:
        low, high = waiting.pop()
        if packing.refuted(ms, low, high) or whole.refutes(ms, low, high, until):
            continue
        if high - low < 2 * NARROWEST * ms or whole.work > until:
            return False
        middle = (low + high) / 2
        waiting += [(middle, high), (low, middle)]
    return True


def _mixtures(
    packing: Packing, whole: WholeTables, wanted: list[float], ways: list[Way], work: float
) -> Iterator[Mixture]:
    for ms in wanted:
        until = whole.work + work
        for low, high in _intervals(packing, ms):
            if whole.work < until and not packing.refuted(ms, low, high) and not whole.refutes(ms, low, high, until):
                yield Mixture(ms, ways, whole.mixture)


def _intervals(packing: Packing, ms: float) -> Iterator[tuple[float, float]]:
    """Of what every rank does, from the least of any plan up to `ms`."""
    for low in np.arange(packing.least_everywhere, ms, WIDTH * ms).tolist():
        yield low, low + WIDTH * ms
