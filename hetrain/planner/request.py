"""What a config asks the planner: the tables with their loads, and what they may become."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hetrain.capacity import parse_capacity
from hetrain.config import ConsistencyConfig, PlannerConfig, RowOptimizerConfig, RunConfig
from hetrain.data.schema import SparseColumn
from hetrain.errors import ConfigError
from hetrain.planner.cluster import Cluster
from hetrain.planner.measured import skew_of
from hetrain.planner.options import Constraint, Options
from hetrain.planner.piece import SHARDING_TYPES, TIERS
from hetrain.planner.planned import Planned
from hetrain.planner.replicas import REPLICATED, all_replicated, beside_servers, check_replicas, held_by_workers
from hetrain.planner.store_prices import StorePrices
from hetrain.planner.strategies import Engine, make_plan
from hetrain.planner.workload import FLOAT_BYTES, TableLoad
from hetrain.tables import Table, check_tables

BY_COLUMNS = ("column_wise", "table_column_wise", "grid_shard")
STORE_TYPES = ("table_wise", "row_wise")
BOUNDLESS = 1 << 60  # bytes
# Bytes of the row optimizer's state: of every row, and of every value of it.
STATE = {
    "sgd": {"row": 0, "element": 0},
    "adagrad": {"row": 0, "element": FLOAT_BYTES},
    "rowwise_adagrad": {"row": FLOAT_BYTES, "element": 0},
}


def engine_of(mode: str) -> Engine:
    """What trains a consistency mode."""
    return "torchrec" if mode == "bsp" else "store"


def tables_of(cfg: RunConfig, columns: Sequence[SparseColumn]) -> list[Table]:
    """One table per sparse column, of the model's width; DataError where FBGEMM cannot number the rows."""
    dim = cfg.model["embedding_dim"]
    tables = [Table(c.name, c.rows, dim, (c.name,), cfg.store.init_bound) for c in columns]
    check_tables(tables)
    return tables


def loads_of(
    tables: Sequence[Table], rows: RowOptimizerConfig, stats: Mapping[str, Any] | None = None
) -> list[TableLoad]:
    """Tables of a data set, one feature each, with the bag lengths and the skew of its stats where there are some."""
    state = STATE[rows.name]
    measured = {} if stats is None else {column["name"]: column for column in stats["columns"]}
    loads = []
    for table in tables:
        column = measured.get(table.name)
        pooling = 1.0 if column is None or not column["pooling"] else float(column["pooling"])
        skew = None if column is None else skew_of(column)
        loads.append(TableLoad(table, (pooling,), FLOAT_BYTES, state["row"] + state["element"] * table.dim, skew))
    return loads


def options_of(
    cfg: PlannerConfig,
    engine: Engine,
    mode: str,
    rows: RowOptimizerConfig,
    names: set[str],
    *,
    replicas_by_price: bool = False,
) -> Options:
    """The limits of `planner.*`; ConfigError for what engine or row optimizer cannot train, or tables nobody knows.

    `replicas_by_price`: whether the store of het may replicate without a word of the user.
    """
    unknown = sorted(set(cfg.constraints) - names)
    if unknown:
        from difflib import get_close_matches

        close = get_close_matches(unknown[0], names, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ConfigError(f"planner.constraints: there is no table {unknown[0]!r}.{hint}")
    wanted = cfg.data_parallel_threshold is not None or any(
        REPLICATED in rule.sharding_types for rule in cfg.constraints.values()
    )
    allowed = _trainable(engine, rows, replicas=mode == "het" and (replicas_by_price or wanted))
    for where, types in _asked(cfg):
        for kind in types:
            if engine == "store" and kind == REPLICATED and kind not in allowed:
                continue  # passed over: it is in the list that is the default of every mode
            if kind not in allowed:
                raise ConfigError(
                    f"{where}={list(types)}: {_why_not(kind, mode, rows)} Choose from {', '.join(allowed)}."
                )
    types = tuple(kind for kind in allowed if cfg.sharding_types is None or kind in cfg.sharding_types)
    if not types:
        raise ConfigError(
            f"planner.sharding_types={cfg.sharding_types}: expected at least one of {', '.join(allowed)} with "
            f"consistency.mode={mode}; add one of them."
        )
    return Options(
        types,
        tuple(cfg.tiers) if cfg.tiers is not None else TIERS,
        cfg.data_parallel_threshold,
        cfg.column_slice_threshold,
        cfg.row_slice_threshold,
        {
            name: Constraint(tuple(rule.sharding_types), tuple(rule.tiers), rule.columns)
            for name, rule in cfg.constraints.items()
        },
        effort=cfg.effort,
        data_parallel_by_price=engine == "torchrec" or replicas_by_price,
    )


def planned_for(cfg: RunConfig, loads: Sequence[TableLoad], cluster: Cluster, tiers: Sequence[str] = ()) -> Planned:
    """A plan for `cluster` by `planner.name`, a strategy of ours; of `tiers` alone, where some are given.

    Of a store with servers, they alone hold rows and come after the workers, which are the cluster's ranks.
    """
    engine, mode, servers = engine_of(cfg.consistency.mode), cfg.consistency.mode, cfg.cluster.servers
    owners = replace(cluster, kind="cpu", nodes=servers, ranks_per_node=1) if servers else cluster
    if cfg.store.index == "hash":  # holds the rows seen, and nobody knows how many they will be
        owners = replace(owners, ddr_bytes=BOUNDLESS)
    names = {load.table.name for load in loads}
    by_price = mode == "het" and servers > 0 and cfg.planner.name == "hierarchical" and _rows_travel(cfg.consistency)
    options = options_of(cfg.planner, engine, mode, cfg.optimizer.rows, names, replicas_by_price=by_price)
    options, batch_size, workers = _of_tiers(options, tiers), cfg.train.batch_size, cluster.world_size
    whole: list[TableLoad] = []
    if servers:
        prices = StorePrices(cluster, batch_size)
        whole = held_by_workers(loads, options, prices, StorePrices(owners, batch_size, workers))
        options = _of_owners(options)
    owned = [load for load in loads if load not in whole]
    if not owned:
        raise all_replicated(len(loads))
    asking = workers if servers else 0
    planned = make_plan(cfg.planner.name, owned, owners, engine, batch_size, options, asking)
    if servers:
        planned = beside_servers(after_workers(planned, workers), whole, prices)
    check_replicas(planned.plan, mode)
    return planned


def _of_owners(options: Options) -> Options:
    """What servers may hold."""
    return replace(options, sharding_types=tuple(kind for kind in options.sharding_types if kind != REPLICATED))


def _rows_travel(consistency: ConsistencyConfig) -> bool:
    """Whether every row of a batch is fetched and pushed in its step: there prices, which know no cache, are right."""
    return parse_capacity(consistency.cache.capacity).amount == 0 or consistency.staleness < 1


def after_workers(planned: Planned, workers: int) -> Planned:
    """The plan of servers, which are ranks `workers` and following."""
    plan = planned.plan
    pieces = tuple(replace(piece, rank=workers + piece.rank) for piece in plan.pieces)
    moved = replace(plan, world_size=workers + plan.world_size, pieces=pieces, ranks_per_node=0)
    ranks = tuple(replace(cost, rank=workers + cost.rank) for cost in planned.ranks)
    words = re.sub(r"^rank (\d+)", lambda found: f"rank {workers + int(found[1])}", planned.bottleneck)
    words = words.replace("cluster.intra_gb_s", "cluster.inter_gb_s")  # even one server is another machine to workers
    return replace(planned, plan=moved, ranks=ranks, bottleneck=words)


def _of_tiers(options: Options, tiers: Sequence[str]) -> Options:
    """`options` within `tiers`; what the user asks for outside of them is refused where it would be trained."""
    kept = tuple(tier for tier in options.tiers if tier in tiers)
    return replace(options, tiers=kept) if kept else options


def _asked(cfg: PlannerConfig) -> list[tuple[str, Sequence[str]]]:
    rules = [
        (f"planner.constraints.{name}.sharding_types", rule.sharding_types) for name, rule in cfg.constraints.items()
    ]
    return [("planner.sharding_types", cfg.sharding_types or []), *rules]


def _trainable(engine: Engine, rows: RowOptimizerConfig, *, replicas: bool) -> tuple[str, ...]:
    """Sharding types that train alike whatever the plan; `replicas`: whether the store may hold some."""
    if engine == "store":
        return (REPLICATED, *STORE_TYPES) if replicas else STORE_TYPES
    return tuple(kind for kind in SHARDING_TYPES if kind not in BY_COLUMNS or rows.name != "rowwise_adagrad")


def _why_not(kind: str, mode: str, rows: RowOptimizerConfig) -> str:
    if mode == "bsp":
        return (
            f"{kind} with optimizer.rows.name={rows.name} would keep a state of its own for every column piece and "
            "train differently than other plans; set optimizer.rows.name=adagrad or sgd."
        )
    return f"{kind} cannot run with consistency.mode={mode}, whose store keeps whole rows."
