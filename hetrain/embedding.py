"""The bag collection over the store: KeyedJaggedTensor -> KeyedTensor, one table-batched embedding per width.

All features of one embedding dim look up in one FBGEMM table whose rows are cache slots; lookup, pooling,
backward and the optimizer step are the fused kernels that `bsp` trains with.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from hetrain.lookups import sums_per_bag
from hetrain.store.audit import audit_report, missed_updates, split_report
from hetrain.store.messages import Message, Part, Reply, Request, no_flags
from hetrain.store.read import Asked, ReadPlan
from hetrain.store.route import Routed, split
from hetrain.transport.background import Background
from hetrain.transport.collective import CollectiveTransport
from hetrain.width_group import WidthGroup

M = TypeVar("M", bound=Message)
PUSH_BYTES = 1 << 25  # what a worker packs at once, beside what it holds, when it sends everything


@dataclass
class _Read:
    """One width group's part of the batch in flight: lookups by feature and bag, [n] and [F * B + 1]."""

    indices: Tensor
    offsets: Tensor
    plan: ReadPlan | None = None  # None: looked up in `rows`, for evaluation
    rows: Tensor | None = None  # [., D]


@dataclass
class _Leg:
    """What was sent to the owners, by group, and what they answer."""

    groups: Sequence[WidthGroup]
    asked: Sequence[Asked]
    routed: Sequence[Routed]
    finish: Callable[[], list[list[list[Reply]]]]  # as the transport gave it
    replies: list[list[list[Reply]]] = field(default_factory=list)  # by block, peer and group

    def receive(self) -> None:
        """Wait for the answers, serving meanwhile what others ask of this rank."""
        self.replies = self.finish()

    def admit(self) -> None:
        """Take the answers up: the rows asked for may be read."""
        for g, (group, asked, routed) in enumerate(zip(self.groups, self.asked, self.routed, strict=True)):
            group.cache.admit(asked, routed.merge(_of_group(self.replies, g)))


@dataclass
class _Announcement:
    """The rows of the next batch, by group, and what their owners say of them (store/flight.py)."""

    plans: Sequence[ReadPlan]
    routed: Sequence[Routed]
    before: Sequence[Routed]  # the announcement of the batch in flight; empty: there is none
    finish: Callable[[], list[list[list[Reply]]]]  # as the transport gave it
    hot: list[Tensor] = field(default_factory=list)  # by group, which rows of the batch in flight others wait for

    def receive(self) -> None:
        """Wait for the answers; the plans then leave out what has to wait."""
        replies = self.finish()
        before: Sequence[Routed | None] = self.before or [None] * len(self.plans)
        for g, (plan, routed) in enumerate(zip(self.plans, self.routed, strict=True)):
            late, hot = routed.flags(_of_group(replies, g)[0], before[g])
            plan.leave_late(late)
            self.hot.append(hot)


class StoreBags(nn.Module):
    """Embedding bags whose rows are read through the cache.

    A training step calls `read` (collective), the network (which calls this module), backward, `commit`. To hide the
    next batch's round behind this one's computation it calls `read_ahead` before the network and `arrive` after
    `commit`, in place of the next `read`. The slots are no parameters: the fused kernel trains them, and neither DDP
    nor an optimizer sees them.
    """

    def __init__(self, groups: Sequence[WidthGroup], transport: CollectiveTransport, late_blocks: int = 0) -> None:
        """`late_blocks`: where rounds have a late leg, in how many blocks both legs go."""
        super().__init__()
        self.groups = tuple(groups)
        self._waited_s = 0.0
        self._transport = transport
        self._late_leg, self._blocks = late_blocks > 0, max(1, late_blocks)
        self._announces = self._late_leg and not self.groups[0].table.held_back
        self._background = Background("round")
        self._reads: list[_Read] = []
        self._ahead: list[_Read] = []
        self._under_way: tuple[_Announcement | None, _Leg]
        self._announced: list[Routed] = []  # the batch in flight: in this order owners speak of its rows
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
        """The round of a training step, no batch being in flight: push what is due, fetch and check the rows."""
        for group in self.groups:
            group.owner.forget_flight()
        self._announced = []
        self._reads = self._begin(sparse)
        waited = self._transport.waited_s
        announcement, leg = self._send(self._reads)
        if announcement is not None:
            announcement.receive()
        leg.receive()
        self._waited_s += self._transport.waited_s - waited
        leg.admit()

    def read_ahead(self, sparse: KeyedJaggedTensor) -> None:
        """Start the round of the next batch; it runs while this one, which was read, is computed."""
        self._ahead = self._begin(sparse)
        self._under_way = self._send(self._ahead)
        for part in self._under_way:
            if part is not None:
                self._background.start(part.receive)

    def arrive(self, before_late: Callable[[], None]) -> None:
        """Wait for the round that `read_ahead` started; its batch is the one to compute next.

        `before_late` is called where there is a late leg, before owners here take what it pushes.
        """
        announcement, leg = self._under_way
        start = time.perf_counter()
        if announcement is not None:
            self._background.result()
        late = self._send_late(announcement) if self._late_leg else None
        self._background.result()
        self._waited_s += time.perf_counter() - start
        leg.admit()
        self._reads = self._ahead
        if late is not None:
            before_late()
            waited = self._transport.waited_s
            late.receive()
            self._waited_s += self._transport.waited_s - waited
            late.admit()

    def nothing_ahead(self) -> None:
        """In place of `read_ahead` where no batch follows: pushes the gradients that would go with its early leg.

        They are those of the batch before the one in flight, which is pushed later, at its own rate. Collective.
        """
        if self._announces:
            routed = [split(group.cache.take_pushes(), group.placement) for group in self.groups]
            waited = self._transport.waited_s
            self._transport.start(_by_block(routed))()
            self._waited_s += self._transport.waited_s - waited

    def _send(self, reads: Sequence[_Read]) -> tuple[_Announcement | None, _Leg]:
        """What `reads` ask for goes out, announced where it has to be."""
        plans = [_plan(read) for read in reads]
        announcement = None
        if self._announces:
            routed = [split(g.fetch(plan.rows), g.placement) for g, plan in zip(self.groups, plans, strict=True)]
            finish = self._transport.start(_by_block(routed), Part.ANNOUNCE)
            announcement = _Announcement(plans, routed, self._announced, finish)
            self._announced = routed
        return announcement, self._ask(plans, Part.WHOLE)

    def _send_late(self, announcement: _Announcement | None) -> _Leg:
        """Push and ask for what waited for the batch committed just now."""
        hot = [no_flags()] * len(self.groups) if announcement is None else announcement.hot
        asked = [
            group.cache.begin_late(_plan(read), flags)
            for group, read, flags in zip(self.groups, self._ahead, hot, strict=True)
        ]
        return self._ask(asked, Part.LATE)

    def _ask(self, asked: Sequence[Asked], part: Part) -> _Leg:
        routed = [split(a.request, group.placement, self._blocks) for a, group in zip(asked, self.groups, strict=True)]
        return _Leg(self.groups, asked, routed, self._transport.start(_by_block(routed), part))

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
        self._announced = [
            split(group.fetch(plan.rows), group.placement) for group, plan in zip(self.groups, plans, strict=True)
        ]
        self._reads = [_Read(plan.slots, offsets, plan) for plan, (_, offsets) in zip(plans, lookups, strict=True)]

    def _begin(self, sparse: KeyedJaggedTensor) -> list[_Read]:
        reads = []
        for group in self.groups:
            rows, offsets = group.lookups(sparse)
            group.make_room(len(rows))
            plan = group.cache.begin(rows)
            reads.append(_Read(plan.slots, offsets, plan))
        return reads

    def audit(self) -> int:
        """Between `read` and `commit`: the most updates that a read of this step misses here. Collective."""
        reports = []
        for group, read in zip(self.groups, self._reads, strict=True):
            reports.append(split_report(audit_report(group.cache, _plan(read)), group.placement))
        received = self._transport.collect(_by_peer(reports))
        return max(missed_updates(group.owner, [peer[g] for peer in received]) for g, group in enumerate(self.groups))

    def commit(self) -> None:
        """Once backward is done: clocks advance, gradients are staged, the cache shrinks to its capacity."""
        for group, read in zip(self.groups, self._reads, strict=True):
            plan = _plan(read)
            if not group.table.held_back:
                group.cache.stage_gradients(plan, group.table.gradients(plan.unique_slots))
            group.cache.commit(plan)
        self._reads = []

    def push(self) -> None:
        """Send every held-back update to its owner, changing nothing here. Collective.

        In as many rounds as the worker with most of them needs to send PUSH_BYTES in each.
        """
        nbytes = sum(group.cache.pending_bytes for group in self.groups)
        rounds = self._transport.most(-(-nbytes // PUSH_BYTES))
        for number in range(rounds):
            routed = [split(group.cache.pending(number, rounds), group.placement) for group in self.groups]
            self._transport.start(_by_block(routed))()

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
            routed.append(split(group.fetch(distinct), group.placement))
        replies = self._transport.start(_by_block(routed))()
        for g, (group, read) in enumerate(zip(self.groups, reads, strict=True)):
            read.rows = group.cache.rows_of(distinct_rows[g], routed[g].merge(_of_group(replies, g)))
        return reads


def _pool(group: WidthGroup, read: _Read) -> Tensor:
    if read.rows is None:
        return group.table.pool(read.indices, read.offsets)
    return sums_per_bag(read.rows, read.indices, read.offsets, len(group.features))


def _plan(read: _Read) -> ReadPlan:
    """The plan of a batch that is trained on."""
    assert read.plan is not None
    return read.plan


def _by_peer(by_group: Sequence[Sequence[M]]) -> list[list[M]]:
    """Messages by group then peer, as the transport wants them: by peer, then group."""
    return [list(of_peer) for of_peer in zip(*by_group, strict=True)]


def _by_block(routed: Sequence[Routed]) -> list[list[list[Request]]]:
    """The requests of all groups, by block, peer and group."""
    return [_by_peer(of_block) for of_block in zip(*(part.requests for part in routed), strict=True)]


def _of_group(replies: Sequence[Sequence[Sequence[Reply]]], group: int) -> list[list[Reply]]:
    """By block and peer, those of one group."""
    return [[peer[group] for peer in of_block] for of_block in replies]
