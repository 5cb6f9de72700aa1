"""Choosing a cut for every table: the relaxed problem's choice, mended until the memory of the mean rank suffices."""

import numpy as np
from numpy.typing import NDArray

from hetrain.planner.search.arrays import Floats, Ints
from hetrain.planner.search.menu import Menu
from hetrain.planner.search.relax import Relaxed

MOVES = 400  # of lots of tables to another cut


class _Lots:
    """Tables of one kind that take the same cut: kind, cut and count of each lot [L]."""

    def __init__(self, menu: Menu, cut: Ints) -> None:
        self.kind = np.arange(len(cut))
        self.cut, self.count = cut.copy(), menu.copies.copy()

    def move(self, lot: int, cut: int, tables: int) -> None:
        """Let `tables` of a lot take another cut."""
        if tables == self.count[lot]:
            self.cut[lot] = cut
            return
        self.count[lot] -= tables
        self.kind = np.append(self.kind, self.kind[lot])
        self.cut, self.count = np.append(self.cut, cut), np.append(self.count, tables)

    def total(self, values: Floats) -> float:
        """Sum of `values` [C, O] over all tables."""
        return float(self.count @ values[self.kind, self.cut])

    def change(self, values: Floats) -> Floats:
        """What one table of each lot would add by each other cut [L, O]."""
        held: Floats = values[self.kind] - values[self.kind, self.cut][:, None]
        return held


def choose(menu: Menu, values: Floats, relaxed: Relaxed, room: float) -> Ints | None:
    """A cut for every table [tables], of small `values` [C, O] in sum, begun at the relaxed problem's choice.

    Uses `room` (at most 1) of the memory of the mean rank; None where that cannot be.
    """
    lots = _Lots(menu, relaxed.price.argmin(1))
    limits = ((menu.hbm, menu.cluster.hbm_bytes * room), (menu.ddr, menu.cluster.ddr_bytes * room))
    if not _fit(lots, values, limits):
        return None
    _fill(lots, values, limits)
    return _per_table(menu, lots)


def _fit(lots: _Lots, price: Floats, limits: tuple[tuple[Floats, float], ...]) -> bool:
    """Move tables to leaner cuts, the cheapest per byte first, until both memories suffice."""
    for _ in range(MOVES):
        excess = [max(0.0, lots.total(used) - there) for used, there in limits]
        if not any(excess):
            return True
        saved = np.zeros_like(price[lots.kind])
        for (used, there), over in zip(limits, excess, strict=True):
            change = lots.change(used) / max(1.0, there)
            saved += np.minimum(-change, over / max(1.0, there)) if over else -_beyond(lots, used, there)
        dearer = lots.change(price)
        with np.errstate(divide="ignore", invalid="ignore"):
            rate = np.where((saved > 1e-12) & np.isfinite(dearer), np.maximum(dearer, 0.0) / saved, np.inf)
        lot, cut = np.unravel_index(int(rate.argmin()), rate.shape)
        if not np.isfinite(rate[lot, cut]):
            return False
        need = [
            over / max(1.0, -float(lots.change(used)[lot, cut])) for (used, _), over in zip(limits, excess, strict=True)
        ]
        tables = int(
            min(lots.count[lot], max(1, np.ceil(max(n for n, over in zip(need, excess, strict=True) if over))))
        )
        lots.move(int(lot), int(cut), tables)
    return False


def _beyond(lots: _Lots, used: Floats, there: float) -> Floats:
    """What a change would take beyond the memory there, as a share of it [L, O]."""
    free = there - lots.total(used)
    held: Floats = np.maximum(0.0, lots.change(used) - free) / max(1.0, there)
    return held


def _fill(lots: _Lots, price: Floats, limits: tuple[tuple[Floats, float], ...]) -> None:
    """Use what memory is left for cheaper cuts, the most saved per byte first."""
    for _ in range(MOVES):
        gain = -lots.change(price)
        fits = np.where(np.isfinite(gain) & (gain > 1e-9), lots.count[:, None].astype(float), 0.0)
        size = np.zeros_like(gain)
        for used, there in limits:
            change, free = lots.change(used), there - lots.total(used)
            with np.errstate(divide="ignore", invalid="ignore"):
                fits = np.minimum(fits, np.where(change > 0, np.floor(free / change), np.inf))
            size += np.maximum(change, 0.0) / max(1.0, there)
        worth = np.where(fits >= 1, gain / (size + 1e-9), 0.0)
        lot, cut = np.unravel_index(int(worth.argmax()), worth.shape)
        if worth[lot, cut] <= 0:
            return
        lots.move(int(lot), int(cut), int(fits[lot, cut]))


def _per_table(menu: Menu, lots: _Lots) -> Ints:
    """The lots dealt out to the tables of their kinds, in the tables' order."""
    found: NDArray[np.int64] = np.empty(len(menu.kind_of), dtype=np.int64)
    order = np.argsort(menu.kind_of, kind="stable")
    by_kind = np.lexsort((np.arange(len(lots.kind)), lots.kind))
    found[order] = np.repeat(lots.cut[by_kind], lots.count[by_kind])
    return found
