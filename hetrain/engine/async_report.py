"""What a rank at its own pace tells of a run: its cache as a worker, and as an owner what pushes had missed."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from hetrain.engine.owner_part import OwnerPart
from hetrain.engine.store_memory import StoreMemory, peak_rss
from hetrain.pulled_bags import PulledGroup


def async_report(
    part: OwnerPart | None, groups: Sequence[PulledGroup], memory: StoreMemory | None, *, gated: bool, audited: bool
) -> dict[str, Any]:
    """`part`: where rows are owned; `gated`: copies have an age; `audited`: updates missed were counted."""
    found = part.report() if part is not None else {}
    counters = [asdict(group.copies.counters) for group in groups]
    cache = {name: sum(c[name] for c in counters) for name in counters[0]} if counters else None
    kept = sum(group.copies.capacity_rows for group in groups)
    return {
        "cache": cache and {"capacity_rows": kept, **cache},
        "observed_staleness_max": age_max(groups) if gated else found.get("missed_pushes_max"),
        "missed_updates_max": found.get("missed_updates_max") if audited else None,
        **{name: found.get(name) for name in ("lead_max", "first_end")},
        "memory": {
            "predicted": None if memory is None else memory.as_dict(),
            "worker_rss_max": peak_rss(),
            "owner_rows_max": found.get("owner_rows_max"),
            "residue_max": sum(group.residue.bytes_max for group in groups if group.residue is not None),
        },
    }


def age_max(groups: Sequence[PulledGroup]) -> int:
    """Worker clocks between the oldest copy read and its read."""
    return max((group.copies.age_max for group in groups), default=0)
