"""Every strategy by name: loads and a cluster in, a plan with its predicted cost out."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from hetrain.errors import ConfigError
from hetrain.planner.assemble import assemble
from hetrain.planner.cluster import Cluster
from hetrain.planner.misfit import MisfitError
from hetrain.planner.options import Options
from hetrain.planner.piece_costs import NO_COSTS
from hetrain.planner.plain import lay_out
from hetrain.planner.planned import Planned
from hetrain.planner.remedies import OURS, Case
from hetrain.planner.search import hierarchical
from hetrain.planner.search.bound import lower_bound
from hetrain.planner.search.fewer_types import search_types
from hetrain.planner.search.menu import Menu, make_menu
from hetrain.planner.search.place import Layout
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
    workers: int = 0,
) -> Planned:
    """A plan by `strategy`, checked; no process group is needed and no table is allocated.

    Args:
        strategy: one of STRATEGIES.
        loads: the tables and what one example asks of them.
        cluster: the ranks that hold rows, which need not exist.
        engine: what the plan is for: torchrec cuts in every way, the store keeps rows whole, in host memory.
        batch_size: examples per rank and step.
        options: thresholds and constraints of the user.
        workers: of a store whose rows lie on servers, the cluster: how many ranks beside them ask for rows.

    Raises:
        ConfigError: nothing fits (table, GiB needed, GiB there, numbered remedies), or an option is wrong.
    """
    if strategy not in STRATEGIES:
        raise ConfigError(f"planner.name={strategy}: expected one of {', '.join(STRATEGIES)}.")
    case = Case(strategy, tuple(loads), cluster, engine, batch_size, options or Options(), workers)
    menu = menu_of(case)
    if strategy == OURS:
        found, bound = search_types(menu, case.options.effort)
        layout, left = (found, -1) if found is not None else _by_memory(menu, case.options)
    else:
        layout, left = lay_out(strategy, menu, case.options)
        bound = lower_bound(menu)
    if left >= 0:
        raise MisfitError(case, menu, fits, left if strategy != OURS else -1)
    planned = assemble(layout, bound, engine)
    planned.plan.check([load.table for load in loads])
    return planned


def fits(case: Case) -> bool:
    """Whether `make_plan` has a plan for `case`."""
    try:
        menu = menu_of(case)
    except ConfigError:  # a table that can be cut in no way
        return False
    if case.strategy != OURS:
        return lay_out(case.strategy, menu, case.options)[1] < 0
    return _by_memory(menu, case.options)[1] < 0 or hierarchical.fits(menu)


def menu_of(case: Case) -> Menu:
    """Every cut that the tables of `case` may have, priced; raises ConfigError where one has none."""
    if case.engine == "torchrec":
        cluster, cuts = case.cluster, TorchRecPrices(case.cluster, case.batch_size).cuts
    else:  # costs of pieces are TorchRec's
        cluster = replace(case.cluster, piece_costs=NO_COSTS)
        cuts = StorePrices(cluster, case.batch_size, case.workers).cuts
    return make_menu(case.loads, cluster, cuts, case.options)


def _by_memory(menu: Menu, options: Options) -> tuple[Layout, int]:
    """What finds a place where the search does not: by memory alone."""
    return lay_out("memory_optimized", menu, options)
