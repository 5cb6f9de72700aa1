"""Plans of large models under TorchRec's estimator and memory limits: TorchRec's planner, a simple one, ours, bounds.

    python benchmarks/planner.py [workload:ranks ...]

Nodes of 8 ranks, 80 GiB and 200 GiB of host memory each, batch 8192 per rank, TorchRec's default speeds, SGD. Limits as
TorchRec's default reservation leaves them: 85% of 80 GiB less 20 copies of a batch's ids; `:15%` takes the 15% only,
`:x10` is planner.effort=10.
The figures of TorchRec's planner and of a simple one (largest first, choosing each table's sharding) are recorded ones:
the best of TorchRec's proposers within the time limits noted in docs/benchmarks.md. They are milliseconds of the
slowest rank, as ours and the bound.
"""

import math
import sys
import time
from collections import Counter

from planner_tables import workload

from hetrain.errors import ConfigError
from hetrain.planner.cluster import GIB, Cluster
from hetrain.planner.options import Options
from hetrain.planner.planned import Planned
from hetrain.planner.strategies import make_plan
from hetrain.planner.workload import TableLoad

BATCH, LOCAL = 8192, 8
SCALE = 2**30 / 1e9  # TorchRec's speeds are in GiB/s
# workload: ranks: (TorchRec, simple), None where they found no plan
RECORDED: dict[str, dict[int, tuple[float | None, float | None]]] = {
    "kaggle": {8: (0.258, 0.258), 16: (1.364, 1.159), 32: (1.926, 1.202), 64: (2.795, 1.202), 128: (3.729, 2.136)},
    "dcnv2": {8: (4.173, 4.173), 16: (14.18, 14.23), 32: (16.55, 15.68), 64: (22.53, 21.51), 128: (35.94, 39.48)},
    "tiny": {8: (0.7458, 0.6291), 16: (3.472, 2.793), 32: (3.711, 3.495), 64: (3.777, 3.777)},
    "small": {8: (2.774, 2.745), 16: (9.525, 9.442), 128: (15.72, 12.64)},
    "medium": {8: (16.52, 16.55), 16: (81.42, 81.06), 128: (134.7, 92.08)},
    "large": {8: (1442, None), 16: (210.0, 207.9), 128: (712.4, 227.7)},
    "heavy856": {16: (1068, None)},
}
CASES = (
    *(f"{name}:{ranks}" for name in ("kaggle", "dcnv2") for ranks in (8, 16, 32, 64, 128)),
    *(f"dcnv2:{ranks}:x10" for ranks in (32, 64, 128)),
    "tiny:32:x10",
    "small:128:x10",
    *(f"tiny:{ranks}" for ranks in (8, 16, 32, 64)),
    *(f"{name}:{ranks}" for name in ("small", "medium", "large") for ranks in (8, 16, 128)),
    *("heavy856:8", "heavy856:16", "jumbo:64", "jumbo:80", "colossal:128", "colossal:128:15%", "colossal:512:15%"),
)


def cluster(loads: list[TableLoad], ranks: int, reserve_ids: bool) -> Cluster:
    """`ranks` GPUs in nodes of 8, with the memory that TorchRec leaves for tables."""
    ids = math.ceil(sum(load.pooling for load in loads) * BATCH * 8) * 20 if reserve_ids else 0
    hbm, ddr = int(0.85 * 80 * GIB) - ids, 200 * GIB
    speeds = (897 * SCALE, 51 * SCALE, 600 * SCALE, 12.5 * SCALE)
    return Cluster("cuda", ranks // LOCAL, LOCAL, hbm, ddr, *speeds, host_link_gb_s=32 * SCALE)


def row(case: str) -> str:
    """A line of the table."""
    name, ranks, *rest = case.split(":")
    loads = workload(name)
    efforts = [float(word[1:]) for word in rest if word.startswith("x")]
    machines = cluster(loads, int(ranks), "15%" not in rest)
    began = time.process_time()
    try:
        planned: Planned | None = make_plan(
            "hierarchical", loads, machines, "torchrec", BATCH, Options(effort=max(efforts, default=1.0))
        )
        why = ""
    except ConfigError as error:
        planned, why = None, str(error)
    seconds = time.process_time() - began
    recorded = RECORDED.get(name, {}).get(int(ranks), (None, None))
    others = [f"{ms:.4g}" if ms else "none" for ms in recorded]
    ours = ["none", "", "", why]
    if planned is not None:
        slowest, bound = planned.slowest_ms, planned.lower_bound_ms
        tiers = ", ".join(f"{size / GIB:,.0f} {tier}" for tier, size in planned.tiers.items())
        ours = [f"{slowest:.4g}", f"{bound:.4g}", f"{slowest / bound - 1:.1%}", tiers]
    kinds = Counter() if planned is None else Counter(planned.plan.sharding.values())
    words = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    return (
        f"| {' '.join((name, ranks, *rest))} | "
        + " | ".join((*others, *ours[:3], f"{seconds:.1f}", words, ours[3]))
        + " |"
    )


def main() -> None:
    """Print the table."""
    print("| tables, ranks | TorchRec | simple | ours | bound | above it | CPU s | cuts | GiB in |")
    print("|---|---|---|---|---|---|---|---|---|")
    for case in sys.argv[1:] or CASES:
        print(row(case), flush=True)


if __name__ == "__main__":
    main()
