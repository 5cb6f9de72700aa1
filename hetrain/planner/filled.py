"""Layouts made rank by rank, each rank filled with parts that leave little of its time and of its memory unused.

Where a few parts fill a rank's memory, parts put in one by one leave some ranks time without memory and others memory
without time. Here whole fillings of ranks are combined, as a linear program mixes them; of each so many are taken as its
whole number says, and it is asked again for the rest. The few tables that are left over go where room is.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from hetrain.planner.arrays import Floats, Ints
from hetrain.planner.covering import Covered, Covering, Parts
from hetrain.planner.cut import RANK
from hetrain.planner.insert import ALIGNED, SNUG, Inserter
from hetrain.planner.menu import Menu
from hetrain.planner.place import NONE, Layout
from hetrain.planner.worth import Worth

MARGIN = 1.0  # by which a cut may waste more than the best of its table
MISSING = 2.0  # what a table left over costs, of what it is worth
ROUNDS, FEWER = 25, 4  # of finding fillings, at first and for the rest
TINY = 1e-6
BEGINNINGS, BEST = 12, 2  # that are weighed, and that layouts are made of
NEAR, FAR = 1.0, 1.04  # of the bound: slowest ranks between which the least is sought that fillings allow
WEIGHED = 1.02  # of the bound: the slowest rank that beginnings are weighed for
HALVINGS = 4
BEYOND = (1.0, 1.003, 1.006)  # of that least: slowest ranks that layouts are made for, as whole numbers take some more


def filled(menu: Menu, spent: Worth, choices: Sequence[Ints], ms: float) -> Iterator[Layout]:
    """Layouts of filled ranks for slowest ranks a little above `ms`, each begun as one of `choices` [tables] says."""
    weighed = []
    for number, choice in enumerate(_beginnings(menu, choices)):
        filler = filler_of(menu, spent, ms * WEIGHED, choice)
        if filler is not None:
            weighed.append((filler.lacking, number, choice))
    for _, _, choice in sorted(weighed, key=lambda way: way[:2])[:BEST]:
        least = _least(menu, spent, choice, ms)
        for beyond in BEYOND:
            filler = filler_of(menu, spent, least * beyond, choice)
            if filler is not None and filler.fill():
                yield filler.layout


def _beginnings(menu: Menu, choices: Sequence[Ints]) -> list[Ints]:
    """Of the choices those which differ in what lies on all ranks or on nodes, in their order."""
    found: dict[bytes, Ints] = {}
    for choice in choices:
        places = np.array([menu.cuts[kind][cut].place for kind, cut in zip(menu.kind_of, choice, strict=True)])
        found.setdefault(np.where(places == RANK, NONE, choice).tobytes(), choice)
    return [*found.values()][:BEGINNINGS]


def _least(menu: Menu, spent: Worth, choice: Ints, ms: float) -> float:
    """About the least slowest rank for which fractions of fillings cover all tables."""
    low, high = ms * NEAR, ms * FAR
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        filler = filler_of(menu, spent, middle, choice)
        if filler is None or filler.lacking > 0:
            low = middle
        else:
            high = middle
    return high


def filler_of(menu: Menu, spent: Worth, target: float, choice: Ints) -> "Filler | None":
    """For ranks of `target` ms that hold already what `choice` puts on all ranks or on nodes; None: it has no place."""
    layout = Layout(menu)
    for table, (kind, cut) in enumerate(zip(menu.kind_of, choice, strict=True)):
        if menu.cuts[kind][cut].place != RANK and not layout.put(table, int(cut)):
            return None
    return Filler(layout, spent, target) if layout.slowest < target else None


class Filler:
    """Fills the ranks of a layout with the tables that have no place in it yet."""

    def __init__(self, layout: Layout, spent: Worth, target: float) -> None:
        self.layout, self._spent, self._target = layout, spent, target
        menu = layout.menu
        self._free = np.flatnonzero(layout.cut == NONE)
        need = np.bincount(menu.kind_of[self._free], minlength=len(menu.cuts))
        self._rest: Floats = need.astype(float)  # tables of each kind without a place
        price = spent.cuts / target  # in ranks
        self._cuts = [(kind, cut) for kind in np.flatnonzero(need).tolist() for cut in self._good(kind, price[kind])]
        parts = [menu.cuts[kind][cut] for kind, cut in self._cuts]
        self._of_table: Ints = np.array([part.parts for part in parts], dtype=np.int64)
        self._kind: Ints = np.array([kind for kind, _ in self._cuts], dtype=np.int64)
        of = [0, 2, 1] if spent.scarce == (False, True) else [0, 1, 2]  # time first, then the memory that is scarce
        limit = np.array([target, *np.maximum(layout.limit[:, 0], 1)])[of]
        sizes = np.array([[part.cost, part.hbm, part.ddr] for part in parts]).reshape(-1, 3)[:, of] / limit
        room = 1 - np.stack([layout.ms, *layout.held])[of].T / limit
        self._rooms, of_rank = np.unique(np.floor(room / TINY) * TINY, axis=0, return_inverse=True)
        self._waiting = [np.flatnonzero(of_rank.ravel() == k).tolist() for k in range(len(self._rooms))]
        self._held: list[list[int]] = [[] for _ in self._cuts]  # ranks of the parts of each cut
        self._covering = Covering(Parts(self._kind, self._of_table, sizes), self._rooms, MISSING * price.min(1))
        self._covered = self._solve(ROUNDS)

    @property
    def lacking(self) -> float:
        """By how much fractions of fillings use more time than the ranks have, or less, in ranks."""
        return self._covered.used - float(self._rooms[:, 0] @ self._ranks())

    def fill(self) -> bool:
        """Give every table a place; False: memory does not suffice."""
        while self._take(self._covered) and self._ranks().any() and self._rest.max() > TINY:
            self._covered = self._solve(FEWER)
        self._place()
        inserter = Inserter(self.layout, self._spent)
        inserter.target = self._target
        left = np.flatnonzero(self.layout.cut == NONE)
        dear = inserter.waste.min(1)[self.layout.menu.kind_of[left]]
        how = ALIGNED if any(self._spent.scarce) else SNUG
        return all(inserter.insert(table, how) for table in left[np.argsort(-dear, kind="stable")].tolist())

    def _good(self, kind: int, price: Floats) -> list[int]:
        """Cuts of a kind into parts on single ranks which waste little."""
        menu = self.layout.menu
        there = [
            number
            for number, cut in enumerate(menu.cuts[kind])
            if cut.place == RANK and cut.cost <= self._target and menu.chunk[kind, number] <= 1
        ]
        least = min((price[number] for number in there), default=0.0)
        return [number for number in there if price[number] <= least * (1 + MARGIN)]

    def _ranks(self) -> Ints:
        """[classes] ranks that wait to be filled."""
        return np.array([len(waiting) for waiting in self._waiting])

    def _solve(self, rounds: int) -> Covered:
        return self._covering.solve(self._rest, self._ranks(), rounds)

    def _take(self, covered: Covered) -> bool:
        """Fill as many ranks as the program says in whole numbers, and one by the largest fraction; False: none."""
        waited = self._ranks().sum()
        whole = np.floor(covered.taken + TINY)
        fraction = covered.taken - whole
        times = whole.astype(np.int64)
        if len(fraction) and fraction.max() > TINY:
            times[fraction.argmax()] += 1
        for number in np.flatnonzero(times).tolist():
            waiting = self._waiting[self._covering.of_class[number]]
            for _ in range(min(int(times[number]), len(waiting))):
                if self._fill_rank(waiting[-1], self._covering.fillings[number]):
                    waiting.pop()
        return bool(self._ranks().sum() < waited)

    def _fill_rank(self, rank: int, filling: Ints) -> bool:
        """Put a filling on a rank, but for parts of tables that have places already; False: that is all of it."""
        filled = False
        for part in np.repeat(np.arange(len(filling)), filling).tolist():
            share = 1 / self._of_table[part]
            if self._rest[self._kind[part]] > share - TINY:
                self._rest[self._kind[part]] -= share
                self._held[part].append(rank)
                filled = True
        return filled

    def _place(self) -> None:
        """Make tables of the parts on the ranks; parts too few for one, or on a rank twice, are left out."""
        layout = self.layout
        free = {kind: self._free[layout.menu.kind_of[self._free] == kind].tolist() for kind in set(self._kind.tolist())}
        for (kind, cut), of_table, held in zip(self._cuts, self._of_table.tolist(), self._held, strict=True):
            tables = len(held) // of_table
            for number in range(tables):
                ranks = sorted(held)[number::tables][:of_table]  # far apart in the order: of one rank no two
                if len(set(ranks)) == of_table:
                    table = free[kind].pop(0)
                    layout.cut[table] = cut
                    for rank in ranks:
                        layout.add(table, rank)
