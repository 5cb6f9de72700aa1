"""A predicted plan in words and as a table: what each rank holds and takes, how near the best it is, what to move."""

from collections import Counter, defaultdict
from collections.abc import Sequence

from hetrain.planner.cluster import GIB
from hetrain.planner.machines import PIECES, Machines
from hetrain.planner.piece_costs import NO_COSTS
from hetrain.planner.planned import Planned, RankCost
from hetrain.planner.workload import TableLoad

HEAD = ("rank", "node", "hbm GiB", "ddr GiB", "rows", "compute ms", "comm ms", "total ms")
USES = {
    "hbm_gb_s": "hbm",
    "ddr_gb_s": "ddr",
    "host_link_gb_s": "between hbm and ddr",
    "intra_gb_s": "within a machine",
    "inter_gb_s": "between machines",
}
MIB = 1 << 20
SHOWN = 16  # ranks listed one by one
SLOWEST = 5  # of more ranks


def size_text(size: float) -> str:
    """Bytes in words."""
    return f"{size / GIB:,.2f} GiB" if size >= GIB else f"{size / MIB:,.2f} MiB"


def total_bytes(loads: Sequence[TableLoad]) -> int:
    """Bytes of all rows with their optimizer state, each once."""
    return sum(load.table.rows * load.row_bytes for load in loads)


def rank_rows(planned: Planned) -> list[tuple[str, ...]]:
    """Cells below HEAD: every rank, or of many the slowest, the fastest and the mean."""
    ranks, per_node = planned.ranks, planned.plan.ranks_per_node or planned.plan.world_size

    def row(cost: RankCost) -> tuple[str, ...]:
        return _row(str(cost.rank), str(cost.rank // per_node), cost)

    if len(ranks) <= SHOWN:
        return [row(cost) for cost in ranks]
    by_time = sorted(ranks, key=lambda cost: -cost.total_ms)
    slowest = [row(cost) for cost in by_time[:SLOWEST]]
    return [*slowest, ("...",) * len(HEAD), row(by_time[-1]), _row("mean", "", _mean(ranks))]


def _mean(ranks: Sequence[RankCost]) -> RankCost:
    n = len(ranks)
    return RankCost(
        rank=-1,
        hbm_bytes=sum(cost.hbm_bytes for cost in ranks) // n,
        ddr_bytes=sum(cost.ddr_bytes for cost in ranks) // n,
        rows=sum(cost.rows for cost in ranks) // n,
        compute_ms=sum(cost.compute_ms for cost in ranks) / n,
        comm_ms=sum(cost.comm_ms for cost in ranks) / n,
        fixed_ms=sum(cost.fixed_ms for cost in ranks) / n,
    )


def _row(name: str, node: str, cost: RankCost) -> tuple[str, ...]:
    times = (milliseconds(ms) for ms in (cost.compute_ms, cost.comm_ms, cost.total_ms))
    return name, node, _gib(cost.hbm_bytes), _gib(cost.ddr_bytes), f"{cost.rows:,}", *times


def _gib(size: int) -> str:
    gib = size / GIB
    return f"{gib:.2f}" if gib >= 1 or not size else f"{gib:.3g}"


def milliseconds(ms: float) -> str:
    """Three figures or so."""
    return f"{ms:.3f}" if ms < 10 else f"{ms:.2f}" if ms < 100 else f"{ms:,.0f}"


def asked_lines(what: str, loads: Sequence[TableLoad], machines: Machines) -> list[tuple[str, str]]:
    """What is to be planned, and for which machines."""
    cluster = machines.cluster
    rows = sum(load.table.rows for load in loads)
    measured = sum(load.skew is not None for load in loads)
    memories = [(cluster.hbm_bytes, "hbm")] if cluster.kind == "cuda" else []
    memory = " and ".join(f"{size_text(size)} {name}" for size, name in [*memories, (cluster.ddr_bytes, "ddr")])
    skew = "not known: all ids taken as equally frequent (`hetrain stats` measures those of a data set)"
    if measured:
        skew = f"measured for {measured:,} of {len(loads):,} tables"
    return [
        (
            "tables",
            f"{len(loads):,} ({what}): {rows:,} rows, {size_text(total_bytes(loads))} with optimizer state, "
            f"{sum(load.pooling for load in loads):,.4g} lookups per example",
        ),
        ("skew", skew),
        ("machines", f"{cluster.nodes:,} of {cluster.ranks_per_node} {cluster.kind} ranks, each {memory} for tables"),
        ("speeds", speeds_text(machines)),
    ]


def speeds_text(machines: Machines) -> str:
    """Which speed is from where; what the profile is short of."""
    cluster, by_source = machines.cluster, defaultdict[str, list[str]](list)
    for key, source in machines.sources.items():
        if key != PIECES:
            by_source[source].append(f"{getattr(cluster, key):.4g} GB/s {_use(key, machines)}")
        elif cluster.piece_costs != NO_COSTS:
            by_source[source].append("costs of pieces and sharding types")
    text = "; ".join(f"{', '.join(found)} from {source}" for source, found in by_source.items())
    if not machines.one_rank:
        return text
    return (
        f"{text}. The profile is of one rank, which exchanged nothing: measure these ranks with `hetrain plan "
        f"--calibrate launch.nproc={cluster.ranks_per_node} cluster.profile=FILE`, in another file"
    )


def _use(key: str, machines: Machines) -> str:
    """What a speed is of. Between machines one machine has none: there that speed prices sums of gradients alone."""
    if key == "inter_gb_s" and machines.cluster.nodes == 1:
        return "in sums of gradients and to servers" if machines.servers else "in sums of gradients"
    return USES[key]


def found_lines(planned: Planned, batch_size: int) -> list[tuple[str, str]]:
    """How good the plan is, and what would make it better."""
    slowest, bound = planned.slowest_ms, planned.lower_bound_ms
    above = f"{max(0.0, slowest / bound - 1):.1%} above" if bound > 0 else "above"  # sums of one plan round apart
    best = f"{milliseconds(bound)} ms, which no plan of the cuts allowed can go below"
    kinds = Counter(planned.plan.sharding.values())
    fixed, pieces = planned.ranks[0].fixed_ms, len(planned.plan.pieces)
    costs = (
        f"{milliseconds(fixed)} ms of every rank's total: {pieces:,} pieces and {len(kinds)} sharding types, by count"
    )
    return [
        ("slowest", f"{milliseconds(slowest)} ms a step for the embeddings of {batch_size:,} examples per rank"),
        *([("fixed", costs)] if fixed else []),
        ("bound", f"{above} {best}: {planned.bounded_by}"),
        ("balance", f"max/mean {planned.imbalance:.3f}"),
        ("bottleneck", planned.bottleneck),
        ("tables as", ", ".join(f"{count:,} {kind}" for kind, count in kinds.most_common())),
        ("memory", ", ".join(f"{size_text(size)} in {tier}" for tier, size in planned.tiers.items() if size)),
    ]
