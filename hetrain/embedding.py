"""The bag collection over the store: KeyedJaggedTensor -> KeyedTensor, one table-batched embedding per width.

All features of one embedding dim look up in one FBGEMM table whose rows are cache slots; lookup, pooling,
backward and the optimizer step are the fused kernels that `bsp` trains with.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    DenseTableBatchedEmbeddingBagsCodegen,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from hetrain.lookups import lookups
from hetrain.optim import RowOptimizer
from hetrain.store.audit import audit_report, missed_updates, split_report
from hetrain.store.cache import Cache
from hetrain.store.messages import Message, Reply, Request
from hetrain.store.owner import Owner
from hetrain.store.read import ReadPlan
from hetrain.store.route import Routed, split
from hetrain.store.space import Placement, RowSpace
from hetrain.store.zeros import lazy_zeros
from hetrain.transport.background import Background
from hetrain.transport.collective import CollectiveTransport

M = TypeVar("M", bound=Message)


@dataclass(frozen=True)
class CacheSettings:
    """What every width group's cache has in common."""

    policy: str  # lru | lfu | light_lfu
    staleness: float  # updates; may be inf
    batch_size: int  # examples of a rank's batch: slots to start with
    seed: int  # of the initial rows
    audit: bool = False
    directory: bool = True  # owners send notices, in place of a clock sent with every hit
    count_updates: bool = False  # pushes say how many updates they hold
    prefetch: bool = False  # two batches are in flight
    index: str = "array"  # array | hash


class SlotTable:
    """The memory of one width group and the kernel over it.

    Where updates are held back, the kernel's fused optimizer trains the slots in place. With an empty cache the
    gradient of every row has to travel, merged per row: the dense kernel leaves it in `gradients`.
    """

    def __init__(
        self, features: int, slots: int, dim: int, optimizer: RowOptimizer, device: torch.device, *, held_back: bool
    ) -> None:
        self.held_back, self._dim, self._device = held_back, dim, device
        make = self._fused if held_back else self._dense
        self._kernel = make(slots, [0] * features, optimizer)
        self.value: Tensor = self._kernel.split_embedding_weights()[0]  # [slots, D]; a slot is written, then read
        states = self._kernel.split_optimizer_states()[0] if held_back and optimizer.state_width(dim) else []
        self.state: Tensor = states[0].view(slots, -1) if states else torch.empty(slots, 0, device=device)

    def _fused(self, slots: int, tables: list[int], optimizer: RowOptimizer) -> SplitTableBatchedEmbeddingBagsCodegen:
        on_cpu = self._device.type == "cpu"
        location = EmbeddingLocation.HOST if on_cpu else EmbeddingLocation.DEVICE
        return SplitTableBatchedEmbeddingBagsCodegen(
            [(slots, self._dim, location, ComputeDevice.CPU if on_cpu else ComputeDevice.CUDA)],
            feature_table_map=tables,
            optimizer=optimizer.fbgemm,
            learning_rate=optimizer.lr,
            eps=optimizer.eps,
            stochastic_rounding=False,
            pooling_mode=PoolingMode.SUM,
            bounds_check_mode=BoundsCheckMode.NONE,  # slots are our own numbers
            device=self._device,
            **({"preallocated_host_buffers": self._lazy_buffers(slots, optimizer)} if on_cpu else {}),
        )

    def _lazy_buffers(self, slots: int, optimizer: RowOptimizer) -> dict[str, Tensor]:
        """The kernel's memory, which it would zero, and so take, at once."""
        widths = {"weights": self._dim, "momentum1": optimizer.state_width(self._dim)}
        return {name: lazy_zeros((slots * n,), torch.float32, self._device) for name, n in widths.items() if n}

    def _dense(self, slots: int, tables: list[int], _: RowOptimizer) -> DenseTableBatchedEmbeddingBagsCodegen:
        return DenseTableBatchedEmbeddingBagsCodegen(
            [(slots, self._dim)], feature_table_map=tables, use_cpu=self._device.type == "cpu"
        )

    def set_learning_rate(self, lr: float) -> None:
        """Rate of the fused step; gradients that travel meet theirs at the owner."""
        if self.held_back:
            self._kernel.set_learning_rate(lr)

    def pool(self, slots: Tensor, offsets: Tensor) -> Tensor:
        """Sums per bag, [B, F * D], of `slots` [n] cut by `offsets` [F * B + 1]."""
        pooled: Tensor = self._kernel(slots.to(self._device), offsets.to(self._device))
        return pooled

    def gradients(self, slots: Tensor) -> Tensor:
        """After backward, once, where gradients travel: those of distinct `slots`, [U] to [U, D]."""
        weights = self._kernel.weights
        gradient: Tensor = weights.grad.view(-1, self._dim).index_select(0, slots.to(self._device))
        weights.grad = None
        return gradient


@dataclass
class _Read:
    """One width group's part of the batch in flight: lookups by feature and bag, [n] and [F * B + 1]."""

    indices: Tensor
    offsets: Tensor
    plan: ReadPlan | None = None  # None: looked up in `rows`, for evaluation
    rows: Tensor | None = None  # [., D]


def rows_in_flight(rows: int, lookups: int, *, prefetch: bool) -> int:
    """Slots that batches of `lookups` into a space of `rows` rows may need at once."""
    return min(rows, max(1, lookups) * (2 if prefetch else 1))


class WidthGroup:
    """The features of one embedding dim: their rows' space and placement, this rank's owner, slots and cache."""

    def __init__(
        self,
        placement: Placement,
        owner: Owner,
        optimizer: RowOptimizer,
        capacity_rows: int,
        settings: CacheSettings,
        device: torch.device,
    ) -> None:
        self.space: RowSpace = placement.space
        self.placement, self.owner = placement, owner
        self.features = list(self.space.feature_offsets)
        self._first_rows = torch.tensor([self.space.feature_offsets[f] for f in self.features])
        self._optimizer, self._settings, self._device = optimizer, settings, device
        self.capacity_rows = capacity_rows
        self.learning_rate = optimizer.lr
        self.batch_rows = self._rows_in_flight(settings.batch_size * len(self.features))
        self.table = self._slot_table()
        self.cache = Cache(
            self.space,
            capacity_rows,
            self.batch_rows,
            self.table.value,
            self.table.state,
            settings.policy,
            settings.staleness,
            optimizer,
            seed=settings.seed,
            audit=settings.audit,
            directory=settings.directory,
            count_updates=settings.count_updates,
            index=settings.index,
        )

    def _rows_in_flight(self, lookups: int) -> int:
        """Slots that batches of `lookups` may need beyond the capacity."""
        return rows_in_flight(self.space.rows, lookups, prefetch=self._settings.prefetch)

    def _slot_table(self) -> SlotTable:
        slots, held_back = self.capacity_rows + self.batch_rows, self.capacity_rows > 0
        table = SlotTable(len(self.features), slots, self.space.dim, self._optimizer, self._device, held_back=held_back)
        table.set_learning_rate(self.learning_rate)
        return table

    def make_room(self, lookups: int) -> None:
        """Grow, keeping every bit of the cache, when a batch may touch more rows than any before it."""
        if self._rows_in_flight(lookups) > self.batch_rows:
            self._grow(self._rows_in_flight(1 << (lookups - 1).bit_length()))

    def _grow(self, batch_rows: int) -> None:
        old, self.batch_rows = self.table, batch_rows
        self.table = self._slot_table()
        self.table.value[: len(old.value)] = old.value
        self.table.state[: len(old.state)] = old.state
        self.cache.grow(self.table.value, self.table.state)

    def set_learning_rate(self, lr: float) -> None:
        """Rate of this step's row updates at the worker."""
        self.learning_rate = lr
        self.table.set_learning_rate(lr)

    def owned(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`rows` [n] of the owner's memory, with copies of their values [n, D] and states [n, S]."""
        return rows, self.owner.value.index_select(0, rows), self.owner.state.index_select(0, rows)

    def state_dict(self) -> dict[str, Any]:
        """This rank's cache and clocks, and inside a view of the owner the rows it changed, to resume bit for bit."""
        return {"batch_rows": self.batch_rows, "cache": self.cache.state_dict(), "owner": self.owner.state_dict()}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Take up what `state_dict` gave, after the owner's tables were loaded; None: empty cache, clocks at 0."""
        if state is None:
            self.cache.clear()
            self.owner.load_state_dict(None)
            return
        if state["batch_rows"] > self.batch_rows:
            self._grow(state["batch_rows"])
        self.cache.load_state_dict(state["cache"])
        self.owner.load_state_dict(state["owner"])

    def lookups(self, sparse: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        """Global row of every lookup of this group [n] int64, on the CPU, and bag offsets [F * B + 1]."""
        return lookups(sparse, self.features, self._first_rows)


class StoreBags(nn.Module):
    """Embedding bags whose rows are read through the cache.

    A training step calls `read` (collective), the network (which calls this module), backward, `commit`. To hide the
    next batch's round behind this one's computation it calls `read_ahead` before the network and `arrive` after
    `commit`, in place of the next `read`. The slots are no parameters: the fused kernel trains them, and
    neither DDP nor an optimizer sees them.
    """

    def __init__(self, groups: Sequence[WidthGroup], transport: CollectiveTransport) -> None:
        super().__init__()
        self.groups = tuple(groups)
        self._waited_s = 0.0
        self._transport = transport
        self._background = Background()
        self._reads: list[_Read] = []
        self._ahead: tuple[list[_Read], list[Routed]] = [], []
        self._keys = [f for group in groups for f in group.features]
        self._widths = [group.space.dim for group in groups for _ in group.features]

    def forward(self, sparse: KeyedJaggedTensor) -> KeyedTensor:
        """Pooled rows of the batch given to `read` (or `read_only`) last; keys are features, width group by group."""
        pooled = [_pool(group, read) for group, read in zip(self.groups, self._reads, strict=True)]
        values = pooled[0] if len(pooled) == 1 else torch.cat(pooled, dim=1)
        return KeyedTensor(self._keys, self._widths, values)

    def take_wait_s(self) -> float:
        """Seconds that steps waited for rounds since the last call."""
        waited, self._waited_s = self._waited_s, 0.0
        return waited

    def read(self, sparse: KeyedJaggedTensor) -> None:
        """The round of a training step: push what is due, fetch and check the rows of `sparse`."""
        reads, routed = self._begin(sparse)
        waited = self._transport.waited_s
        replies = self._transport.exchange(_by_peer([r.requests for r in routed]))
        self._waited_s += self._transport.waited_s - waited
        self._admit(reads, routed, replies)

    def read_ahead(self, sparse: KeyedJaggedTensor) -> None:
        """Start the round of the next batch; it runs while this one, which was read, is computed."""
        self._ahead = self._begin(sparse)
        requests = _by_peer([routed.requests for routed in self._ahead[1]])
        self._background.start(lambda: self._transport.exchange(requests))

    def arrive(self) -> None:
        """Wait for the round that `read_ahead` started; its batch is the one to compute next."""
        start = time.perf_counter()
        replies = self._background.result()
        self._waited_s += time.perf_counter() - start
        self._admit(*self._ahead, replies)

    def reread(self, sparse: KeyedJaggedTensor) -> None:
        """Take the place of `read` after a resume, where a batch had been read ahead before the state was saved.

        Another batch than that, on any rank, is read as ever. Collective.
        """
        lookups = [group.lookups(sparse) for group in self.groups]
        same = all(group.cache.was_read(rows) for group, (rows, _) in zip(self.groups, lookups, strict=True))
        if not self._transport.agree(same):
            for group in self.groups:
                group.cache.forget_read()
            self.read(sparse)
            return
        plans = [group.cache.reread(rows) for group, (rows, _) in zip(self.groups, lookups, strict=True)]
        self._reads = [_Read(plan.slots, offsets, plan) for plan, (_, offsets) in zip(plans, lookups, strict=True)]

    def _begin(self, sparse: KeyedJaggedTensor) -> tuple[list[_Read], list[Routed]]:
        reads, routed = [], []
        for group in self.groups:
            rows, offsets = group.lookups(sparse)
            group.make_room(len(rows))
            plan = group.cache.begin(rows)
            reads.append(_Read(plan.slots, offsets, plan))
            routed.append(split(plan.request, group.placement))
        return reads, routed

    def _admit(self, reads: list[_Read], routed: list[Routed], replies: list[list[Reply]]) -> None:
        for g, (group, read) in enumerate(zip(self.groups, reads, strict=True)):
            assert read.plan is not None
            group.cache.admit(read.plan, routed[g].merge([peer[g] for peer in replies]))
        self._reads = reads

    def audit(self) -> int:
        """Between `read` and `commit`: the most updates that a read of this step misses here. Collective."""
        reports = []
        for group, read in zip(self.groups, self._reads, strict=True):
            assert read.plan is not None
            reports.append(split_report(audit_report(group.cache, read.plan), group.placement))
        received = self._transport.collect(_by_peer(reports))
        return max(missed_updates(group.owner, [peer[g] for peer in received]) for g, group in enumerate(self.groups))

    def commit(self) -> None:
        """Once backward is done: clocks advance, gradients are staged, the cache shrinks to its capacity."""
        for group, read in zip(self.groups, self._reads, strict=True):
            assert read.plan is not None
            if not group.table.held_back:
                group.cache.stage_gradients(read.plan, group.table.gradients(read.plan.unique_slots))
            group.cache.commit(read.plan)
        self._reads = []

    def push(self) -> None:
        """Send every held-back update to its owner, changing nothing here. Collective."""
        routed = [split(group.cache.pending(), group.placement).requests for group in self.groups]
        self._transport.exchange(_by_peer(routed))

    @contextmanager
    def read_only(self, sparse: KeyedJaggedTensor) -> Iterator[None]:
        """Fetch the rows of `sparse` from their owners past the cache, for forwards while it is open. Collective.

        A batch read ahead is the one to compute again at exit.
        """
        ahead = self._reads
        self._reads = self._fetch_past_cache(sparse)
        try:
            yield
        finally:
            self._reads = ahead

    def _fetch_past_cache(self, sparse: KeyedJaggedTensor) -> list[_Read]:
        lookups = [group.lookups(sparse) for group in self.groups]
        if self._transport.world_size == 1 and all(group.owner.holds_all for group in self.groups):
            return [
                _Read(group.owner.local_of(rows), offsets, rows=group.owner.value)
                for group, (rows, offsets) in zip(self.groups, lookups, strict=True)
            ]
        reads, routed, distinct_rows = [], [], []
        for group, (rows, offsets) in zip(self.groups, lookups, strict=True):
            distinct, indices = torch.unique(rows, return_inverse=True)
            distinct_rows.append(distinct)
            reads.append(_Read(indices, offsets))
            routed.append(
                split(Request.fetch(distinct, group.space.dim, group.cache.copies.state.shape[1]), group.placement)
            )
        replies = self._transport.exchange(_by_peer([r.requests for r in routed]))
        for g, (group, read) in enumerate(zip(self.groups, reads, strict=True)):
            read.rows = group.cache.rows_of(distinct_rows[g], routed[g].merge([peer[g] for peer in replies]))
        return reads


def _pool(group: WidthGroup, read: _Read) -> Tensor:
    if read.rows is None:
        return group.table.pool(read.indices, read.offsets)
    features, bags = len(group.features), read.offsets.shape[0] - 1
    pooled = nn.functional.embedding_bag(
        read.indices.to(read.rows.device), read.rows, read.offsets, mode="sum", include_last_offset=True
    )
    by_feature = pooled.view(features, bags // features, group.space.dim)
    return by_feature.transpose(0, 1).reshape(bags // features, features * group.space.dim)


def _by_peer(by_group: Sequence[Sequence[M]]) -> list[list[M]]:
    """Messages by group then peer, as the transport wants them: by peer, then group."""
    return [list(of_peer) for of_peer in zip(*by_group, strict=True)]
