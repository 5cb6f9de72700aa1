"""Layouts made rank by rank, each rank filled with parts that leave little of its time and of its memory unused.

Where a few parts fill a rank's memory, parts put in one by one leave some ranks time without memory and others memory
without time. Here whole fillings of ranks are combined, as a linear program mixes them: of each so many are taken as
the whole number says, and it is asked again for the rest. The few tables that are left over go where room is.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from hetrain.planner.cut import RANK
from hetrain.planner.search.arrays import Floats, Ints
from hetrain.planner.search.beginnings import beginnings
from hetrain.planner.search.covering import Covering, Parts
from hetrain.planner.search.insert import ALIGNED, SNUG, Inserter
from hetrain.planner.search.menu import Menu
from hetrain.planner.search.place import NONE, Layout
from hetrain.planner.search.worth import Worth

MARGIN = 1.0  # by which a cut may waste more than the best of its table
MISSING = 2.0  # what a table left over costs, of what it is worth
ROUNDS, FEWER = 25, 4  # of finding fillings, at first and for the rest
TINY = 1e-6
KINDS = 40  # of tables, at most: of more kinds no filling fits many ranks
WEIGHED = 8  # beginnings
FAR = 1.04  # of the bound: slowest ranks up to which the least is sought that fractions of fillings allow
HALVINGS = 4
BEYOND = (1.0, 1.003, 1.006)  # of that least, one after the other: whole fillings take some more


def filled(menu: Menu, spent: Worth, choices: Sequence[Ints], ms: float) -> Iterator[Layout]:
    """Layouts of filled ranks for slowest ranks a little above `ms`; none where hardly a table is like another.

    What lies on all ranks or on nodes is as one of `choices` [tables] has it: the one that leaves most.
    """
    if len(menu.cuts) > KINDS:
        return
    begun = beginnings(menu, choices, ms * FAR)[:WEIGHED]
    fillers = [Filler(layout, spent, ms * (1 + FAR) / 2) for layout in begun]
    if not fillers:
        return
    least = _least(min(fillers, key=lambda filler: filler.lacking), ms)
    for beyond in BEYOND:
        filler = least.again(least.target * beyond)
        if filler.fill():
            yield filler.layout


def _least(filler: "Filler", ms: float) -> "Filler":
    """Of about the least slowest rank for which fractions of fillings cover all tables."""
    low, high, best = ms, ms * FAR, filler
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        filler = filler.again(middle)
        if filler.lacking > 0:
            low = middle
        else:
            high, best = middle, filler
    return best


class Filler:
    """Fills the ranks of a copy of a layout with the tables that have no place in it yet."""

    def __init__(self, begun: Layout, spent: Worth, target: float, like: "Filler | None" = None) -> None:
        """`target` ms for the slowest rank; `like`: one that began the same, what it found is used where it fits."""
        menu = begun.menu
        self.layout, self.target = Layout(menu), target
        self.layout.restore_all(begun.copy())
        self._begun, self._spent = begun, spent
        self._left = np.bincount(menu.kind_of[begun.cut == NONE], minlength=len(menu.cuts)).astype(float)
        price = spent.cuts / target  # in ranks
        self._cuts = [
            (kind, cut) for kind in np.flatnonzero(self._left).tolist() for cut in self._good(kind, price[kind])
        ]
        self._parts = self._parts_of(self._cuts)
        rooms, of_rank = np.unique(self._room(), axis=0, return_inverse=True)
        self._room_ms: Floats = rooms[:, 0]  # as a share of the target, of a rank of each class
        self._waiting = [np.flatnonzero(of_rank.ravel() == k).tolist() for k in range(len(rooms))]
        self._held: list[list[int]] = [[] for _ in self._cuts]  # ranks of the parts of each cut
        self._covering = Covering(self._parts, rooms, MISSING * price.min(1))
        if like is not None and like._cuts == self._cuts and len(like._waiting) == len(rooms):
            self._covering.adopt(like._covering)
        self._covered = self._covering.solve(self._left, self._ranks(), ROUNDS)

    def again(self, target: float) -> "Filler":
        """One that begins as this did, for another slowest rank."""
        return Filler(self._begun, self._spent, target, self)

    @property
    def lacking(self) -> float:
        """How many ranks' time fractions of fillings need beside what the ranks have; negative: they have more."""
        return self._covered.used - float(self._room_ms @ self._ranks())

    def fill(self) -> bool:
        """Give every table a place; False: memory does not suffice."""
        while self._take(self._covered.taken) and self._ranks().any() and self._left.max() > TINY:
            self._covered = self._covering.solve(self._left, self._ranks(), FEWER)
        self._place()
        inserter = Inserter(self.layout, self._spent)
        inserter.target = self.target
        rest = np.flatnonzero(self.layout.cut == NONE)
        dear = inserter.waste.min(1)[self.layout.menu.kind_of[rest]]
        how = ALIGNED if any(self._spent.scarce) else SNUG
        return all(inserter.insert(table, how) for table in rest[np.argsort(-dear, kind="stable")].tolist())

    def _good(self, kind: int, price: Floats) -> list[int]:
        """Cuts of a kind into parts on single ranks which fit one and waste little."""
        menu = self.layout.menu
        fitting = [
            number
            for number, cut in enumerate(menu.cuts[kind])
            if cut.place == RANK and cut.cost <= self.target and menu.chunk[kind, number] <= 1
        ]
        least = min((price[number] for number in fitting), default=0.0)
        return [number for number in fitting if price[number] <= least * (1 + MARGIN)]

    def _parts_of(self, cuts: list[tuple[int, int]]) -> Parts:
        parts = [self.layout.menu.cuts[kind][number] for kind, number in cuts]
        sizes = np.array([[part.cost, part.hbm, part.ddr] for part in parts], dtype=float).reshape(-1, 3)
        return Parts(
            np.array([kind for kind, _ in cuts], dtype=np.int64),
            np.array([part.parts for part in parts], dtype=np.int64),
            self._shares(sizes),
        )

    def _room(self) -> Floats:
        """Shares of the target and the memories that each rank has left [W, 3], rounded down."""
        layout, kinds = self.layout, np.flatnonzero(self._left)
        shared = [min((layout.menu.everywhere[k, o] for j, o in self._cuts if j == k), default=0.0) for k in kinds]
        there = np.concatenate([[self.target - self._left[kinds] @ shared], layout.limit[:, 0]])
        held = np.stack([layout.ms, *layout.held]).T
        room: Floats = np.floor(self._shares(there - held) / TINY) * TINY
        return np.maximum(room, 0.0)

    def _shares(self, used: Floats) -> Floats:
        """Milliseconds, hbm and ddr [..., 3] as shares of a rank's: the time first, then the memory that is scarce."""
        shares: Floats = used / np.array([self.target, *np.maximum(self.layout.limit[:, 0], 1)])
        return shares[..., [0, 2, 1]] if self._spent.scarce == (False, True) else shares

    def _ranks(self) -> Ints:
        """[classes] ranks that wait to be filled."""
        return np.array([len(waiting) for waiting in self._waiting])

    def _take(self, taken: Floats) -> bool:
        """Fill ranks with each filling as often as it is `taken` [N], in whole numbers; False: with none."""
        waited = self._ranks().sum()
        times = whole_numbers(taken, self._covering.covers, self._left)
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
            kind, share = self._parts.kind[part], 1 / self._parts.of_table[part]
            if self._left[kind] > share - TINY:
                self._left[kind] -= share
                self._held[part].append(rank)
                filled = True
        return filled

    def _place(self) -> None:
        """Make tables of the parts on the ranks; parts too few for one, or on a rank twice, are left out."""
        layout = self.layout
        free: list[list[int]] = [[] for _ in layout.menu.cuts]
        for table in np.flatnonzero(layout.cut == NONE).tolist():
            free[layout.menu.kind_of[table]].append(table)
        for (kind, cut), held in zip(self._cuts, self._held, strict=True):
            parts = layout.menu.cuts[kind][cut].parts
            tables = len(held) // parts
            for number in range(tables):
                ranks = sorted(held)[number::tables][:parts]  # far apart in the order: most likely all different
                if len(set(ranks)) == parts:
                    table = free[kind].pop()
                    layout.cut[table] = cut
                    for rank in ranks:
                        layout.add(table, rank)


def whole_numbers(taken: Floats, covers: Floats, left: Floats) -> Ints:
    """`taken` [N] rounded down, but for one fraction, which is rounded up.

    It is the largest of those fillings that are wanted whole: what they cover [N, C] is within what is then left of the
    `left` [C] tables. Where none is, it is the largest fraction.
    """
    whole: Ints = np.floor(taken + TINY).astype(np.int64)
    fraction = taken - whole
    if len(taken) and fraction.max() > TINY:
        wanted = (covers <= left - whole @ covers + TINY).all(1) & (fraction > TINY)
        whole[(fraction + wanted).argmax()] += 1
    return whole
