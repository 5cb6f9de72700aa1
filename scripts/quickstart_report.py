"""What a run came to: AUC, speed and the embedding bytes that its cache saved. Usage: quickstart_report.py RUN_FOLDER.

Bytes saved: an empty cache fetches and pushes every row it reads, at every step. This run fetched only the share of its
reads that missed or was too old, so the same traffic for all reads would have been reads / fetched times as much. The
bytes of the clocks that keep the cache valid count against it. A figure from this run's own counts, not a second run.
"""

import json
import sys
from pathlib import Path
from typing import Any


def bytes_saved(summary: dict[str, Any]) -> tuple[int, int] | None:
    """(embedding bytes sent, embedding bytes an empty cache would have sent); None without a cache."""
    cache = summary.get("cache")
    if not cache:
        return None
    fetched = sum(cache.get(key) or 0 for key in ("misses", "invalid", "own_invalid"))
    if not fetched:
        return None
    rows = sum(summary["bytes"][channel] for channel in ("ids", "rows_pull", "rows_push"))
    return rows + summary["bytes"]["clocks"], round(rows * (cache["hits"] + fetched) / fetched)


def main() -> None:
    """Print the report."""
    folder = Path(sys.argv[1])
    summary = json.loads((folder / "summary.json").read_text())
    best = (summary.get("best_auc") or {}).get("test")
    print(f"\nAUC          {summary['auc']:.4f}" + (f" (best reachable on this data: {best:.4f})" if best else ""))
    print(f"examples/s   {summary['examples_per_s']:,.0f} on {summary['world_size']} processes")
    saved = bytes_saved(summary)
    if saved and saved[1]:
        sent, empty = saved
        share = 1 - sent / empty
        against = f"{sent / 1e6:.1f} MB sent, about {empty / 1e6:.1f} MB with an empty cache"
        print(f"bytes saved  {share:.0%} of embedding traffic: {against}")
        print(f"             (dense gradients, {summary['bytes']['dense'] / 1e6:.1f} MB, are not counted here)")
    print(f"run folder   {folder}")
    print("\nnext         source .venv/bin/activate; hetrain --help; hetrain train --help")


if __name__ == "__main__":
    main()
