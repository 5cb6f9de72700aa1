"""Every strategy by name: loads and a cluster in, a plan with its predicted cost out."""

from collections.abc import Sequence
from typing import Literal

from hetrain.planner.cluster import Cluster
from hetrain.planner.options import Options
from hetrain.planner.planned import Planned
from hetrain.planner.workload import TableLoad

STRATEGIES = ("hierarchical", "round_robin", "memory_balanced", "memory_optimized")
Engine = Literal["torchrec", "store"]


def make_plan(
    strategy: str,
    loads: Sequence[TableLoad],
    cluster: Cluster,
    engine: Engine,
    batch_size: int,
    options: Options | None = None,
) -> Planned:
    """A plan by `strategy`, checked; no process group is needed and no table is allocated.

    Args:
        strategy: one of STRATEGIES.
        loads: the tables and what one example asks of them.
        cluster: the ranks that hold rows, which need not exist.
        engine: what the plan is for: torchrec cuts in every way, the store keeps rows whole.
        batch_size: examples per rank and step.
        options: thresholds and constraints of the user.

    Raises:
        ConfigError: nothing fits (table, GiB needed, GiB there, numbered remedies), or an option is wrong.
    """
    raise NotImplementedError
