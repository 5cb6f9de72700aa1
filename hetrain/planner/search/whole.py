"""The packing problem with whole tables: every table takes one way to be cut, where the linear program mixes them.

Benders (1962): a mixed-integer program chooses ways, within time, memory and what all ranks do; the parts that it asks
for are valued, and where they are worth more than the ranks there are, this becomes a row of the program, which then
chooses anew. Where no choice is left no plan exists. Strips of columns of unequal widths are counted in fractions.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hetrain.planner.search.arrays import Floats, Ints
from hetrain.planner.search.chatter import without_chatter
from hetrain.planner.search.part_values import Part, lifted, tables_on_a_rank, values_of
from hetrain.planner.search.ways import FREE, Way, WayArrays, arrays_of

GRID = 600  # steps of the slowest rank's time that parts are rounded down to
ROUNDS = 100  # of choices for one question
LINEAR_ROUNDS = 50  # of them at most in which the program may still mix ways
NODES = 3000  # of branch and bound for one choice
GAP = 1e-2  # of the fullest row: a choice need not fill the ranks least
SURE = 1e-5  # relative: what a refutation must exceed
NODE_WORK = 3  # rows of linear programs that a node of branch and bound takes, roughly


@dataclass
class _Question:
    """Parts on the grid of one question in milliseconds, and what was learnt of them so far."""

    slowest: float
    low: float
    high: float
    usable: NDArray[np.bool_]  # [N] ways whose parts fit at all
    steps: Ints  # [P] of the parts
    capacity: int
    rows: list[Floats] = field(default_factory=list)  # what each way [N] is worth, of all ranks
    patterns: dict[tuple[Part, ...], None] = field(default_factory=dict)


class WholeTables:
    """The ways of a menu with strips, as a mixed-integer program sees them."""

    def __init__(self, ways: list[Way], copies: Ints, limits: tuple[float, float], ranks: int) -> None:
        self._arrays: WayArrays = arrays_of(ways)
        self._copies, self._ranks = copies, ranks
        self._limits = tuple(max(1.0, limit) for limit in limits)
        self._whole = np.array([way.number != FREE for way in ways])
        self.mixture: Floats = np.zeros(len(ways))  # tables in each way, of the last choice
        self.work = 0  # rows of linear programs, so far

    def refutes(self, slowest: float, low: float, high: float, until: float) -> bool:
        """Whether no plan of `slowest` ms has ranks that all spend `low` to `high` on the same; works until `until`."""
        asked, whole = self._question(slowest, low, high), False
        for turn in range(ROUNDS):
            if self.work > until:
                return False
            chosen = self._choose(asked, whole)
            if chosen is None:
                return True
            if not len(chosen):
                return False
            self.mixture = chosen
            filled = self._values(asked, chosen)
            if not whole and (filled <= 1 + SURE or turn >= LINEAR_ROUNDS):
                whole = True
            elif filled <= 1 + SURE:
                return False
        return False

    def _question(self, slowest: float, low: float, high: float) -> _Question:
        options, unit = self._arrays, slowest / GRID
        usable = np.ones(len(options.kind), dtype=np.bool_)
        usable[options.way[options.ms > (slowest - low) * (1 + 1e-12)]] = False
        steps = np.maximum(np.floor(options.ms / unit - 1e-9), 0).astype(np.int64)
        return _Question(slowest, low, high, usable, steps, int((slowest - low) / unit + 1e-9))

    def _choose(self, asked: _Question, whole: bool) -> Floats | None:
        """Tables in each way [N] that fill the fullest row least, None: no choice is left; empty: none was found."""
        from scipy.optimize import Bounds, LinearConstraint, milp

        options, many = self._arrays, len(asked.usable)
        kinds = np.arange(len(self._copies))[:, None] == options.kind
        filled = np.stack([options.spent / asked.slowest, *asked.rows])
        shared = options.everywhere / asked.high
        limited = np.stack([shared, options.hbm / self._limits[0], options.ddr / self._limits[1]])
        matrix = np.zeros((len(kinds) + len(filled) + len(limited), many + 1))
        matrix[: len(kinds), :many] = kinds
        matrix[len(kinds) : -len(limited), :many] = filled
        matrix[len(kinds) : -len(limited), -1] = -1.0
        matrix[-len(limited) :, :many] = limited
        free = np.full(len(filled), -np.inf)
        least = np.concatenate([self._copies, free, [asked.low / asked.high, 0.0, 0.0]])
        most = np.concatenate([self._copies, np.zeros(len(filled)), np.ones(len(limited))])
        upper = np.append(np.where(asked.usable, self._copies[options.kind], 0.0), 1 + SURE if whole else np.inf)
        with without_chatter():
            solved = milp(
                np.append(np.zeros(many), 1.0),
                integrality=np.append(self._whole & whole, 0),
                bounds=Bounds(np.zeros(many + 1), upper),
                constraints=LinearConstraint(matrix, least, most),
                options={"mip_rel_gap": GAP, "node_limit": NODES},
            )
        self.work += len(matrix) + NODE_WORK * int(solved.get("mip_node_count") or 0)
        if solved.status == 2 or (solved.x is not None and not whole and solved.fun > 1 + SURE):
            return None
        return np.zeros(0) if solved.x is None else np.maximum(solved.x[:many], 0.0)

    def _values(self, asked: _Question, chosen: Floats) -> float:
        """What the chosen ways' parts are worth, of all ranks; the values become a row of the program."""
        options = self._arrays
        taken = chosen[options.way] * options.ranks * self._ranks
        demand: dict[Part, float] = {}
        for k in np.flatnonzero((taken > 1e-7) & (asked.steps > 0)).tolist():
            part = (int(options.kind[options.way[k]]), int(asked.steps[k]))
            demand[part] = demand.get(part, 0.0) + float(taken[k])
        found = values_of(demand, self._copies, asked.capacity, asked.patterns)
        asked.patterns.update(dict.fromkeys(found.patterns))
        fits = asked.usable[options.way] & (asked.steps > 0)
        kind_of = options.kind[options.way]
        sizes = {int(kind): np.unique(asked.steps[fits & (kind_of == kind)]) for kind in np.unique(kind_of[fits])}
        worth = lifted(found.values, sizes, self._copies, asked.capacity)
        value = np.array([worth.get((int(kind_of[k]), int(asked.steps[k])), 0.0) for k in range(len(kind_of))])
        row = np.zeros(len(chosen))
        np.add.at(row, options.way, value * options.ranks)
        asked.rows.append(row)
        self.work += found.work + 2 * tables_on_a_rank(sizes, self._copies) + GRID * len(sizes) // 20
        return found.ranks / self._ranks
