"""Checks of `planner.*`, which its strategies and engines share. Nothing here imports torch."""

from collections.abc import Iterator

from hetrain.config.findings import at_least, at_most, finding, one_of, positive
from hetrain.config.schema import RunConfig

SHARDING_TYPES = (
    "data_parallel",
    "table_wise",
    "row_wise",
    "column_wise",
    "table_row_wise",
    "table_column_wise",
    "grid_shard",
)
TIERS = ("hbm", "cached", "ddr")
PLANNERS = ("torchrec", "hierarchical", "round_robin", "memory_balanced", "memory_optimized")
STORE_SHARDING = ("table_wise", "row_wise")
MOST_GIB = 1 << 33  # of a memory: its bytes stay inside of int64
MOST_EFFORT = 1000  # hours
GIVEN = "The plan that is given decides; leave it out, or make another plan with it (hetrain plan)."
OURS = "It belongs to the others, such as planner=hierarchical."


def planner_findings(cfg: RunConfig) -> Iterator[str]:
    """What of the strategy, its memory, sharding types and thresholds cannot be."""
    planner = cfg.planner
    yield from one_of("planner.name", planner.name, PLANNERS)
    yield from positive("planner.memory_gib", planner.memory_gib, "null takes the device's own.")
    yield from at_most("planner.memory_gib", planner.memory_gib, MOST_GIB)
    yield from positive("planner.effort", planner.effort, "1 plans in seconds, 10 takes ten times as long.")
    yield from at_most("planner.effort", planner.effort, MOST_EFFORT)
    types = planner.sharding_types
    if types is not None and not types:
        yield finding("planner.sharding_types", "[]", "at least one of " + ", ".join(SHARDING_TYPES))
    for kind in types or ():
        yield from one_of("planner.sharding_types", kind, SHARDING_TYPES)
    if cfg.consistency.mode != "bsp" and types and not set(types) & {*STORE_SHARDING}:
        yield finding(
            "planner.sharding_types",
            types,
            f"table_wise or row_wise among them with consistency.mode={cfg.consistency.mode}",
            "The store holds whole rows on one owner.",
        )
    yield from _replicated(cfg)
    for key in ("data_parallel_threshold", "column_slice_threshold", "row_slice_threshold"):
        value = getattr(planner, key)
        yield from at_least(f"planner.{key}", value, 1, "It counts elements, rows x dim; null: no threshold.")
        if value is not None and planner.plan is not None:
            yield finding(f"planner.{key}", value, "null with planner.plan", GIVEN)
        elif value is not None and planner.name == "torchrec":
            yield finding(f"planner.{key}", value, "null with planner.name=torchrec", OURS)


def _replicated(cfg: RunConfig) -> Iterator[str]:
    """What workers at their own pace cannot train: a table that all hold, its gradients summed in every step."""
    mode, planner = cfg.consistency.mode, cfg.planner
    if mode not in ("asp", "ssp"):
        return
    remedy = "(1) Leave it out, or (2) set consistency=het or bsp, whose workers meet in every step to sum gradients."
    if planner.data_parallel_threshold is not None:
        value = planner.data_parallel_threshold
        yield finding("planner.data_parallel_threshold", value, f"null with consistency.mode={mode}", remedy)
    for table, rule in planner.constraints.items():
        if "data_parallel" in rule.sharding_types:
            key = f"planner.constraints.{table}.sharding_types"
            yield finding(key, list(rule.sharding_types), f"no data_parallel with consistency.mode={mode}", remedy)


def constraint_findings(cfg: RunConfig) -> Iterator[str]:
    """What of the memories and of the rules for single tables cannot be."""
    planner = cfg.planner
    if planner.tiers and planner.name == "torchrec":
        yield finding("planner.tiers", planner.tiers, "null with planner.name=torchrec", "It belongs to the others.")
    for tier in planner.tiers or ():
        yield from one_of("planner.tiers", tier, TIERS)
    if planner.tiers is not None and not planner.tiers:
        yield finding("planner.tiers", "[]", "at least one of " + ", ".join(TIERS))
    for table, rule in planner.constraints.items():
        for kind in rule.sharding_types:
            yield from one_of(f"planner.constraints.{table}.sharding_types", kind, SHARDING_TYPES)
        for tier in rule.tiers:
            yield from one_of(f"planner.constraints.{table}.tiers", tier, TIERS)
        key = f"planner.constraints.{table}.columns"
        yield from at_least(key, rule.columns, 4, "A piece has whole groups of 4 columns.")
        if rule.columns is not None and rule.columns % 4:
            yield finding(key, rule.columns, "a multiple of 4", "FBGEMM's kernels read rows in groups of 4 floats.")
    tables = ", ".join(planner.constraints)
    if tables and planner.plan is not None:
        yield finding("planner.constraints", tables, "none with planner.plan", GIVEN)
    elif tables and planner.name == "torchrec":
        yield finding("planner.constraints", tables, "none with planner.name=torchrec", OURS)


def idle_rules(cfg: RunConfig) -> Iterator[str]:
    """What rules for single tables say that the engine has no use for."""
    mode, rows, planner = cfg.consistency.mode, cfg.optimizer.rows.name, cfg.planner
    for table, rule in planner.constraints.items() if planner.name != "torchrec" and planner.plan is None else ():
        key = f"planner.constraints.{table}"
        if mode != "bsp" and rule.tiers:
            where = f"none with consistency.mode={mode}, whose store keeps rows in the memory of hosts"
            yield finding(f"{key}.tiers", rule.tiers, where, "Leave it out.")
        if rule.columns is not None and mode != "bsp":
            where = f"null with consistency.mode={mode}, whose store keeps whole rows"
            yield finding(f"{key}.columns", rule.columns, where, "Leave it out.")
        elif rule.columns is not None and rows == "rowwise_adagrad":
            where = f"null with optimizer.rows.name={rows}, whose tables are not cut by columns"
            yield finding(f"{key}.columns", rule.columns, where, "Take optimizer=adagrad or sgd, or leave it out.")
