"""Layouts to begin with: of the relaxed problem's choices of cuts, made table by table, and of patterns' mixtures."""

from collections.abc import Iterator, Sequence
from itertools import pairwise, product, takewhile, zip_longest

import numpy as np
from numpy.typing import NDArray

from hetrain.planner.search.arrays import Floats, Ints
from hetrain.planner.search.build import build
from hetrain.planner.search.choose import choose
from hetrain.planner.search.guided import guided
from hetrain.planner.search.insert import ALIGNED, LOOSE, SNUG
from hetrain.planner.search.menu import MANY, Menu
from hetrain.planner.search.packing import Packing, mean
from hetrain.planner.search.place import Layout, place
from hetrain.planner.search.tighten import Mixture
from hetrain.planner.search.worth import Worth

CHUNKS = (1.0, 0.4, 0.25)  # most of a rank's memory that a part may take, where its table allows it
TARGETS = (1.0, 1.02, 1.045)  # slowest ranks, as multiples of the bound, that layouts are built for
SHARED = 24  # sums of what every rank does that are weighed
SHARED_TRIED = 4  # of them that layouts are built for
SIZES = (1.0, 4.0, 0.5, 0.2, 0.08)  # largest parts, of the bound, that choices are made for
ROOMS = (1.0, 0.985, 0.97, 0.95, 0.92, 0.88)  # shares of the memory of the mean rank that a choice may use
CHOICES = 8  # of cuts that layouts are built for
BUILDS = 150_000  # tables put in, for choices of cuts
MIXTURES = 40  # that layouts are made of
FEW, LARGE = 150, 1000  # tables: few parts of more are large, and fewer tries reach as far


def chosen(packing: Packing, spent: Worth, ms: float) -> Iterator[Layout]:
    """Layouts of the relaxed problem's choices, the cheapest first."""
    menu = packing.menu
    how = ALIGNED if any(spent.scarce) else SNUG
    builds = int(BUILDS / size_of(menu))
    targets = TARGETS if builds > 50 else TARGETS[-1:]
    many = builds // len(targets) if len(menu.loads) > LARGE else CHOICES
    placed = 0
    for choice in choices(packing, ms):
        built = (build(menu, spent, ms * target, how, choice=choice) for target in targets)
        fitting = [*takewhile(lambda layout: layout is not None, built)]
        yield from (layout for layout in fitting if layout is not None)
        placed += bool(fitting)
        if placed == many:
            return


def largest_first(packing: Packing, ms: float) -> Iterator[Layout]:
    """Layouts of the same choices, the largest parts first on the least loaded ranks, in any way that memory allows."""
    menu = packing.menu
    found = 0
    for choice in choices(packing, ms):
        ways = (place(menu, choice, by_memory=b, lean=lean) for b, lean in product((False, True), (0.0, 0.5)))
        layout = next((way for way in ways if way is not None), None)
        if layout is not None:
            yield layout
            found += 1
        if found == CHOICES:
            return


def choices(packing: Packing, ms: float) -> list[Ints]:
    """Cuts for every table [tables] within the memory of the mean rank, of each size of parts the cheapest first.

    Parts that take most of a rank's memory leave its time unused; where that matters the sum does not tell.
    """
    menu = packing.menu
    groups: list[list[tuple[float, Ints]]] = []
    seen: set[bytes] = set()
    for chunk in CHUNKS:
        groups.append([])
        for size in SIZES[: 1 if len(menu.loads) > LARGE or len(menu.cuts) > MANY else None]:
            allowed = _small(menu, menu.chunk, chunk)
            allowed &= _small(menu, np.where(allowed, menu.largest, np.inf), size * ms)
            values = np.where(allowed, menu.largest * menu.ranks + menu.everywhere, np.inf)
            relaxed = packing.price(values)
            for room in ROOMS[:: 2 if len(menu.cuts) > MANY else 1]:
                choice = choose(menu, values, relaxed, room)
                if choice is None:
                    break
                if choice.tobytes() not in seen:
                    seen.add(choice.tobytes())
                    groups[-1].append((float(values[menu.kind_of, choice].sum()), choice))
        groups[-1].sort(key=lambda way: way[0])
    return [way[1] for row in zip_longest(*groups) for way in row if way is not None]


def shared(packing: Packing, spent: Worth, ms: float) -> Iterator[Worth]:
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
            on_all = (menu.ranks[np.arange(len(chosen)), chosen] == 0)[:, None]
            found[on_all.tobytes()] = (relaxed.value, on_all)
    ways = sorted(found.values(), key=lambda way: way[0])[:SHARED_TRIED]
    for _, on_all in ways:
        base = spent.cuts.shape[1]
        yield spent.only((menu.ranks[:, :base] == 0) == on_all)


def built(menu: Menu, allowed: Sequence[Worth], ms: float) -> Iterator[tuple[Layout, Worth]]:
    """Layouts made table by table, each with the cut and places that suit what is there already."""
    hows = [SNUG, LOOSE, ALIGNED] if any(allowed[0].scarce) else [SNUG, LOOSE]
    chunks: Sequence[float] = CHUNKS
    if len(menu.loads) > FEW:
        allowed = allowed[:1]
    if len(menu.cuts) > MANY:
        chunks, hows = chunks[:1], hows[-1:]
    for spent, chunk, target, memory, how in product(allowed, chunks, TARGETS, (0.0, 1.0), hows):
        layout = build(menu, spent.only(_small(menu, menu.chunk, chunk)), ms * target, how, memory)
        if layout is not None:
            yield layout, spent


def of_mixtures(menu: Menu, spent: Worth, mixtures: list[Mixture]) -> Iterator[Layout]:
    """Layouts of the mixtures of cuts that just escape the bound, those for the fastest ranks first."""
    wanted = sorted(mixtures, key=lambda mixture: mixture.ms)[:MIXTURES]
    for mixture in wanted:
        for beyond in TARGETS[:2]:
            layout = guided(menu, spent, mixture.ms * beyond, mixture.ways, mixture.tables)
            if layout is not None:
                yield layout


def size_of(menu: Menu) -> float:
    """What putting all tables in takes, in proportion: a table's places are sought among all ranks."""
    return len(menu.loads) * (1 + menu.cluster.world_size / 128)


def _small(menu: Menu, values: Floats, most: float) -> NDArray[np.bool_]:
    """Cuts whose values [C, O] are up to `most`, or the least that their table allows [C, O]."""
    least = np.where(menu.there, values, np.inf).min(1, keepdims=True)
    held: NDArray[np.bool_] = menu.there & (values <= np.maximum(most, least))
    return held
