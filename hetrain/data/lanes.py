"""Who reads which examples: lanes of pieces of permuted windows, dealt to ranks and dealt again on resume.

An epoch is a sequence of N examples: the row groups of all files, permuted by (seed, epoch) when
shuffling. Rank r's lane is the range [rN/W, (r+1)N/W) of it, cut into windows that are permuted each
on its own. What is left of an epoch is again a list of lanes, so another world size can share it out.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

_WINDOW_STREAM, _BLOCK_STREAM = 1, 2  # keep the two uses of (seed, epoch) apart


@dataclass(frozen=True)
class Piece:
    """Examples `start .. stop` of the permuted window [lo, hi) of an epoch's sequence."""

    lo: int
    hi: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Examples in the piece."""
        return self.stop - self.start


Lane = list[Piece]


def lane_size(lane: Sequence[Piece]) -> int:
    """Examples in a lane."""
    return sum(piece.size for piece in lane)


def fresh_lanes(examples: int, world_size: int, window: int) -> list[Lane]:
    """The lanes of a whole epoch."""
    lanes = []
    for rank in range(world_size):
        first, last = rank * examples // world_size, (rank + 1) * examples // world_size
        bounds = [*range(first, last, window), last]
        lanes.append([Piece(lo, hi, 0, hi - lo) for lo, hi in pairwise(bounds)])
    return lanes


def drop(lane: Sequence[Piece], examples: int) -> Lane:
    """The lane without its first `examples` examples."""
    left: Lane = []
    for piece in lane:
        skip = min(examples, piece.size)
        examples -= skip
        if skip < piece.size:
            left.append(Piece(piece.lo, piece.hi, piece.start + skip, piece.stop))
    return left


def redeal(lanes: Sequence[Sequence[Piece]], world_size: int) -> list[Lane]:
    """The examples of all lanes, one lane after the other, dealt evenly to `world_size` new lanes."""
    rest = deque(piece for lane in lanes for piece in lane)
    total = lane_size(rest)
    dealt: list[Lane] = []
    for rank in range(world_size):
        share = (rank + 1) * total // world_size - rank * total // world_size
        lane: Lane = []
        while share:
            piece = rest.popleft()
            cut = piece.start + min(share, piece.size)
            lane.append(Piece(piece.lo, piece.hi, piece.start, cut))
            if cut < piece.stop:
                rest.appendleft(Piece(piece.lo, piece.hi, cut, piece.stop))
            share -= lane[-1].size
        dealt.append(lane)
    return dealt


def pack(lanes: Sequence[Sequence[Piece]]) -> list[list[list[int]]]:
    """Lanes as plain lists of numbers."""
    return [[list(astuple(piece)) for piece in lane] for lane in lanes]


def unpack(lanes: Sequence[Sequence[Sequence[int]]]) -> list[Lane]:
    """Inverse of `pack`."""
    return [[Piece(*piece) for piece in lane] for lane in lanes]


def block_order(blocks: int, seed: int, epoch: int, shuffle: bool) -> NDArray[np.int64]:
    """Order of the row groups in an epoch's sequence, [blocks] int64."""
    if not shuffle:
        return np.arange(blocks)
    return np.random.default_rng([_BLOCK_STREAM, seed, epoch]).permutation(blocks)


def window_order(piece: Piece, seed: int, epoch: int) -> NDArray[np.int64]:
    """Positions inside the shuffled window [lo, hi) that the piece reads, in reading order, [size] int64."""
    order = np.random.default_rng([_WINDOW_STREAM, seed, epoch, piece.lo]).permutation(piece.hi - piece.lo)
    return order[piece.start : piece.stop]
