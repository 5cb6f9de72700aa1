"""Means over seeds, and differences paired by seed with their 95% interval."""

import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

T_95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776}  # two-sided Student t by degrees of freedom


class Paired(NamedTuple):
    """What the runs of one setting, one per seed, came to."""

    auc: float
    logloss: float
    difference: float  # AUC minus that of the base
    half: float  # of the difference's interval; NaN for one seed
    hit_rate: str  # of the first seed; "" without a cache
    staleness: str  # the most seen; "" without a cache


def paired(runs: Sequence[dict[str, Any]], base: Sequence[dict[str, Any]]) -> Paired:
    """`runs` and `base`: summaries in the same order of seeds."""
    auc, logloss = (statistics.fmean(run[key] for run in runs) for key in ("auc", "logloss"))
    mean, half = interval([run["auc"] - other["auc"] for run, other in zip(runs, base, strict=True)])
    if runs[0]["mode"] == "bsp":
        return Paired(auc, logloss, mean, half, "", "")
    seen = max(run["observed_staleness_max"] or 0 for run in runs)
    rate = (runs[0]["cache"] or {}).get("hit_rate")
    return Paired(auc, logloss, mean, half, "" if rate is None else f"{rate:.3f}", f"{seen:.15g}")


def interval(values: list[float]) -> tuple[float, float]:
    """Mean and half-width of its 95% interval."""
    n = len(values)
    half = T_95[n - 1] * statistics.stdev(values) / math.sqrt(n) if n > 1 else math.nan
    return statistics.fmean(values), half


def best_auc(data: Path) -> float | None:
    """AUC of the labels' true probabilities on the test split, where the data set knows it."""
    best = json.loads((data / "schema.json").read_text()).get("best_auc")
    return None if not best else float(best["test"])
