"""Which fillings of ranks cover all tables: Gilmore and Gomory's linear program (1961), by column generation.

    minimise room used + what is missing    where the fillings of a class <= its ranks, what they cover + missing = all

Its dual gives a table of every kind a worth; the filling worth most, at these, is the solution of a knapsack problem.
Fillings worth more than the room they use are added until there are none, or for a counted number of rounds.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetrain.planner.search.arrays import Floats, Ints
from hetrain.planner.search.fillings import best_fillings

WANTED = 6  # fillings that are added for a class at a time
GAIN = 1e-3  # of a rank: what a filling must be worth beyond its room


@dataclass(frozen=True)
class Parts:
    """What fillings are made of: parts of cuts [I], of which `of_table` make a table of `kind`."""

    kind: Ints
    of_table: Ints
    sizes: Floats  # [I, resources] as shares of a whole rank, its time first


@dataclass(frozen=True)
class Covered:
    """A solution: `used` room of ranks, with what is missing; how often each filling is `taken` [N]."""

    used: float
    taken: Floats
    worth: Floats  # [C] of a table of each kind
    rent: Floats  # [classes] of a rank of each, beyond its room


class Covering:
    """The program with the fillings found so far: the class of ranks of each [N], and its parts [N, I]."""

    def __init__(self, parts: Parts, rooms: Floats, missing: Floats) -> None:
        """Of ranks with `rooms` [classes, resources], as shares of a whole rank; `missing` [C]: what a table costs."""
        self._parts, self._rooms, self._missing = parts, np.maximum(rooms, 1e-9), missing
        self._share = np.zeros((len(parts.kind), len(missing)))  # of a table that a part is
        self._share[np.arange(len(parts.kind)), parts.kind] = 1 / parts.of_table
        self.of_class: Ints = np.zeros(0, dtype=np.int64)
        self.fillings: Ints = np.zeros((0, len(parts.kind)), dtype=np.int64)

    def adopt(self, other: "Covering") -> None:
        """Take over what another program of the same parts and classes found, where it fits."""
        fits = (other.fillings @ self._parts.sizes <= self._rooms[other.of_class] + 1e-12).all(1)
        self.fillings, self.of_class = other.fillings[fits], other.of_class[fits]

    @property
    def covers(self) -> Floats:
        """Tables of each kind that a filling covers [N, C], in fractions where it holds parts."""
        held: Floats = self.fillings @ self._share
        return held

    def solve(self, need: Floats, ranks: Ints, rounds: int) -> Covered:
        """Cover `need` [C] tables of each kind with `ranks` [classes], finding fillings for at most `rounds` rounds."""
        if not len(self.fillings):
            self._find(self._missing / 2, np.full(len(ranks), -np.inf), need, ranks)
        covered = self._solve(need, ranks)
        for _ in range(rounds):
            if not self._find(covered.worth, covered.rent, need, ranks):
                break
            covered = self._solve(need, ranks)
        return covered

    def _find(self, worth: Floats, rent: Floats, need: Floats, ranks: Ints) -> bool:
        """Add fillings worth more than their room and rent; False: there are none."""
        most = np.ceil(need - 1e-9).astype(np.int64)[self._parts.kind]
        of_part = self._share @ worth
        before = len(self.fillings)
        for of_class in np.flatnonzero(ranks).tolist():
            room = self._rooms[of_class]
            found = best_fillings(self._parts.sizes / room, of_part, most, WANTED)
            good = found.counts[found.worth > room[0] + rent[of_class] + GAIN]
            self.fillings = np.concatenate([self.fillings, good])
            self.of_class = np.concatenate([self.of_class, np.full(len(good), of_class)])
        return len(self.fillings) > before

    def _solve(self, need: Floats, ranks: Ints) -> Covered:
        from scipy.optimize import linprog

        kinds, fillings = len(need), len(self.fillings)
        within: NDArray[np.bool_] = self.of_class[None, :] == np.arange(len(ranks))[:, None]
        matrix = np.block([[-self.covers.T, -np.eye(kinds)], [within.astype(float), np.zeros((len(ranks), kinds))]])
        cost = np.concatenate([self._rooms[self.of_class, 0], self._missing])
        solved = linprog(cost, matrix, np.concatenate([-need, ranks]), method="highs")
        duals = -solved.ineqlin.marginals
        return Covered(float(solved.fun), solved.x[:fillings], duals[:kinds], duals[kinds:])
