"""The dual feasible function that refutes a slowest rank best: the configuration linear program, by column generation.

Gilmore and Gomory (1961) pack ranks by patterns, each a set of parts that fit together. The dual of that program gives
every part a value such that no pattern is worth more than 1; where all tables, each in the cut worth least, are worth
more than the ranks there are, no plan exists. Values are found with the patterns known so far; the pattern worth most
at these values is the solution of a knapsack problem, solved exactly on a grid that rounds parts down. Values divided
by what that pattern is worth are a proof even before no better pattern is left (Farley, 1990).
"""

import numpy as np
from numpy.typing import NDArray

from hetrain.planner.arrays import Floats, Ints
from hetrain.planner.menu import Menu
from hetrain.planner.ways import WayArrays, arrays_of, ways_of

GRID = 1000  # steps of the slowest rank's time that parts are rounded down to
ITERATIONS = 60  # linear programs for one question
PATTERNS = 6  # that are added at a time
SURE = 1e-7  # relative: what a refutation must exceed


class Patterns:
    """Parts of all cuts of a menu with strips, as a configuration linear program sees them."""

    def __init__(self, menu: Menu, memory: bool) -> None:
        self.ways = ways_of(menu, memory)
        self._arrays = arrays_of(self.ways)
        self._limits = (max(1.0, float(menu.cluster.hbm_bytes)), max(1.0, float(menu.cluster.ddr_bytes)))
        self._copies = menu.copies.astype(float)
        self.mixture: Floats = np.zeros(len(self.ways))  # tables in each way, of the last question not refuted
        self.work = 0  # rows of linear programs, and steps of knapsack problems, so far
        self._known: dict[float, list[tuple[int, ...]]] = {}  # patterns of grid sizes, by slowest rank

    def refutes(self, slowest: float, low: float, high: float) -> bool:
        """Whether no plan of `slowest` ms spends `low` to `high` on what all ranks do."""
        options = self._arrays
        usable = np.ones(len(options.kind), dtype=np.bool_)
        usable[options.way[options.ms > (slowest - low) * (1 + 1e-12)]] = False
        if len(np.unique(options.kind[usable])) < len(self._copies):
            return True  # a table has no cut left
        unit = slowest / GRID
        capacity = int((slowest - low) / unit + 1e-9)
        steps = np.maximum(np.floor(options.ms / unit - 1e-9), 0).astype(np.int64)
        sizes = np.unique(steps[usable[options.way] & (steps > 0)])
        known = self._known.setdefault(slowest, [])
        for _ in range(ITERATIONS):
            patterns = [p for p in known if sum(p) <= capacity and np.isin(p, sizes).all()]
            program = _Program(options, self._copies, self._limits, usable, steps, sizes, patterns, slowest, high)
            gain, values, most, rest, mixture = program.solve()
            self.work += program.rows + GRID // 2
            self.mixture = np.zeros(len(usable))
            self.mixture[usable] = mixture
            if gain <= SURE:
                return False  # no values refute it, whatever the other patterns
            worth, found = _best_patterns(sizes, values, capacity)
            if (gain + 1) / (rest + worth) > 1 + SURE:
                return True
            if worth <= most * (1 + SURE):
                return False
            known += found
        return False


class _Program:
    """The dual: values of parts by size, of time, of what all ranks do and of memory; worth of each kind of table."""

    def __init__(
        self,
        options: WayArrays,
        copies: Floats,
        limits: tuple[float, float],
        usable: NDArray[np.bool_],
        steps: Ints,
        sizes: Ints,
        patterns: list[tuple[int, ...]],
        slowest: float,
        high: float,
    ) -> None:
        kinds, many, rows = len(copies), len(sizes), int(usable.sum())
        width = kinds + many + 5  # worth of kinds, values of sizes, then: time, pattern, everywhere, hbm, ddr
        at = np.arange(rows)
        row_of = usable.cumsum() - 1
        matrix = np.zeros((rows + len(patterns), width))
        matrix[at, options.kind[usable]] = 1.0
        held = usable[options.way] & (steps > 0)
        columns = kinds + sizes.searchsorted(steps[held])
        np.add.at(matrix, (row_of[options.way[held]], columns), -options.ranks[held])
        matrix[at, kinds + many] = -options.spent[usable]
        matrix[at, kinds + many + 2] = -options.everywhere[usable]
        matrix[at, kinds + many + 3] = -options.hbm[usable] / limits[0]
        matrix[at, kinds + many + 4] = -options.ddr[usable] / limits[1]
        for row, pattern in enumerate(patterns, rows):
            np.add.at(matrix[row], kinds + sizes.searchsorted(pattern), 1.0)
            matrix[row, kinds + many + 1] = -1.0
        self.rows, self._ways = len(matrix), rows
        self._matrix, self._kinds, self._many, self._slowest = matrix, kinds, many, slowest
        self._gain = np.concatenate([copies, np.zeros(many + 2), [-high, -1.0, -1.0]])

    def solve(self) -> tuple[float, Floats, float, float, Floats]:
        """(gain, values of the sizes, what a pattern may be worth, value of a rank's whole time, tables in each way).

        The worth of a pattern and the value of the time add up to 1.
        """
        from scipy.optimize import linprog

        kinds, many = self._kinds, self._many
        whole = np.zeros((1, self._matrix.shape[1]))
        whole[0, kinds + many : kinds + many + 2] = self._slowest, 1.0
        free = np.array([(-np.inf, np.inf)] * kinds + [(0.0, 1.0)] * many + [(0.0, np.inf)] * 5)
        solved = linprog(-self._gain, self._matrix, np.zeros(len(self._matrix)), whole, [1.0], free, method="highs")
        if solved.status != 0:
            return -1.0, np.zeros(many), 1.0, 0.0, np.zeros(self._ways)
        x = np.maximum(solved.x[kinds:], 0.0)
        # What a table is worth at least at these values, anew: the program's own figure is within a tolerance only.
        worth = np.full(kinds, np.inf)
        np.minimum.at(worth, self._matrix[: self._ways, :kinds].argmax(1), -self._matrix[: self._ways, kinds:] @ x)
        gain = float(self._gain[:kinds] @ worth + self._gain[kinds:] @ x) - 1
        mixture = -solved.ineqlin.marginals[: self._ways]
        return gain, x[:many], float(x[many + 1]), float(x[many] * self._slowest), mixture


def _best_patterns(sizes: Ints, values: Floats, capacity: int) -> tuple[float, list[tuple[int, ...]]]:
    """(worth of the best pattern, some of the best): an unbounded knapsack problem, by dynamic programming."""
    good = values > 1e-12
    sizes, values = sizes[good], values[good]
    best = np.zeros(capacity + 1)
    last: Ints = np.full(capacity + 1, -1)
    for room in range(1, capacity + 1):
        fits = int(sizes.searchsorted(room, "right"))
        best[room] = best[room - 1]
        if fits:
            worth = best[room - sizes[:fits]] + values[:fits]
            k = int(worth.argmax())
            if worth[k] > best[room]:
                best[room], last[room] = worth[k], k
    fitting = np.flatnonzero(sizes <= capacity)
    first = best[capacity - sizes[fitting]] + values[fitting]
    found = []
    for k in np.argsort(-first, kind="stable")[:PATTERNS]:
        pattern, room = [int(sizes[fitting[k]])], capacity - int(sizes[fitting[k]])
        while room > 0:
            if last[room] >= 0:
                pattern.append(int(sizes[last[room]]))
                room -= int(sizes[last[room]])
            else:
                room -= 1
        found.append(tuple(sorted(pattern)))
    return float(best[capacity]), list(dict.fromkeys(found))
