"""Every strategy by name: loads and a cluster in, a plan with its predicted cost out."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from hetrain.errors import ConfigError
from hetrain.planner.assemble import assemble
from hetrain.planner.bound import lower_bound
from hetrain.planner.cluster import Cluster
from hetrain.planner.fewer_types import search_types
from hetrain.planner.menu import make_menu
from hetrain.planner.misfit import misfit
from hetrain.planner.options import Options
from hetrain.planner.piece_costs import NO_COSTS
from hetrain.planner.plain import lay_out
from hetrain.planner.planned import Planned
from hetrain.planner.store_prices import StorePrices
from hetrain.planner.torchrec_prices import TorchRecPrices
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
        engine: what the plan is for: torchrec cuts in every way, the store keeps rows whole, in host memory.
        batch_size: examples per rank and step.
        options: thresholds and constraints of the user.

    Raises:
        ConfigError: nothing fits (table, GiB needed, GiB there, numbered remedies), or an option is wrong.
    """
    if strategy not in STRATEGIES:
        raise ConfigError(f"planner.name={strategy}: expected one of {', '.join(STRATEGIES)}.")
    options = options or Options()
    if engine == "store":
        cluster = replace(cluster, piece_costs=NO_COSTS)  # which are TorchRec's
    prices = (TorchRecPrices if engine == "torchrec" else StorePrices)(cluster, batch_size)
    menu = make_menu(loads, cluster, prices.cuts, options)
    if strategy == "hierarchical":
        found, bound = search_types(menu)
        if found is None:
            raise misfit(menu, options, batch_size, engine)
        layout = found
    else:
        layout, left = lay_out(strategy, menu, options)
        if left >= 0:
            raise misfit(menu, options, batch_size, engine, left)
        bound = lower_bound(menu)
    planned = assemble(layout, bound, engine)
    planned.plan.check([load.table for load in loads])
    return planned
