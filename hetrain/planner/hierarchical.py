"""The hierarchical strategy: every table's cut chosen against the lower bound, placed largest first, then improved."""

from collections.abc import Iterator, Sequence
from itertools import cycle, pairwise, product, takewhile, zip_longest

import numpy as np
from numpy.typing import NDArray

from hetrain.planner.arrays import Floats, Ints
from hetrain.planner.bound import Bound, lower_bound, tightened
from hetrain.planner.build import build
from hetrain.planner.choose import choose
from hetrain.planner.guided import guided
from hetrain.planner.improve import improve
from hetrain.planner.insert import ALIGNED, LOOSE, SNUG
from hetrain.planner.menu import Menu, with_strips
from hetrain.planner.packing import Mixture, Packing, mean
from hetrain.planner.place import Layout, place
from hetrain.planner.ruin import TEMPERS, Rebuilder
from hetrain.planner.worth import Worth, worth

CHUNKS = (1.0, 0.4, 0.25)  # most of a rank's memory that a part may take, where its table allows it
TARGETS = (1.0, 1.02, 1.045)  # slowest ranks, as multiples of the bound, that layouts are built for
SHARED = 24  # sums of what every rank does that are weighed
SHARED_TRIED = 4
SIZES = (1.0, 4.0, 0.5, 0.2, 0.08)  # largest parts, of the bound, that choices are made for
ROOMS = (1.0, 0.985, 0.97, 0.95, 0.92, 0.88)  # shares of the memory of the mean rank that a choice may use
CHOICES = 8  # of cuts that layouts are built for
GOOD = 1.002  # of the bound: the search stops
NEAR_ENOUGH = 1.01  # of the bound: it is not asked for more
IMPROVED = 5  # layouts that the local search works on
MOST_ROUNDS = 3000  # of rebuilding
BUILDS, EFFORT = 150_000, 2_400_000  # tables put in, for choices of cuts and (some) in rebuilding
WORK, LARGE_WORK = 200_000, 50_000  # of asking patterns
MIXTURES, FEW_MIXTURES = 40, 2  # that layouts are made of
FEW, LARGE = 150, 1000  # tables: few parts of more are large, and fewer tries reach as far
ROUNDS = 3  # of rebuilding at most, for each pair of tables


def search(menu: Menu) -> tuple[Layout | None, Bound]:
    """The best layout found, None where no placing succeeds, and the bound on all of them."""
    bound = lower_bound(menu)
    if not bound.feasible:
        return None, bound
    packing = Packing(with_strips(menu))
    relaxed = packing.pack(mean, max(bound.ms, 1e-9), packing.least_everywhere, max(bound.ms, 1e-9))
    spent = worth(menu, relaxed, bound.ms)
    tried = [(layout, spent) for layout in _chosen(Packing(menu), spent, bound.ms)]
    if not tried or len(menu.loads) <= LARGE:
        tried += _built(menu, [spent, *_shared(packing, spent, bound.ms)], bound.ms)
    mixed: list[tuple[Layout, Worth]] = []
    slowest = min((layout.slowest for layout, _ in tried), default=0.0)
    if slowest > bound.ms * NEAR_ENOUGH:
        bound, mixtures = tightened(menu, bound, slowest, LARGE_WORK if len(menu.loads) > LARGE else WORK)
        mixed = [(layout, spent) for layout in _guided(menu, spent, mixtures)]
    return _improved(menu, (tried, mixed), bound.ms), bound


def _improved(menu: Menu, tried: Sequence[list[tuple[Layout, Worth]]], ms: float) -> Layout | None:
    """The best of the most promising layouts of each origin, rebuilt until near `ms`; None: there are none."""
    most = ms * GOOD
    sorts = [sorted(ways, key=lambda way: _promise(way[0])) for ways in tried]
    found = [way for row in zip_longest(*sorts) for way in row if way is not None]
    found = [*{round(_promise(layout) / max(ms, 1e-9), 6): (layout, allowed) for layout, allowed in found}.values()]
    count, tempers = IMPROVED if len(menu.loads) <= FEW else 2, [*TEMPERS]
    if len(menu.loads) > LARGE:
        found, count, tempers = sorted(found, key=lambda way: _promise(way[0])), 1, [TEMPERS[-1]]
    rounds = int(min(ROUNDS * len(menu.loads) ** 2, MOST_ROUNDS, EFFORT / _size(menu) / count))
    best = min((layout for layout, _ in found), key=lambda layout: layout.slowest, default=None)
    if best is None:
        return None
    slowest, kept = best.slowest, best.copy()
    for (layout, allowed), temper in zip(found[:count], cycle(tempers)):
        if slowest > most:
            improve(layout, most)
            Rebuilder(layout, allowed, temper).run(rounds, most)
            improve(layout, most)
            if layout.slowest < slowest:
                best, slowest, kept = layout, layout.slowest, layout.copy()
    best.restore_all(kept)
    return best


def _guided(menu: Menu, spent: Worth, mixtures: list[Mixture]) -> Iterator[Layout]:
    """Layouts of the mixtures of cuts that patterns end with, those for the fastest ranks first."""
    wanted = sorted(mixtures, key=lambda mixture: mixture.ms)[: FEW_MIXTURES if len(menu.loads) > LARGE else MIXTURES]
    for mixture in wanted:
        for beyond in TARGETS[:2]:
            layout = guided(menu, spent, mixture.ms * beyond, mixture.ways, mixture.tables)
            if layout is not None:
                yield layout


def _size(menu: Menu) -> float:
    """What putting all tables in takes, in proportion: a table's places are sought among all ranks."""
    return len(menu.loads) * (1 + menu.cluster.world_size / 128)


def _promise(layout: Layout) -> float:
    """What a layout is judged by before it is improved: unevenness can be mended, waste hardly."""
    return layout.slowest + 2 * float(np.sqrt(np.sqrt((layout.ms**4).mean())))


def _shared(packing: Packing, spent: Worth, ms: float) -> Iterator[Worth]:
    """What every rank does is settled first, as all else depends on it: by the relaxed problem, for several sums of it.

    The tables that it puts on every rank stay there, the others do not.
    """
    menu, slowest = packing.menu, ms * TARGETS[1]
    edges = np.linspace(packing.least_everywhere, slowest, SHARED + 1)
    found = {}
    for low, high in pairwise(edges):
        relaxed = packing.pack(mean, slowest, low, high)
        if np.isfinite(relaxed.value):
            chosen = relaxed.price.argmin(1)
            on_all = (menu.everywhere[np.arange(len(chosen)), chosen] > 0)[:, None]
            found[on_all.tobytes()] = (relaxed.value, on_all)
    ways = sorted(found.values(), key=lambda way: way[0])[:SHARED_TRIED]
    for _, on_all in ways:
        base = spent.cuts.shape[1]
        yield spent.only((menu.everywhere[:, :base] > 0) == on_all)


def _built(menu: Menu, allowed: Sequence[Worth], ms: float) -> Iterator[tuple[Layout, Worth]]:
    """Layouts made table by table, each with the cut and places that suit what is there already."""
    hows = [SNUG, LOOSE, ALIGNED] if any(allowed[0].scarce) else [SNUG, LOOSE]
    chunks = CHUNKS
    if len(menu.loads) > FEW:
        allowed, chunks, hows = allowed[:1], chunks[:1], hows[-1:]
    for spent, chunk, target, memory, how in product(allowed, chunks, TARGETS, (0.0, 1.0), hows):
        layout = build(menu, spent.only(_small(menu, menu.chunk, chunk)), ms * target, how, memory)
        if layout is not None:
            yield layout, spent


def _small(menu: Menu, values: Floats, most: float) -> NDArray[np.bool_]:
    """Cuts whose values [C, O] are up to `most`, or the least that their table allows [C, O]."""
    least = np.where(menu.there, values, np.inf).min(1, keepdims=True)
    held: NDArray[np.bool_] = menu.there & (values <= np.maximum(most, least))
    return held


def _chosen(packing: Packing, spent: Worth, ms: float) -> Iterator[Layout]:
    """Layouts of the relaxed problem's choices, the cheapest first; at least one that memory suffices for."""
    menu = packing.menu
    how = ALIGNED if any(spent.scarce) else SNUG
    builds = int(BUILDS / _size(menu))
    targets = TARGETS if builds > 50 else TARGETS[-1:]
    many = builds // len(targets) if len(menu.loads) > LARGE else CHOICES
    placed = 0
    choices = _choices(packing, ms)
    for choice in choices:
        built = (build(menu, spent, ms * target, how, choice=choice) for target in targets)
        fitting = [*takewhile(lambda layout: layout is not None, built)]
        yield from (layout for layout in fitting if layout is not None)
        placed += bool(fitting)
        if placed == many:
            return
    for choice in choices if not placed else ():
        ways = (place(menu, choice, by_memory=b, lean=lean) for b, lean in product((False, True), (0.0, 0.5)))
        found = next((way for way in ways if way is not None), None)
        if found is not None:
            yield found
            return


def _choices(packing: Packing, ms: float) -> list[Ints]:
    """Cuts for every table [tables] within the memory of the mean rank, of each size of parts the cheapest first.

    Parts that take most of a rank's memory leave its time unused; where that matters the sum does not tell.
    """
    menu = packing.menu
    groups: list[list[tuple[float, Ints]]] = []
    seen: set[bytes] = set()
    for chunk in CHUNKS:
        groups.append([])
        for size in SIZES[: 1 if len(menu.loads) > LARGE else None]:
            allowed = _small(menu, menu.chunk, chunk)
            allowed &= _small(menu, np.where(allowed, menu.largest, np.inf), size * ms)
            values = np.where(allowed, menu.largest * menu.ranks + menu.everywhere, np.inf)
            relaxed = packing.price(values)
            for room in ROOMS:
                choice = choose(menu, values, relaxed, room)
                if choice is None:
                    break
                if choice.tobytes() not in seen:
                    seen.add(choice.tobytes())
                    groups[-1].append((float(values[menu.kind_of, choice].sum()), choice))
        groups[-1].sort(key=lambda way: way[0])
    return [way[1] for row in zip_longest(*groups) for way in row if way is not None]
