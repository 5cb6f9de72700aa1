"""What makes the slowest rank of a plan slow, and what would move it, in words: the same ones whoever made the plan."""

from collections.abc import Mapping
from dataclasses import dataclass

from hetrain.planner.cluster import Cluster
from hetrain.planner.plan import Plan
from hetrain.planner.planned import RankCost


@dataclass(frozen=True)
class TableHere:
    """What a table takes of one rank: milliseconds of a step beside what is fixed, and the memory it is read from."""

    ms: float
    tier: str


def bottleneck(plan: Plan, slowest: RankCost, tables: Mapping[str, TableHere], cluster: Cluster) -> str:
    """What `slowest` does most, and which key would change it; `tables`: those that load this rank, by name."""
    if not slowest.compute_ms + slowest.comm_ms:
        return "no table is looked up"
    total = slowest.total_ms
    most = max(slowest.fixed_ms, slowest.comm_ms, slowest.compute_ms)
    if most == slowest.fixed_ms:
        what = _fixed(plan)
    elif most == slowest.comm_ms:
        link = "cluster.intra_gb_s" if cluster.nodes == 1 else "cluster.inter_gb_s"
        what = f"exchange; a faster link ({link}) or a smaller train.batch_size would move it"
    else:
        what = _memory(tables, cluster)
    top = max(tables, key=lambda name: tables[name].ms)
    rest = "Most of the rest" if most == slowest.fixed_ms else "Most"
    held = f"{rest} is table {top!r} ({plan.sharding[top]}, {tables[top].ms:.3g} of {total:.3g} ms)"
    return f"rank {slowest.rank}: {most / total:.0%} of its time is {what}. {held}"


def _fixed(plan: Plan) -> str:
    """A plan of one sharding type cannot have fewer; only what is counted by tables and examples is left to change."""
    if not plan.pieces:
        return "what replicated tables cost however few they are, which nothing of a plan would move"
    if len(set(plan.sharding.values())) > 1:
        return "what pieces and sharding types cost each; fewer (planner.sharding_types) would move it"
    return "what pieces cost each, of one sharding type; fewer tables or a smaller train.batch_size would move it"


def _memory(tables: Mapping[str, TableHere], cluster: Cluster) -> str:
    key = "cluster.hbm_gb_s" if cluster.kind == "cuda" else "cluster.ddr_gb_s"
    slow = sum(table.tier != cluster.device_tier for table in tables.values())
    where = f" ({slow} tables through the host's memory: more planner.memory_gib)" if slow else ""
    return f"reading and updating rows; faster memory ({key}){where} or a smaller train.batch_size would move it"
