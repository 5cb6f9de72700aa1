"""A column's stats as the planner's skew."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from hetrain.planner.workload import Skew
from hetrain.stats.spectrum import Spectrum

STEP = 2**0.5  # between the numbers of lookups at which distinct ids are computed: lines between them are 0.5% off
MOST = 1 << 40


def skew_of(column: Mapping[str, Any]) -> Skew | None:
    """The skew of one column of stats.json; None for a column without lookups."""
    groups = column["spectrum"]
    if not groups:
        return None
    spectrum = Spectrum(np.array([ids for ids, _ in groups]), np.array([lookups for _, lookups in groups]))
    unique: list[tuple[float, float]] = []
    lookups = 1.0
    while lookups < MOST and (not unique or unique[-1][1] < 0.9999 * spectrum.distinct):
        unique.append((lookups, spectrum.unique(lookups)))
        lookups *= STEP
    ids, share = np.cumsum(spectrum.ids), np.cumsum(spectrum.ids * spectrum.lookups)
    top = tuple(zip((ids / ids[-1]).tolist(), (share / share[-1]).tolist(), strict=True))
    return Skew((*unique, (lookups, float(spectrum.distinct))), top, tuple(column["row_quantiles"]))
