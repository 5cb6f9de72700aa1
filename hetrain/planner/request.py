"""What a config asks the planner: the tables with their loads, and what they may become."""

from collections.abc import Mapping, Sequence
from typing import Any

from hetrain.config import PlannerConfig, RowOptimizerConfig, RunConfig
from hetrain.data.schema import SparseColumn
from hetrain.errors import ConfigError
from hetrain.planner.measured import skew_of
from hetrain.planner.options import Constraint, Options
from hetrain.planner.piece import SHARDING_TYPES, TIERS
from hetrain.planner.strategies import Engine
from hetrain.planner.workload import FLOAT_BYTES, TableLoad
from hetrain.tables import Table, check_tables

BY_COLUMNS = ("column_wise", "table_column_wise", "grid_shard")
STORE_TYPES = ("data_parallel", "table_wise", "row_wise")
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


def options_of(cfg: PlannerConfig, engine: Engine, mode: str, rows: RowOptimizerConfig, names: set[str]) -> Options:
    """The limits of `planner.*`; ConfigError for what engine or row optimizer cannot train, or tables nobody knows."""
    unknown = sorted(set(cfg.constraints) - names)
    if unknown:
        from difflib import get_close_matches

        close = get_close_matches(unknown[0], names, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ConfigError(f"planner.constraints: there is no table {unknown[0]!r}.{hint}")
    allowed = _trainable(engine, mode, rows)
    for where, types in _asked(cfg):
        for kind in types:
            if kind not in allowed:
                raise ConfigError(
                    f"{where}={list(types)}: {_why_not(kind, mode, rows)} Choose from {', '.join(allowed)}."
                )
    types = tuple(kind for kind in allowed if cfg.sharding_types is None or kind in cfg.sharding_types)
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
    )


def _asked(cfg: PlannerConfig) -> list[tuple[str, Sequence[str]]]:
    rules = [
        (f"planner.constraints.{name}.sharding_types", rule.sharding_types) for name, rule in cfg.constraints.items()
    ]
    return [("planner.sharding_types", cfg.sharding_types or []), *rules]


def _trainable(engine: Engine, mode: str, rows: RowOptimizerConfig) -> tuple[str, ...]:
    """Sharding types that train alike whatever the plan."""
    if engine == "store":
        return tuple(kind for kind in STORE_TYPES if kind != "data_parallel" or mode == "het")
    return tuple(kind for kind in SHARDING_TYPES if kind not in BY_COLUMNS or rows.name != "rowwise_adagrad")


def _why_not(kind: str, mode: str, rows: RowOptimizerConfig) -> str:
    if mode == "bsp":
        return (
            f"{kind} with optimizer.rows.name={rows.name} would keep a state of its own for every column piece and "
            "train differently than other plans; set optimizer.rows.name=adagrad or sgd."
        )
    return f"{kind} cannot run with consistency.mode={mode}, whose store keeps whole rows."
