"""A larger lower bound where tables are few kinds, and the mixtures of cuts that just escape it.

Slowest ranks a little above the bound are refuted one after the other, each for every interval of what all ranks do:
by sums over all parts where that suffices, else with whole tables.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from hetrain.planner.arrays import Floats
from hetrain.planner.bound import Bound, binding
from hetrain.planner.menu import MANY, Menu, with_strips
from hetrain.planner.packing import Packing
from hetrain.planner.ways import Way, ways_of
from hetrain.planner.whole import WholeTables

WIDTH = 0.02  # of the slowest rank's time: intervals of what all ranks do
STEPS = (0.005, 0.002)  # relative: by how much more than the last a slowest rank is tried, the first until it fails
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

    `work` limits the rows of linear programs; part of it goes to the mixtures.
    """
    if len(menu.cuts) > MANY:
        return bound, []
    packing = Packing(with_strips(menu))
    memory = any(packing.prices(bound.ms))
    ways = ways_of(packing.menu, memory=memory)
    # without memory the ways that save it are left out: what is left cannot be held to it
    limits = (float(menu.cluster.hbm_bytes), float(menu.cluster.ddr_bytes)) if memory else (np.inf, np.inf)
    whole = WholeTables(ways, menu.copies, limits, menu.cluster.world_size)
    first = bound.ms
    for step in STEPS:
        until = work * (1 - FOR_MIXTURES)
        while bound.ms < slowest and _refuted(packing, whole, ms := min(bound.ms * (1 + step), slowest), until):
            bound = Bound(ms, f"no whole tables fill the ranks{binding(packing, ms)}", True)
    wanted = sorted({ms * above for ms in (first, bound.ms) for above in ABOVE})
    return bound, list(_mixtures(packing, whole, wanted, ways, work * FOR_MIXTURES / len(wanted)))


def _refuted(packing: Packing, whole: WholeTables, ms: float, until: float) -> bool:
    return all(
        packing.refuted(ms, low, high) or whole.refutes(ms, low, high, until) for low, high in _intervals(packing, ms)
    )


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
