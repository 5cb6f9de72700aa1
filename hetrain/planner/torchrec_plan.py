"""Our plan as TorchRec's ShardingPlan: every sharding type with the kernel that trains it.

TorchRec's own constructors take the DENSE kernel unless told otherwise, which ignores the fused optimizer, and cut
columns no narrower than 128. Here the shards are the plan's pieces as they stand.
"""

from collections.abc import Sequence

import torch
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.types import EnumerableShardingSpec, ParameterSharding, ShardingPlan, ShardMetadata

from hetrain.errors import ConfigError
from hetrain.planner.piece import Piece
from hetrain.planner.plan import Plan
from hetrain.tables import Table

GROUP = 4  # floats that FBGEMM's kernels read at once
KERNELS = {
    ("cpu", "ddr"): EmbeddingComputeKernel.FUSED,
    ("cuda", "hbm"): EmbeddingComputeKernel.FUSED,
    ("cuda", "ddr"): EmbeddingComputeKernel.FUSED_UVM,
}


def sharding_plan_of(
    plan: Plan, tables: Sequence[Table], device: torch.device, ranks_per_host: int | None = None
) -> ShardingPlan:
    """`plan`, checked already, for the one EmbeddingBagCollection of `tables`.

    Args:
        plan: of engine torchrec.
        tables: all tables of the collection.
        device: the kind of device that every rank computes on.
        ranks_per_host: ranks that share a machine and its GPUs, whatever nodes the plan counts; None: the plan's nodes.

    Raises:
        ConfigError: a piece is in a memory that the device's kernels cannot train from, or of a width they cannot read.
    """
    local = ranks_per_host or plan.ranks_per_node or plan.world_size
    return ShardingPlan({"": {table.name: _parameter(plan, table, device.type, local) for table in tables}})


def check_row_optimizer(plan: Plan, tables: Sequence[Table], row_optimizer: str) -> None:
    """Raise ConfigError where pieces of columns would each keep a row-wise sum: of their own columns alone."""
    if row_optimizer != "rowwise_adagrad":
        return
    for table in tables:
        if any(piece.columns != table.dim for piece in plan.of_table(table.name)):
            kind = plan.sharding[table.name]
            raise ConfigError(
                f"optimizer.rows.name={row_optimizer}: table {table.name!r} is {kind} in this plan, and every piece of "
                "its columns would keep a state of its own and train differently than other plans. Set "
                f"optimizer.rows.name=adagrad or sgd, or leave {kind} out of planner.sharding_types."
            )


def _parameter(plan: Plan, table: Table, device: str, local: int) -> ParameterSharding:
    kind = plan.sharding[table.name]
    if table.name in plan.replicated:
        return ParameterSharding(kind, EmbeddingComputeKernel.DENSE.value, list(range(plan.world_size)), None)
    pieces = plan.of_table(table.name)  # by rows: TorchRec takes the k-th for the k-th rank, of all or of a node
    for piece in pieces:
        _check_width(piece)
    shards = [_shard(piece, device, local) for piece in pieces]
    kernel = _kernel(table.name, {piece.tier for piece in pieces}, device)
    return ParameterSharding(kind, kernel.value, [p.rank for p in pieces], EnumerableShardingSpec(shards))


def _shard(piece: Piece, device: str, local: int) -> ShardMetadata:
    where = device if device == "cpu" else f"{device}:{piece.rank % local}"
    offsets, sizes = [piece.first_row, piece.first_column], [piece.rows, piece.columns]
    return ShardMetadata(offsets, sizes, f"rank:{piece.rank}/{where}")


def _check_width(piece: Piece) -> None:
    if piece.columns % GROUP:
        raise ConfigError(
            f"plan: rank {piece.rank} holds {piece.columns} columns of table {piece.table!r}; expected a multiple of "
            f"{GROUP}, which FBGEMM's kernels read at once. Make the plan again with fewer pieces of columns"
        )


def _kernel(table: str, tiers: set[str], kind: str) -> EmbeddingComputeKernel:
    (tier,) = tiers if len(tiers) == 1 else (f"{' and '.join(sorted(tiers))} at once",)
    if (kind, tier) not in KERNELS:
        able = " or ".join(t for k, t in KERNELS if k == kind)
        raise ConfigError(
            f"plan: table {table!r} is in the memory {tier}; expected {able}, from which launch.device={kind} trains. "
            "Make the plan again for that device, with planner.tiers set to it"
        )
    return KERNELS[kind, tier]
