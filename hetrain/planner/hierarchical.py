"""The hierarchical strategy: every table's cut chosen against the lower bound, placed largest first, then improved."""

from collections.abc import Iterator
from itertools import product

import numpy as np
from numpy.typing import NDArray

from hetrain.planner.bound import Bound, Packing, lower_bound, mean
from hetrain.planner.choose import choose
from hetrain.planner.improve import improve
from hetrain.planner.menu import Floats, Menu
from hetrain.planner.place import Layout, place
from hetrain.planner.relax import Relaxed
from hetrain.planner.ruin import Rebuilder

CHUNKS = (1.0, 0.2)  # most of a rank's memory that a part may take, where its table allows it
TARGETS = (1.0, 1.02, 1.07)  # slowest ranks, as multiples of the bound, that layouts are built for
SIZES = (4.0, 0.5, 0.2, 0.08)  # largest parts, of the bound, that choices are made for
ROOMS = (1.0, 0.985, 0.95, 0.9)  # shares of the memory of the mean rank that a choice may use
GOOD = 1.002  # of the bound: the search stops
IMPROVED = 3  # layouts that the local search works on
EFFORT = 3_000_000  # tables x cuts that are weighed in rebuilding each
LARGE = 1000  # tables: few parts of so many are large, and fewer tries reach as far
ROUNDS = 3  # of rebuilding at most, for each pair of tables


def search(menu: Menu) -> tuple[Layout | None, Bound]:
    """The best layout found, None where no placing succeeds, and the bound on all of them."""
    bound = lower_bound(menu)
    if not bound.feasible:
        return None, bound
    goal = bound.ms * GOOD
    packing = Packing(menu)
    relaxed = packing.pack(mean, max(bound.ms, 1e-9), packing.least_everywhere, max(bound.ms, 1e-9))
    spent = _spent(menu, relaxed, bound.ms)
    tried = [*_built(menu, spent, bound.ms), *_chosen(packing, bound.ms)]
    found = [*{round(layout.slowest / bound.ms, 6): layout for layout in tried}.values()]  # each once
    found.sort(key=lambda layout: layout.slowest)
    weighed = len(menu.loads) * menu.there.shape[1]
    rounds = min(ROUNDS * len(menu.loads) ** 2, EFFORT // weighed + 200)
    for layout in found[: 1 if len(menu.loads) > LARGE else IMPROVED]:
        if found[0].slowest > goal:
            improve(layout, goal)
            Rebuilder(layout, spent).run(rounds, goal)
            improve(layout, goal)
    return min(found, key=lambda layout: layout.slowest, default=None), bound


def fits(menu: Menu) -> bool:
    """Whether `search` finds a plan, without making it a good one; of very many tables, whether it finds one soon."""
    bound = lower_bound(menu)
    if not bound.feasible:
        return False
    packing = Packing(menu)
    if next(_chosen(packing, bound.ms), None) is not None:
        return True
    if len(menu.loads) > LARGE:
        return False
    relaxed = packing.pack(mean, max(bound.ms, 1e-9), packing.least_everywhere, max(bound.ms, 1e-9))
    return next(_built(menu, _spent(menu, relaxed, bound.ms), bound.ms), None) is not None


def _spent(menu: Menu, relaxed: Relaxed, ms: float) -> Floats:
    """Milliseconds of all ranks that a cut costs, and what its memory is worth in them [C, O]."""
    everywhere, hbm, ddr = relaxed.prices
    own = menu.largest * menu.ranks + menu.everywhere
    priced: Floats = own + (everywhere * menu.everywhere + hbm * menu.hbm + ddr * menu.ddr) * ms
    return priced * menu.cluster.world_size


def _built(menu: Menu, spent: Floats, ms: float) -> Iterator[Layout]:
    """Layouts made table by table, each with the cut and places that suit what is there already."""
    targets = TARGETS[1:] if len(menu.loads) > LARGE else TARGETS
    for chunk, target, memory, snug in product(CHUNKS, targets, (0.0, 1.0), (True, False)):
        layout = Layout(menu)
        if Rebuilder(layout, np.where(_small(menu, menu.chunk, chunk), spent, np.inf)).build(
            ms * target, memory, snug=snug
        ):
            yield layout


def _small(menu: Menu, values: Floats, most: float) -> NDArray[np.bool_]:
    """Cuts whose values [C, O] are up to `most`, or the least that their table allows [C, O]."""
    least = np.where(menu.there, values, np.inf).min(1, keepdims=True)
    held: NDArray[np.bool_] = menu.there & (values <= np.maximum(most, least))
    return held


def _chosen(packing: Packing, ms: float) -> Iterator[Layout]:
    """Layouts of the relaxed problem's choices, with as much of the memory as placing succeeds with."""
    menu, seen = packing.menu, set()
    for chunk, size in product(CHUNKS, SIZES):
        allowed = _small(menu, menu.chunk, chunk)
        allowed &= _small(menu, np.where(allowed, menu.largest, np.inf), size * ms)
        values = np.where(allowed, menu.largest * menu.ranks + menu.everywhere, np.inf)
        relaxed = packing.price(values)
        for room in ROOMS:
            choice = choose(menu, values, relaxed, room)
            if choice is None or choice.tobytes() in seen:
                break
            seen.add(choice.tobytes())
            ways = (place(menu, choice, by_memory=b, lean=lean) for b, lean in product((False, True), (0.0, 0.5)))
            layout = next((way for way in ways if way is not None), None)
            if layout is not None:
                yield layout
                break
