"""Plans by TorchRec's EmbeddingShardingPlanner. No process group, no allocation of tables."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner
from torchrec.distributed.planner.proposers import GreedyProposer, UniformProposer
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import (
    HardwareConfig,
    KernelConfig,
    ParameterConstraints,
    PlannerError,
    Topology,
    TopologyFactory,
    TrainerConfig,
)
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from hetrain.config import PlannerConfig
from hetrain.errors import ConfigError
from hetrain.planner.devices import DeviceSet, device_set, devices_of
from hetrain.planner.misfit import MisfitError
from hetrain.planner.options import Options
from hetrain.planner.piece import HOST, Piece
from hetrain.planner.plan import Plan
from hetrain.planner.remedies import OURS, TORCHREC, Case, too_many
from hetrain.planner.strategies import Engine, fits, menu_of
from hetrain.planner.workload import FLOAT_BYTES, TableLoad
from hetrain.tables import Table

BSP_TYPES = ("data_parallel", "table_wise", "row_wise")
STORE_TYPES = ("table_wise", "row_wise")
STATE_CLASSES = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "rowwise_adagrad": RowWiseAdagrad}
FUSED, DENSE = EmbeddingComputeKernel.FUSED.value, EmbeddingComputeKernel.DENSE.value
BYTES_PER_MS = 1e6  # of 1 GB/s
BOUNDLESS = 1 << 60  # bytes


@dataclass(frozen=True)
class Asked:
    """Machines to plan for, and the mean bag lengths of every table's features."""

    devices: DeviceSet
    poolings: Mapping[str, Sequence[float]] = field(default_factory=dict)


class BagSharder(EmbeddingBagCollectionSharder):
    """Offers row_wise on CPU too, and for each sharding type the one kernel that trains it here.

    TorchRec's own offers no row_wise on a CPU, and the DENSE kernel where the fused optimizer would
    silently be ignored. Only data_parallel has no fused kernel.
    """

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """All types an EmbeddingBagCollection of this engine can be cut by."""
        return list(BSP_TYPES)

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """FUSED, or DENSE for replicated tables."""
        return [DENSE if sharding_type == "data_parallel" else FUSED]


def meta_bags(tables: Sequence[Table], row_optimizer: str | None = None) -> EmbeddingBagCollection:
    """The tables as an EmbeddingBagCollection without memory.

    `row_optimizer` tells the planner the state's size. Bags to be trained must come without: TorchRec would
    take it for an optimizer applied in backward and silently drop the fused one it was given.
    """
    bags = EmbeddingBagCollection(
        device=torch.device("meta"),
        tables=[
            EmbeddingBagConfig(
                name=t.name,
                num_embeddings=t.rows,
                embedding_dim=t.dim,
                feature_names=list(t.features),
                pooling=PoolingType.SUM,
                init_fn=_leave,  # the engine fills the rows, equally for every plan
            )
            for t in tables
        ],
    )
    if row_optimizer is not None:
        for parameter in bags.parameters():
            parameter._optimizer_classes = [STATE_CLASSES[row_optimizer]]
    return bags


def _leave(weight: torch.Tensor) -> torch.Tensor:
    return weight


def sharding_plan(
    tables: Sequence[Table],
    row_optimizer: str,
    cfg: PlannerConfig,
    world_size: int,
    device: torch.device,
    batch_size: int,
    asked: "Asked | None" = None,
) -> ShardingPlan:
    """TorchRec's plan for `bsp`, checked; raises ConfigError when none fits or a type cannot be trained.

    Args:
        tables: the tables, none of them allocated.
        row_optimizer: sgd | adagrad | rowwise_adagrad; its state counts as memory.
        cfg: sharding types to choose from, memory per rank.
        world_size: ranks to plan for, which need not exist.
        device: kind of device the ranks train on.
        batch_size: examples per rank and step.
        asked: other machines than this run's.
    """
    allowed = _checked_types(cfg, BSP_TYPES, "consistency=bsp", row_optimizer)
    types = allowed if world_size > 1 else ["table_wise"]
    asked = asked or Asked(device_set(world_size, device, cfg.memory_gib))
    case = _case(tables, row_optimizer, types, asked, batch_size, "torchrec")
    plan = _search(case, row_optimizer, asked.devices)
    plan_of(plan, tables, world_size).check(tables)
    return plan


def store_plan(
    tables: Sequence[Table],
    cfg: PlannerConfig,
    world_size: int,
    batch_size: int,
    device: torch.device,
    servers: int = 0,
    *,
    index: str = "array",
    asked: "Asked | None" = None,
) -> Plan:
    """Which owner holds which rows for the store: whole tables and row ranges, no replicas.

    With `servers`, the last of the `world_size` ranks, they alone hold rows, in the memory of their hosts.
    `data_parallel` in `planner.sharding_types`, the default, is passed over: TorchRec's prices are not the store's.
    With `index` hash an owner holds the rows seen, and nobody knows how many they will be: tables are dealt out by
    their rows as ever, but never refused, and those too large for a rank are cut by rows where that is allowed.
    `asked`: other machines than this run's, of owners alone.
    """
    types = [t for t in _checked_types(cfg, BSP_TYPES, "consistency=het", "sgd") if t in STORE_TYPES]
    if not types:
        raise ConfigError(
            f"planner.sharding_types={cfg.sharding_types}: the store of consistency=het needs table_wise or row_wise; "
            "add one of them"
        )
    owners = servers or world_size
    types = types if owners > 1 else ["table_wise"]
    asked = asked or Asked(device_set(owners, torch.device("cpu") if servers else device, cfg.memory_gib))
    whole = BOUNDLESS
    if index == "hash":
        whole, asked = asked.devices.memory, replace(asked, devices=replace(asked.devices, memory=BOUNDLESS))
    case = _case(tables, "rowwise_adagrad", types, asked, batch_size, "store")
    found = plan_of(_search(case, "rowwise_adagrad", asked.devices, whole), tables, owners)
    first = world_size - owners
    pieces = tuple(replace(piece, rank=first + piece.rank, tier=HOST) for piece in found.pieces)
    plan = Plan("store", world_size, pieces, frozenset(), found.sharding)
    plan.check(tables)
    return plan


def plan_of(plan: ShardingPlan, tables: Sequence[Table], world_size: int | None = None) -> Plan:
    """A TorchRec ShardingPlan of one EmbeddingBagCollection as our own; `world_size` None: its highest rank + 1."""
    (module_plan,) = plan.plan.values()
    pieces: list[Piece] = []
    replicated, sharding, ranks = set(), {}, {0}
    for table in tables:
        parameter = module_plan[table.name]
        sharding[table.name] = parameter.sharding_type
        ranks.update(parameter.ranks)
        if parameter.sharding_type == "data_parallel":
            replicated.add(table.name)
            continue
        _check_kernel(table.name, parameter)
        for shard in parameter.sharding_spec.shards:
            (first_row, first_column), (rows, columns) = shard.shard_offsets, shard.shard_sizes
            tier = "ddr" if shard.placement.device().type == "cpu" else "hbm"
            pieces.append(Piece(table.name, shard.placement.rank(), first_row, rows, first_column, columns, tier))
    return Plan("torchrec", world_size or max(ranks) + 1, tuple(pieces), frozenset(replicated), sharding)


def _check_kernel(table: str, parameter: Any) -> None:
    if parameter.compute_kernel != FUSED:
        raise ConfigError(
            f"plan: table {table!r} has compute kernel {parameter.compute_kernel!r}, which would ignore the row "
            f"optimizer; pass compute_kernel={FUSED!r} when the plan is made"
        )


def _checked_types(cfg: PlannerConfig, allowed: Sequence[str], mode: str, row_optimizer: str) -> list[str]:
    if cfg.sharding_types is None:
        return list(allowed)
    if not cfg.sharding_types:
        raise ConfigError(f"planner.sharding_types=[]: give at least one of {', '.join(allowed)}")
    for name in cfg.sharding_types:
        if "column" in name and row_optimizer == "rowwise_adagrad":
            raise ConfigError(
                f"planner.sharding_types={cfg.sharding_types}: {name} with optimizer.rows.name=rowwise_adagrad would "
                "keep a state of its own for every column piece and train differently than other plans; leave it out"
            )
        if name not in allowed:
            raise ConfigError(
                f"planner.sharding_types={cfg.sharding_types}: {name} cannot run with {mode}; choose from "
                f"{', '.join(allowed)}"
            )
    return cfg.sharding_types


def _search(case: Case, row_optimizer: str, devices: DeviceSet, whole: int = BOUNDLESS) -> ShardingPlan:
    """Raises MisfitError when nothing fits on `devices`, which are those of `case`. `whole`: see `_planned`."""
    try:
        return _planned(case, row_optimizer, devices, whole)
    except PlannerError as error:
        menu = menu_of(replace(case, engine="torchrec"))
        raise MisfitError(case, menu, partial(_fits, row_optimizer)) from error


def _planned(case: Case, row_optimizer: str, devices: DeviceSet, whole: int = BOUNDLESS) -> ShardingPlan:
    """TorchRec's answer. Tables of more than `whole` bytes are cut by rows, where that is allowed."""
    tables, types = [load.table for load in case.loads], case.options.sharding_types
    constraints = {
        load.table.name: ParameterConstraints(
            sharding_types=_cut(load.table, types, devices, whole), pooling_factors=list(load.poolings)
        )
        for load in case.loads
    }
    planner = EmbeddingShardingPlanner(
        topology=_topology(devices),
        batch_size=case.batch_size,
        storage_reservation=FixedPercentageStorageReservation(0.0),  # DeviceSet.memory is what tables may take
        # the grid search tries 10,000 plans one by one: seconds for a gain the greedy proposers reach as well
        proposer=[GreedyProposer(), GreedyProposer(use_depth=False), UniformProposer()],
        constraints=constraints,
        stats=[],
        debug=False,
    )
    bags: nn.Module = meta_bags(tables, row_optimizer)
    return planner.plan(bags, [BagSharder()])


def _case(
    tables: Sequence[Table], row_optimizer: str, types: Sequence[str], asked: Asked, batch_size: int, engine: Engine
) -> Case:
    """What was asked, as our own strategies are asked it."""
    state = {"sgd": 0, "adagrad": FLOAT_BYTES, "rowwise_adagrad": 0}[row_optimizer]
    by_row = FLOAT_BYTES if row_optimizer == "rowwise_adagrad" else 0
    loads = tuple(
        TableLoad(t, tuple(asked.poolings.get(t.name, (1.0,) * len(t.features))), FLOAT_BYTES, by_row + state * t.dim)
        for t in tables
    )
    return Case(TORCHREC, loads, asked.devices.as_cluster(), engine, batch_size, Options(tuple(types)))


def _fits(row_optimizer: str, case: Case) -> bool:
    """Whether there is a plan; where asking TorchRec's planner would take minutes, there is none."""
    if case.strategy != TORCHREC:
        return fits(case)
    if too_many(case) or not fits(replace(case, strategy=OURS, engine="torchrec")):  # by the same prices
        return False
    if case.cluster.world_size == 1:
        case = replace(case, options=replace(case.options, sharding_types=("table_wise",)))
    try:
        _planned(case, row_optimizer, devices_of(case.cluster))
    except (PlannerError, ConfigError):
        return False
    return True


def _cut(table: Table, types: Sequence[str], devices: DeviceSet, whole: int) -> list[str]:
    fitting = _types_of(table, types, devices)
    large = table.rows * (table.dim + 1) * 4 > whole
    return ["row_wise"] if large and "row_wise" in fitting else fitting


def _types_of(table: Table, types: Sequence[str], devices: DeviceSet) -> list[str]:
    """Row-wise blocks of ceil(rows / W) must leave no rank empty: TorchRec dies on a shard without rows."""
    block = -(-table.rows // devices.world_size)
    fitting = [t for t in types if t != "row_wise" or block * (devices.world_size - 1) < table.rows]
    if not fitting:
        raise ConfigError(
            f"planner.sharding_types={list(types)}: table {table.name!r} has {table.rows} rows, too few to cut over "
            f"{devices.world_size} ranks; add table_wise or data_parallel"
        )
    return fitting


def _topology(devices: DeviceSet) -> Topology:
    on_gpu = devices.kind == "cuda"
    return TopologyFactory.create_topology(
        TrainerConfig(
            world_size=devices.world_size,
            local_world_size=devices.ranks_per_host,
            hbm_cap_bytes=devices.memory if on_gpu else 0,
            ddr_cap_bytes=0 if on_gpu else devices.memory,
        ),
        HardwareConfig(
            hbm_mem_bw=devices.memory_gb_s * BYTES_PER_MS,
            ddr_mem_bw=devices.memory_gb_s * BYTES_PER_MS,
            intra_host_bw=devices.intra_host_gb_s * BYTES_PER_MS,
            inter_host_bw=devices.inter_host_gb_s * BYTES_PER_MS,
        ),
        KernelConfig(compute_device=devices.kind, use_hardware_based_bandwidth=True),
    )
