"""W workers' caches and all owners in one process; an exchange is a call."""

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import torch

from hetrain.optim import RowOptimizer
from hetrain.store.audit import audit_report, missed_updates, split_report
from hetrain.store.cache import Cache
from hetrain.store.initial import initial_rows
from hetrain.store.messages import Part, Request
from hetrain.store.owner import Owner
from hetrain.store.route import split
from hetrain.store.row_codec import RowCodec
from hetrain.store.space import Placement, RowSpace
from hetrain.store.threshold import Dct
from hetrain.tables import Table
from hetrain.telemetry import Traffic

DIM = 3
CPU = torch.device("cpu")
BOUND = 0.5  # of the initial values
HELD = {"slots": ("rows", "slots"), "copies": ("start", "current")}  # in a cache's state


@dataclass(frozen=True)
class Setup:
    world: int = 1  # workers
    servers: int = 0  # ranks after them that own all rows; 0: the workers own them
    tables: tuple[int, ...] = (20,)  # rows of each
    capacity: int = 5
    batch_rows: int = 20
    staleness: float = 1
    policy: str = "lru"
    clock: str = "max"
    optimizer: str = "sgd"
    directory: bool = False
    prefetch: bool = False
    blocks: int = 1
    audit: bool = True
    index: str = "array"
    lr: float = 0.1
    eps: float = 1e-8
    seed: int = 7
    dim: int = DIM
    travels: str = "none"  # option of rows and pushes
    dct: Dct | None = None

    @property
    def rows(self) -> int:
        return sum(self.tables)

    @property
    def late(self) -> bool:
        """Whether a round read ahead has a late leg."""
        return self.prefetch and (self.capacity == 0 or self.staleness < 1)

    @property
    def notices(self) -> bool:
        """Whether owners give notice: at 0 every copy that was read breaks its own bound, and no others' matters."""
        return self.directory and self.capacity > 0 and 0 < self.staleness < math.inf


def plan_of(tables, world, seed, first=0):
    """Random uneven row ranges on random ranks from `first` on, `world` of them."""
    rng = np.random.default_rng(seed)
    pieces = []
    for number, rows in enumerate(tables):
        cuts = sorted({0, rows, *rng.integers(0, rows + 1, world - 1).tolist()})
        for start, end in pairwise(cuts):
            rank = first + int(rng.integers(world))
            pieces.append(SimpleNamespace(table=f"t{number}", rank=rank, first_row=start, rows=end - start))
    rng.shuffle(pieces)
    return SimpleNamespace(pieces=pieces)


class Loopback:
    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        tables = [Table(f"t{i}", rows, setup.dim, (f"f{i}",), BOUND) for i, rows in enumerate(setup.tables)]
        self.space = RowSpace(tables, setup.dim)
        ranks = setup.world + setup.servers
        first, count = (setup.world, setup.servers) if setup.servers else (0, setup.world)
        self.placement = Placement(self.space, plan_of(setup.tables, count, setup.seed, first), ranks)
        self.optimizer = RowOptimizer(setup.optimizer, setup.lr, setup.eps)
        self.traffic = Traffic()
        self.codec = RowCodec(setup.travels, setup.dim, self.traffic, setup.dct)
        self.owners = [self._owner(rank) for rank in range(ranks)]
        self.caches = [self._cache() for _ in range(setup.world)]
        self.announced = []  # by worker: the order in which owners speak of the rows announced last

    def _owner(self, rank):
        setup = self.setup
        return Owner(
            self.space,
            self.placement,
            rank,
            self.optimizer,
            seed=setup.seed,
            device=CPU,
            held_back=setup.capacity > 0,
            clock=setup.clock,
            staleness=setup.staleness,
            audit=setup.audit,
            directory=setup.directory and setup.capacity > 0,
            workers=setup.world,
            index=setup.index,
            codec=self.codec,
        )

    def _cache(self):
        setup = self.setup
        batch_rows = setup.batch_rows * (1 + setup.prefetch)
        slots = setup.capacity + batch_rows
        width = self.optimizer.state_width(setup.dim) if setup.capacity else 0
        return Cache(
            self.space,
            setup.capacity,
            batch_rows,
            torch.full((slots, setup.dim), torch.nan),
            torch.full((slots, width), torch.nan),
            setup.policy,
            setup.staleness,
            self.optimizer,
            seed=setup.seed,
            audit=setup.audit,
            directory=setup.directory and setup.capacity > 0,
            count_updates=setup.clock == "sum" and setup.capacity > 0,
            late_leg=setup.late,
            index=setup.index,
            codec=self.codec,
        )

    def exchange(self, requests, part=Part.WHOLE):
        """By worker, whole requests; returns by worker the merged replies and what was sent to each owner."""
        routed, replies = self._exchange(requests, part, 1)
        return replies, [r.requests[0] for r in routed]

    def _exchange(self, requests, part, blocks):
        routed = [split(request, self.placement, blocks) for request in requests]
        replies = [[] for _ in requests]
        for block in range(blocks):
            parts = [[r.requests[block][o] for r in routed] for o in range(len(self.owners))]
            by_owner = [owner.serve(asked, part, block) for owner, asked in zip(self.owners, parts, strict=True)]
            for worker, of_worker in enumerate(replies):
                of_worker.append([answers[worker] for answers in by_owner])
        return routed, [r.merge(reply) for r, reply in zip(routed, replies, strict=True)]

    def begin(self, batches):
        """The plans by worker."""
        batches = [torch.tensor(batch, dtype=torch.int64) for batch in batches]
        return [cache.begin(batch) for cache, batch in zip(self.caches, batches, strict=True)]

    @property
    def announces(self):
        return self.setup.late and self.setup.capacity == 0

    def announce(self, plans):
        """Before a round with a late leg, at capacity 0: by worker, (late, hot), each in the order of its batch."""
        routed = self._announcement(plans)
        by_owner = [
            owner.serve([r.requests[0][o] for r in routed], Part.ANNOUNCE) for o, owner in enumerate(self.owners)
        ]
        before, self.announced = self.announced or [None] * len(plans), routed
        flags = [r.flags([replies[w] for replies in by_owner], before[w]) for w, r in enumerate(routed)]
        for plan, (late, _) in zip(plans, flags, strict=True):
            plan.leave_late(late)
        return flags

    def _announcement(self, plans):
        width = self.caches[0].copies.state.shape[1]
        return [split(Request.fetch(plan.rows, self.setup.dim, width), self.placement) for plan in plans]

    def requests(self, plans):
        """What goes out for `plans`, by worker: taken before `announce`, which leaves the late rows out of them."""
        return [replace(plan.request) for plan in plans]

    def fetch(self, requests):
        """A round without its late leg: what was sent, by worker, and the replies."""
        return self._exchange(requests, Part.WHOLE, self.setup.blocks if self.setup.late else 1)

    def admit(self, plans, replies):
        for cache, plan, reply in zip(self.caches, plans, replies, strict=True):
            cache.admit(plan, reply)

    def begin_late(self, plans, announced):
        """What the late leg of `plans` asks for, by worker; `announced`: what `announce` returned."""
        hot = [flags for _, flags in announced] if announced else [None] * len(plans)
        return [cache.begin_late(*of_worker) for cache, *of_worker in zip(self.caches, plans, hot, strict=True)]

    def fetch_late(self, asked):
        """The late leg: what was sent, by worker, and the replies."""
        return self._exchange([a.request for a in asked], Part.LATE, self.setup.blocks)

    def arrive(self, plans):
        """Everything that follows the commit of the batch before `plans`, which were begun during it."""
        requests = self.requests(plans)
        announced = self.announce(plans) if self.announces else None
        asked = self.begin_late(plans, announced) if self.setup.late else None
        self.admit(plans, self.fetch(requests)[1])
        if asked:
            self.admit(asked, self.fetch_late(asked)[1])

    def read(self, batches):
        """One round, nothing being in flight; the plans by worker, admitted, and the requests sent [worker][owner]."""
        for owner in self.owners:
            owner.forget_flight()
        self.announced = []
        plans = self.begin(batches)
        requests = self.requests(plans)
        if self.announces:
            self.announce(plans)
        sent = [split(request, self.placement).requests[0] for request in requests]
        self.admit(plans, self.fetch(requests)[1])
        return plans, sent

    def write(self, plans, gradients):
        """`gradients`: by worker [U, D] in the order of plan.rows."""
        for cache, plan, gradient in zip(self.caches, plans, gradients, strict=True):
            if self.setup.capacity == 0:
                cache.stage_gradients(plan, gradient)
            else:
                at = plan.unique_slots
                value, state = cache.copies.value[at], cache.copies.state[at]
                self.optimizer.step_(value, state, gradient, self.setup.lr)
                cache.copies.value[at], cache.copies.state[at] = value, state
            cache.commit(plan)

    def reread(self, batches):
        """The plans of batches that were admitted when the caches' state was saved."""
        batches = [torch.tensor(batch, dtype=torch.int64) for batch in batches]
        plans = [cache.reread(batch) for cache, batch in zip(self.caches, batches, strict=True)]
        if self.announces:
            self.announced = self._announcement(plans)
        return plans

    def forget_read(self):
        """The batch that was read ahead does not come."""
        for cache in self.caches:
            cache.forget_read()
        for owner in self.owners:
            owner.forget_flight()
        self.announced = []

    def audit(self, plans):
        reports = [split_report(audit_report(c, p), self.placement) for c, p in zip(self.caches, plans, strict=True)]
        return max(missed_updates(owner, [r[o] for r in reports]) for o, owner in enumerate(self.owners))

    def flush(self):
        self.exchange([cache.pending() for cache in self.caches])
        for cache in self.caches:
            cache.clear()
        for owner in self.owners:
            owner.forget_flight()

    def touch(self):
        """Have a push that changes nothing reach every row."""
        width = self.caches[0].copies.state.shape[1]
        rows = torch.arange(self.space.rows)
        push = Request.empty(self.setup.dim, width)
        push.push_rows, push.push_value = rows, torch.zeros(len(rows), self.setup.dim)
        push.push_state = torch.zeros(len(rows), width)
        if self.setup.capacity or self.setup.audit:
            push.push_clock = torch.zeros_like(rows)
        if self.setup.clock == "sum" or self.setup.audit:
            push.push_updates = torch.zeros_like(rows)
        self.exchange([push] + [Request.empty(self.setup.dim, width) for _ in self.caches[1:]])

    def initial(self):
        """[R, D]: every row before any update, from the generator alone."""
        pieces = [
            initial_rows(self.setup.seed, number, torch.arange(table.rows), self.setup.dim, BOUND)
            for number, table in zip(self.space.table_index, self.space.tables, strict=True)
        ]
        return torch.cat(pieces)

    def table(self, name="value"):
        """All rows [R, .] of all owners, by global row; rows that an owner never saw are as they start."""
        return self._by_row(
            lambda owner, rows: getattr(owner, name)[owner.local_of(rows)],
            lambda rows: self.initial()[rows] if name == "value" else 0,
        )

    def holders(self):
        """[R, W]: the L of every holder of every row, -1 for none."""
        return self._by_row(lambda owner, rows: torch.as_tensor(owner.holders(rows)), lambda rows: -1)

    def _by_row(self, seen, unseen):
        """[R, ...] from `seen(owner, its rows)` and `unseen(rows)`."""
        rows = torch.arange(self.space.rows)
        owner_of = self.placement.owner_of(rows)
        whole = None
        for rank, owner in enumerate(self.owners):
            mine = rows[owner_of == rank]
            known = owner.local_of(mine) >= 0
            part = seen(owner, mine[known])
            if whole is None:
                whole = part.new_empty(len(rows), *part.shape[1:])
            whole[mine[known]] = part
            whole[mine[~known]] = torch.as_tensor(unseen(mine[~known]), dtype=part.dtype)
        return whole


def integers(message):
    """How many row numbers and clocks a request or reply carries, those of audits left out."""
    return sum(t.numel() for channel, t in message.fields() if channel in ("ids", "clocks") and t.dtype == torch.int64)


def held(cache):
    """Row to (slot, c_s, c_c)."""
    state = cache.state_dict()
    columns = [state[part][name].tolist() for part, names in HELD.items() for name in names]
    return {row: rest for row, *rest in zip(*columns, strict=True)}
