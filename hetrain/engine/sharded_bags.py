"""Embedding bags sharded over ranks by TorchRec, with the exchange of the next batch's ids started early."""

import os
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from torch import Tensor, nn
from torchrec.distributed.comm_ops import set_gradient_division
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding.dp_sharding import DpPooledEmbeddingSharding
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from hetrain.comms.dense import DenseReducer
from hetrain.comms.dense_exchange import DenseComms
from hetrain.comms.pooled import PooledExchange
from hetrain.comms.pooled_dists import exchange_with
from hetrain.engine import TablePiece
from hetrain.engine.counted import Counter
from hetrain.engine.nodes import RANKS_OF_NODE, nodes_of
from hetrain.engine.replicated import ReplicatedTables
from hetrain.engine.table_memory import fill, fused_pieces
from hetrain.optim import RowOptimizer
from hetrain.planner.plan import Plan
from hetrain.planner.torchrec_plan import sharding_plan_of
from hetrain.planner.torchrec_planner import BagSharder, meta_bags
from hetrain.tables import Table
from hetrain.telemetry import Traffic


class ShardedBags(nn.Module):
    """KeyedJaggedTensor [F keys, stride B] -> KeyedTensor [B, sum of dims]; trains its rows in backward.

    B may differ from rank to rank: TorchRec's exchanges want equal batches, so empty bags are added
    before them and taken off after. Collective: every rank calls the same methods in the same order.
    The sharded module is kept out of the module tree, so that what a model registers is its dense
    part alone.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        plan: Plan,
        optimizer: RowOptimizer,
        device: torch.device,
        seed: int,
        batch_size: int,
        traffic: Traffic,
        dense_comms: DenseComms | None = None,
        exchange: PooledExchange | None = None,
    ) -> None:
        """`dense_comms`: how gradients of replicated tables travel.

        `exchange`: through which pooled embeddings and their gradients travel; None: TorchRec's own, float32.
        """
        super().__init__()
        # a rank's loss is divided by the examples of all ranks: TorchRec must not divide again
        set_gradient_division(False)
        self.counter = Counter(traffic)
        self._batch_size, self._world_size = batch_size, dist.get_world_size()
        self._learning_rate = optimizer.lr
        self._hidden = [_shard(tables, plan, optimizer, device)]
        self.exchange = exchange
        if exchange is not None:
            dims = [sharding.embedding_dims() for sharding in self._bags._embedding_shardings]
            exchange_with(exchange, self._bags._output_dists, dims)
        self._reducers: list[DenseReducer] = []
        self._replicated: list[ReplicatedTables] = []
        self._in_flight: dict[int, _Exchange] = {}
        self._adopt_lookups(optimizer, traffic, dense_comms or DenseComms())
        index = {t.name: i for i, t in enumerate(tables)}
        for name, pieces in self.pieces().items():
            for piece in pieces:
                fill(piece, seed, index[name], tables[index[name]].init_bound)

    def _adopt_lookups(self, optimizer: RowOptimizer, traffic: Traffic, dense_comms: DenseComms) -> None:
        """Fused kernels are ready; replicated tables need a summing hook and an optimizer."""
        self._fused: list[tuple[Any, list[str], list[tuple[int, int]]]] = []  # kernel, its tables, first row and column
        for sharding, lookup in zip(self._bags._embedding_shardings, self._bags._lookups, strict=True):
            if isinstance(sharding, DpPooledEmbeddingSharding):
                lookup.broadcast_buffers = False  # a broadcast per step of what never changes
                number = 1 + len(self._reducers)  # 0 is the network's
                self._reducers.append(DenseReducer(traffic, comms=dense_comms.of_tables(), number=number))
                self._reducers[-1].serve(dict(lookup.module.named_parameters()))
                self._reducers[-1].attach(lookup)
                for bags in lookup.module._emb_modules:
                    names = [t.name for t in bags._config.embedding_tables]
                    self._replicated.append(ReplicatedTables(bags.emb_module, names, optimizer))
                continue
            for bags in lookup._emb_modules:
                held = bags._config.embedding_tables
                offsets = [(t.local_metadata.shard_offsets[0], t.local_metadata.shard_offsets[1]) for t in held]
                self._fused.append((bags.emb_module, [t.name for t in held], offsets))

    @property
    def _bags(self) -> ShardedEmbeddingBagCollection:
        return self._hidden[0]

    @property
    def replicated(self) -> frozenset[str]:
        """Tables every rank holds whole."""
        return frozenset(name for r in self._replicated for name in r.names)

    def fused(self) -> Iterable[str]:
        """Names of the tables, or pieces of tables, that a fused kernel trains on this rank."""
        return [name for _, names, _ in self._fused for name in names]

    def forward(self, sparse: KeyedJaggedTensor) -> KeyedTensor:
        """The sum of every bag's rows, from whichever rank holds them; an empty bag gives zeros."""
        if id(sparse) not in self._in_flight:  # a model may make features of its own
            self.start(sparse, None)
        exchange = self._in_flight.pop(id(sparse))
        pooled = self._bags.compute_and_output_dist(exchange.context, exchange.result()).wait()
        batch_size = sparse.stride()
        if batch_size == exchange.batch_size:
            return pooled
        return KeyedTensor(pooled.keys(), pooled.length_per_key(), pooled.values()[:batch_size])

    def start(self, sparse: KeyedJaggedTensor, global_size: int | None) -> None:
        """Begin the exchange of a batch's ids. `global_size` None: not a batch of training, sizes unknown."""
        if id(sparse) not in self._in_flight:
            padded = _pad(sparse, self._agree(sparse.stride(), global_size))
            context = self._bags.create_context()
            self._in_flight[id(sparse)] = _Exchange(sparse, context, self._bags.input_dist(context, padded), padded)

    def advance(self) -> None:
        """Second leg of what is in flight: the sizes are there, the ids can go."""
        for exchange in self._in_flight.values():
            exchange.advance()

    def discard(self, keep: KeyedJaggedTensor | None = None) -> None:
        """Complete and forget what is in flight, all but `keep`: batches that no forward will ask for."""
        for key in [k for k, e in self._in_flight.items() if e.source is not keep]:
            self._in_flight.pop(key).result()

    def set_learning_rate(self, lr: float) -> None:
        """Rate of the next backward's fused steps."""
        if lr != self._learning_rate:
            for kernel, _, _ in self._fused:
                kernel.set_learning_rate(lr)
            self._learning_rate = lr

    def step_replicated(self, lr: float) -> None:
        """After backward: the replicated tables take the step that fused kernels took already."""
        for reducer in self._reducers:
            reducer.wait()
        for tables in self._replicated:
            tables.step(lr)

    def pieces(self) -> dict[str, list[TablePiece]]:
        """This rank's rows and optimizer state, as views; replicated tables whole."""
        pieces: dict[str, list[TablePiece]] = {}
        for kernel, names, offsets in self._fused:
            for name, piece in zip(names, fused_pieces(kernel, offsets), strict=True):
                pieces.setdefault(name, []).append(piece)
        for tables in self._replicated:
            pieces.update({name: [piece] for name, piece in tables.pieces().items()})
        return pieces

    def take_wait_s(self) -> float:
        """Seconds waited for other ranks since the last call."""
        waited, self.counter.wait_s = self.counter.wait_s, 0.0
        if self.exchange is not None:
            waited += self.exchange.take_wait_s()
        return waited + sum(r.take_wait_s() for r in self._reducers)

    def _agree(self, batch_size: int, global_size: int | None) -> int:
        """The batch size all ranks pad to. Full batches need no message."""
        if global_size == self._world_size * self._batch_size:
            return self._batch_size
        largest = torch.tensor([batch_size], device=self._bags._device)
        self.counter.add(largest, 2 * (self._world_size - 1) // self._world_size)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return int(largest.item())


class _Exchange:
    """One batch's ids on their way to the ranks that hold the rows."""

    def __init__(self, source: KeyedJaggedTensor, context: Any, awaitable: Any, padded: KeyedJaggedTensor) -> None:
        self.source = source  # kept, so that its id stays its own
        self.context = context
        self.batch_size = padded.stride()
        self._awaitable = awaitable
        self._legs = 2  # sizes, then ids

    def advance(self) -> None:
        if self._legs == 2:
            self._awaitable, self._legs = self._awaitable.wait(), 1

    def result(self) -> Any:
        """The ids this rank looks up, of all ranks' batches."""
        self.advance()
        return self._awaitable.wait()


def _shard(
    tables: Sequence[Table], plan: Plan, optimizer: RowOptimizer, device: torch.device
) -> ShardedEmbeddingBagCollection:
    sharder = BagSharder(
        fused_params={
            "optimizer": optimizer.fbgemm,
            "learning_rate": optimizer.lr,
            "eps": optimizer.eps,
            "stochastic_rounding": False,
            "bounds_check_mode": BoundsCheckMode.NONE,  # the reader has checked every id
        }
    )
    ranks_per_host = int(os.environ.get(RANKS_OF_NODE, plan.world_size))
    with nodes_of(plan.ranks_per_node or plan.world_size):
        wrapped = DistributedModelParallel(
            module=meta_bags(tables),
            device=device,
            plan=sharding_plan_of(plan, tables, device, ranks_per_host),
            sharders=[sharder],
            init_data_parallel=False,
            init_parameters=False,
        )
    return wrapped.module


def _pad(sparse: KeyedJaggedTensor, batch_size: int) -> KeyedJaggedTensor:
    """`sparse` with empty bags added to `batch_size` examples; its values stay where they are."""
    missing = batch_size - sparse.stride()
    if missing == 0:
        return sparse
    features = len(sparse.keys())
    lengths: Tensor = sparse.lengths().view(features, sparse.stride())
    lengths = nn.functional.pad(lengths, (0, missing)).view(-1)
    return KeyedJaggedTensor(sparse.keys(), sparse.values(), lengths=lengths, stride=batch_size)
