"""What to put on a rank: the parts worth most that fit its time and its memories, a knapsack problem of many resources.

Solved by labels: every set of parts found so far has one, with what it is worth and takes. Of the labels that take
about the same time and device memory (a cell of a grid) the one worth most is kept, so that few stay however many sets
there are. What a label takes is exact: every set found fits; that none is worth more is not certain.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetrain.planner.search.arrays import Floats, Ints

CELLS = 40  # of each of the first two resources
LIKE = 1e-9  # relative: worth that is the same


@dataclass(frozen=True)
class Fillings:
    """Sets of parts, those worth most first: what each is `worth` [N] and the `counts` [N, items] of its parts."""

    worth: Floats
    counts: Ints


def best_fillings(sizes: Floats, worth: Floats, most: Ints, wanted: int) -> Fillings:
    """Sets of items whose sizes add up to at most 1 in every resource.

    Args:
        sizes: [items, resources] of each item, as shares of what there is.
        worth: [items] of each; those of none are left out.
        most: [items] of each item that a set may hold.
        wanted: how many sets to return, at most.
    """
    labels = _Labels(sizes.shape)
    density = worth / (sizes.sum(1) + 1e-12)
    for item in np.argsort(-density, kind="stable").tolist():
        if worth[item] > 0 and most[item] and (sizes[item] <= 1).all():
            labels.extend(item, sizes[item], float(worth[item]), int(most[item]))
    return labels.best(wanted)


class _Labels:
    def __init__(self, shape: tuple[int, ...]) -> None:
        items, resources = shape
        self._of_cell: Ints = np.full((CELLS + 1) ** 2, -1)  # label of each cell
        self._worth: Floats = np.zeros(1)
        self._used: Floats = np.zeros((1, resources))
        self._counts: NDArray[np.int16] = np.zeros((1, items), dtype=np.int16)
        self._of_cell[0] = 0

    def extend(self, item: int, size: Floats, worth: float, most: int) -> None:
        """Add labels with up to `most` of an item to those there are."""
        new = np.arange(len(self._worth))
        for _ in range(most):
            used = self._used[new] + size
            fits = (used <= 1 + 1e-12).all(1)
            if not fits.any():
                break
            new = self._add(item, self._worth[new[fits]] + worth, used[fits], new[fits])
            if not len(new):
                break
        self._prune()

    def _add(self, item: int, worth: Floats, used: Floats, source: Ints) -> Ints:
        """The labels, of those given, that are worth more than what their cells have."""
        cell = np.minimum((used[:, :2] * CELLS + 1e-9).astype(np.int64), CELLS) @ np.array([CELLS + 1, 1])
        held = self._of_cell[cell]
        better = (held < 0) | (worth > self._worth[held] * (1 + LIKE))
        order = np.flatnonzero(better)[np.argsort(worth[better], kind="stable")]
        winner: Ints = np.full(len(self._of_cell), -1)
        winner[cell[order]] = order  # of a cell's several the last, which is worth most
        won = np.sort(winner[winner >= 0])
        counts = self._counts[source[won]].copy()
        counts[:, item] += 1
        first = len(self._worth)
        self._worth = np.concatenate([self._worth, worth[won]])
        self._used = np.concatenate([self._used, used[won]])
        self._counts = np.concatenate([self._counts, counts])
        new = np.arange(first, first + len(won))
        self._of_cell[cell[won]] = new
        return new

    def _prune(self) -> None:
        """Leave out labels that another beats, which takes less: of their cell, or of one further down."""
        grid = np.where(self._of_cell >= 0, self._worth[self._of_cell], -1.0).reshape(CELLS + 1, CELLS + 1)
        below = np.maximum.accumulate(np.maximum.accumulate(grid, 0), 1)
        beaten: NDArray[np.bool_] = np.zeros(grid.shape, dtype=np.bool_)
        beaten[1:, 1:] = below[:-1, :-1] >= grid[1:, 1:]
        kept = np.flatnonzero((self._of_cell >= 0) & ~beaten.ravel())
        labels = self._of_cell[kept]
        self._of_cell = np.full(len(self._of_cell), -1)
        self._of_cell[kept] = np.arange(len(kept))
        self._worth, self._used, self._counts = self._worth[labels], self._used[labels], self._counts[labels]

    def best(self, wanted: int) -> Fillings:
        order = np.argsort(-self._worth, kind="stable")[:wanted]
        return Fillings(self._worth[order], self._counts[order].astype(np.int64))
