"""summary.json: the counters of all ranks made one, and what the run was made with."""

import json
import platform
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import hetrain
from hetrain.durable import write_text

PACKAGES = ("torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu", "tensordict", "torchmetrics", "pyarrow", "numpy")


def versions() -> dict[str, str]:
    """Versions of Python, hetrain and the packages whose numbers matter, those installed."""
    found = {"hetrain": hetrain.__version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:  # one of the two FBGEMM builds always is
            continue
    return found


def merge(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One report from one per rank: numbers are added, those named `..._max` maximised, texts taken from rank 0."""
    merged: dict[str, Any] = {}
    for key in dict.fromkeys(k for report in reports for k in report):
        values = [report[key] for report in reports if report.get(key) is not None]
        if not values:
            merged[key] = None
        elif isinstance(values[0], Mapping):
            merged[key] = merge(values)
        elif isinstance(values[0], str | bool | list):
            merged[key] = values[0]
        else:
            merged[key] = max(values) if key.endswith("_max") else sum(values)
    return merged


def describe(totals: Mapping[str, Any], report: Mapping[str, Any]) -> dict[str, Any]:
    """The measured part of a summary.

    `totals`: Trainer's counters over all ranks and sittings; `report`: Engine.report() merged over ranks.
    """
    rank_seconds = max(totals["rank_seconds"], 1e-9)
    return {
        **report,
        "examples": totals["examples"],
        "examples_per_s": totals["examples"] / max(totals["train_s"], 1e-9),
        "seconds": totals["seconds"],
        "train_seconds": totals["train_s"],
        "restarts": totals["restarts"],
        "bytes": {**totals["bytes"], "total": sum(totals["bytes"].values())},
        "bytes_aside": sum(totals["bytes_aside"].values()),
        "clipped_values": totals.get("clipped_values", 0),
        "kernel_bytes": totals["kernel_bytes"],
        "cache": _with_hit_rate(report["cache"]) if report.get("cache") else None,
        "observed_staleness_max": report.get("observed_staleness_max"),
        "missed_updates_max": report.get("missed_updates_max"),
        "wait_data_share": totals["wait_data_s"] / rank_seconds,
        "wait_comm_share": totals["wait_comm_s"] / rank_seconds,
        "versions": versions(),
    }


def in_words(summary: Mapping[str, Any]) -> str:
    """The line a run ends with."""
    cache = summary["cache"] or {}
    has_hits = cache.get("hit_rate") is not None and (cache["capacity_rows"] or cache["hit_rate"])
    hits = f", {cache['hit_rate']:.0%} of row reads from the cache" if has_hits else ""
    return (
        f"{summary['steps']:,} steps, {summary['examples']:,} examples at {summary['examples_per_s']:,.0f} a second, "
        f"{summary['bytes']['total'] / 1e6:,.1f} MB sent{hits}{_staleness_in_words(summary)}"
    )


def _staleness_in_words(summary: Mapping[str, Any]) -> str:
    """How old the oldest row read was; nothing where every row is fresh."""
    bound = summary["staleness"]
    if bound is None or not (summary["cache"] or {}).get("capacity_rows"):
        return ""
    unit, most = summary.get("staleness_unit", "updates"), summary["observed_staleness_max"]
    if isinstance(bound, int | float):
        return f", rows at most {most:,} {unit} behind of {bound:g} allowed"
    if unit == "updates" and summary.get("missed_updates_max") is None:  # of no copy an owner was asked
        return f", rows at most {most:,} of their worker's own updates behind, others' not counted (no bound)"
    return f", rows at most {most:,} {unit} behind (no bound)"


def _with_hit_rate(cache: Mapping[str, Any]) -> dict[str, Any]:
    """A merged cache report, with the share of rows read that needed no transfer."""
    reads = sum(cache.get(key) or 0 for key in ("hits", "misses", "invalid", "own_invalid"))
    return {**cache, "hit_rate": cache["hits"] / reads if reads else None}


def write(folder: Path, summary: Mapping[str, Any]) -> None:
    """Write summary.json, whole or not at all."""
    write_text(folder / "summary.json", json.dumps(summary, indent=2) + "\n")
