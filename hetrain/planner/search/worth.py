"""What each way to cut a table costs all ranks together, with memory at the price that the relaxed problem finds."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hetrain.planner.search.arrays import Floats
from hetrain.planner.search.menu import Menu
from hetrain.planner.search.relax import Relaxed


@dataclass(frozen=True)
class Worth:
    """Milliseconds of all ranks: of every cut [C, O], and of a strip of each width of every kind and tier."""

    cuts: Floats
    strips: tuple[tuple[Floats, ...], ...]  # [C][tiers][groups - 1]
    scarce: tuple[bool, bool]  # whether the memory of devices, of hosts, has a price

    def only(self, allowed: NDArray[np.bool_]) -> "Worth":
        """Without the cuts that are not `allowed` [C, O], but for tables that would have none left."""
        left = np.where(allowed, self.cuts, np.inf)
        return replace(self, cuts=np.where(np.isfinite(left).any(1, keepdims=True), left, self.cuts))

    def without_strips(self) -> "Worth":
        """As if strips of unequal widths were not to be had."""
        return replace(self, strips=tuple(tuple(np.full(len(of), np.inf) for of in tiers) for tiers in self.strips))


def worth(menu: Menu, relaxed: Relaxed, ms: float) -> Worth:
    """At the prices of `relaxed`, the packing problem of ranks of `ms`."""
    everywhere, hbm, ddr = relaxed.prices
    own = menu.largest * menu.ranks + menu.everywhere
    cuts: Floats = own + (everywhere * menu.everywhere + hbm * menu.hbm + ddr * menu.ddr) * ms
    strips = tuple(tuple(of.cost + (hbm * of.hbm + ddr * of.ddr) * ms for of in tiers) for tiers in menu.strips)
    return Worth(np.where(menu.there, cuts * menu.cluster.world_size, np.inf), strips, (hbm > 0, ddr > 0))
