"""What follows from how often each id is looked up: shares of the hottest, distinct ids of a batch, hits of a cache.

Only the numbers of lookups matter, not which id has them, so ids with equal numbers are kept as one group.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetrain.data.window import Ints
from hetrain.stats.counts import Counts

MOST_GROUPS = 64  # of the spectrum as it is saved
FEW = 1 << 16  # lookups up to which ids are grouped without sorting them


@dataclass(frozen=True)
class Spectrum:
    """Groups of ids, the hottest first: `ids[i]` ids of `lookups[i]` lookups each (a mean, once made coarse)."""

    ids: Ints
    lookups: NDArray[np.number]

    @staticmethod
    def of(counts: Counts) -> "Spectrum":
        """The spectrum of the lookups of every id, in any order, all above 0."""
        few = np.bincount(counts[counts < FEW].astype(np.int64))
        small = np.flatnonzero(few)
        large, ids = np.unique(counts[counts >= FEW], return_counts=True)
        lookups = np.concatenate([small, large.astype(np.int64)])
        return Spectrum(np.concatenate([few[small], ids]).astype(np.int64)[::-1], lookups[::-1])

    @staticmethod
    def joined(parts: Sequence["Spectrum"]) -> "Spectrum":
        """Of all tables together."""
        lookups, place = np.unique(np.concatenate([part.lookups for part in parts]), return_inverse=True)
        ids = np.zeros(len(lookups), np.int64)
        np.add.at(ids, place, np.concatenate([part.ids for part in parts]))
        return Spectrum(ids[::-1], lookups[::-1])

    @property
    def distinct(self) -> int:
        """Ids that are looked up at all."""
        return int(self.ids.sum())

    @property
    def total(self) -> int:
        """Lookups of all ids."""
        return round(float(self.ids @ self.lookups))

    def share_of_hottest(self, ids: int) -> float:
        """Share of all lookups that go to the `ids` hottest ids."""
        if not self.total:
            return 0.0
        ids = min(ids, self.distinct)
        ends = np.cumsum(self.ids)
        group = int(np.searchsorted(ends, ids))
        whole = self.ids[:group] @ self.lookups[:group]
        rest = ids - (ends[group - 1] if group else 0)
        return float(whole + rest * self.lookups[group]) / self.total

    def unique(self, draws: float) -> float:
        """Expected distinct ids among `draws` independent lookups: the sum over ids of 1 - (1 - p)^draws."""
        if not self.total:
            return 0.0
        with np.errstate(divide="ignore"):  # an id with every lookup: log(1 - p) = -inf is right
            missed = draws * np.log1p(-self.lookups / self.total)
        return float(-np.expm1(missed) @ self.ids)

    def lru_hit_rate(self, capacity: int) -> float:
        """Share of lookups that a least-recently-used cache of `capacity` rows answers, ids coming independently.

        Che's approximation: a row stays for T lookups after its last one, T being such that `capacity` rows are held.
        """
        if capacity <= 0 or not self.total:
            return 0.0
        if capacity >= self.distinct:
            return 1.0
        rate = self.lookups / self.total
        low, high = 0.0, 1.0
        while -np.expm1(-rate * high) @ self.ids < capacity:
            high *= 2
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if -np.expm1(-rate * middle) @ self.ids < capacity else (low, middle)
        return float((self.ids * rate) @ -np.expm1(-rate * high))

    def coarse(self, groups: int = MOST_GROUPS) -> "Spectrum":
        """Neighbouring groups joined until at most `groups` are left; ids and lookups stay what they were in all.

        Borders are even on a logarithmic scale of lookups, so that every group holds ids of about one frequency.
        """
        if len(self.ids) <= groups:
            return self
        scale = np.log(self.lookups[0] / self.lookups)
        place = np.minimum((scale / scale[-1] * groups).astype(np.int64), groups - 1)
        ids = np.bincount(place, self.ids, groups)
        lookups = np.bincount(place, self.ids * self.lookups, groups)
        used = ids > 0
        return Spectrum(ids[used].astype(np.int64), lookups[used] / ids[used])
