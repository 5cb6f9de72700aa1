"""Examples as columns in memory: cut, joined and reordered without touching single rows.

Suffixes: n examples, I dense columns, F sparse columns, m ids of a multi-hot column.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Jagged:
    """A multi-hot column: example i has the ids values[offsets[i] : offsets[i + 1]]."""

    values: Ints  # [m]
    offsets: Ints  # [n + 1], offsets[0] = 0

    def cut(self, first: int, last: int) -> "Jagged":
        """Examples first .. last."""
        offsets = self.offsets[first : last + 1]
        return Jagged(self.values[offsets[0] : offsets[-1]], offsets - offsets[0])

    def take(self, order: Ints) -> "Jagged":
        """Examples in the order given."""
        lengths = np.diff(self.offsets)[order]
        offsets = offsets_of(lengths)
        source = np.repeat(self.offsets[order] - offsets[:-1], lengths) + np.arange(offsets[-1])
        return Jagged(self.values[source], offsets)


def offsets_of(lengths: NDArray[np.integer]) -> Ints:
    """[n] lengths -> [n + 1] offsets, int64."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def join_jagged(parts: Sequence[Jagged]) -> Jagged:
    """Parts one after the other."""
    lengths = np.concatenate([np.diff(part.offsets) for part in parts])
    return Jagged(np.concatenate([part.values for part in parts]), offsets_of(lengths))


@dataclass(frozen=True)
class Window:
    """n examples. One-hot columns share one matrix; multi-hot ones stand beside it."""

    labels: Floats  # [n]
    dense: Floats  # [n, I]
    one_hot: Ints  # [F one-hot, n]
    multi_hot: tuple[Jagged, ...]

    @property
    def size(self) -> int:
        """Examples in the window."""
        return len(self.labels)

    def cut(self, first: int, last: int) -> "Window":
        """Examples first .. last, as views."""
        return Window(
            self.labels[first:last],
            self.dense[first:last],
            self.one_hot[:, first:last],
            tuple(column.cut(first, last) for column in self.multi_hot),
        )


def join(parts: Sequence[Window]) -> Window:
    """Parts one after the other; a single part is returned as it is."""
    if len(parts) == 1:
        return parts[0]
    return Window(
        np.concatenate([part.labels for part in parts]),
        np.concatenate([part.dense for part in parts]),
        np.concatenate([part.one_hot for part in parts], axis=1),
        tuple(join_jagged(columns) for columns in zip(*(part.multi_hot for part in parts), strict=True)),
    )


def empty_window(dense: int, one_hot: int, multi_hot: int) -> Window:
    """No examples, with the columns of every other window."""
    nothing = Jagged(np.zeros(0, np.int64), np.zeros(1, np.int64))
    return Window(
        np.zeros(0, np.float32),
        np.zeros((0, dense), np.float32),
        np.zeros((one_hot, 0), np.int64),
        (nothing,) * multi_hot,
    )
