"""A plan with what it is predicted to cost, and a bound that no plan can go below."""

from dataclasses import dataclass, field
from typing import Any

from hetrain.planner.plan import Plan


@dataclass(frozen=True)
class RankCost:
    """What the plan puts on one rank. Milliseconds are of one step."""

    rank: int
    hbm_bytes: int  # with the buffers of a batch
    ddr_bytes: int
    rows: int  # rows held, a replicated table's too; a row cut by columns counts on each holder
    compute_ms: float
    comm_ms: float
    fixed_ms: float = 0.0  # what pieces and sharding types cost beside their bytes, where that was measured

    @property
    def total_ms(self) -> float:
        """What the rank takes for a step's embeddings."""
        return self.compute_ms + self.comm_ms + self.fixed_ms


@dataclass(frozen=True)
class Planned:
    """A plan, its predicted cost per rank, and how far from the best it can be."""

    plan: Plan
    ranks: tuple[RankCost, ...]  # one per rank of the plan that holds rows, in order
    lower_bound_ms: float  # no plan of the allowed pieces has a faster slowest rank
    bounded_by: str  # what the bound comes from, in words
    bottleneck: str  # what makes the slowest rank slow, and what would move it, in words
    tiers: dict[str, int] = field(default_factory=dict)  # tier -> bytes of rows and state there, over all ranks
    workers: int | None = None  # the first ranks, which alone hold replicated tables; None: all ranks do

    @property
    def slowest_ms(self) -> float:
        """The slowest rank's milliseconds."""
        return max(rank.total_ms for rank in self.ranks)

    @property
    def imbalance(self) -> float:
        """The slowest rank over the mean."""
        mean = sum(rank.total_ms for rank in self.ranks) / len(self.ranks)
        return self.slowest_ms / mean if mean else 1.0

    def to_json(self) -> dict[str, Any]:
        """`plan.json`: the plan, which `Plan.from_json` reads, and under `predicted` its cost."""
        return {
            **self.plan.to_json(),
            "predicted": {
                "slowest_ms": self.slowest_ms,
                "imbalance": self.imbalance,
                "lower_bound_ms": self.lower_bound_ms,
                "bounded_by": self.bounded_by,
                "bottleneck": self.bottleneck,
                "tiers": dict(self.tiers),
                "ranks": [vars(rank) | {"total_ms": rank.total_ms} for rank in self.ranks],
            },
        }
