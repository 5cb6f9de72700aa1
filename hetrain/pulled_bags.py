"""The bag collection where ranks step at their own pace: rows are pulled, pooled by FBGEMM, and gradients pushed.

A batch's distinct rows lie one behind the other in one small table per embedding dim; backward leaves their gradients,
merged per row, which is what is pushed.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from hetrain.lookups import lookups, sums_per_bag
from hetrain.optim import RowOptimizer
from hetrain.store.ask import Answer, RowsAnswered, RowsAsked
from hetrain.store.clocked_copies import ClockedCopies, Reading
from hetrain.store.messages import none
from hetrain.store.residue import Residue
from hetrain.store.route import by_part
from hetrain.store.row_codec import RowCodec
from hetrain.store.slot_table import SlotTable
from hetrain.store.space import Placement

SEEN_ALL = 1 << 40  # as `seen`, of what was kept from earlier pushes: it counted as missed in its own


@dataclass
class _Read:
    """One width group's part of a batch. Lookups by feature and bag: [n] and [F * B + 1]."""

    reading: Reading
    offsets: Tensor
    by_owner: list[Tensor]  # per rank, which of the distinct rows it owns, in the order of ascending rows
    fetched: list[Tensor]  # per rank, positions in `reading.fetched` of those asked of it, in that order


@dataclass
class _Push:
    """Gradients of one width group that wait for the next message to their owners."""

    rows: Tensor  # [U]
    gradient: Tensor  # [U, .] on the host, as RowCodec.pushes gives it
    seen: Tensor  # [U] or [0]
    by_owner: list[Tensor]


class PulledGroup:
    """The features of one embedding dim on a worker: copies, the table computed on, and what is to be pushed."""

    def __init__(
        self,
        placement: Placement,
        copies: ClockedCopies,
        optimizer: RowOptimizer,
        device: torch.device,
        codec: RowCodec,
    ) -> None:
        self.placement, self.space, self.copies = placement, placement.space, copies
        self.features = list(self.space.feature_offsets)
        self._first_rows = torch.tensor([self.space.feature_offsets[f] for f in self.features])
        self._optimizer, self._device, self._codec = optimizer, device, codec
        # gradients lie on the host once they are staged
        self.residue = Residue(self.space, codec, codec.dct, torch.device("cpu")) if codec.dct else None
        self._table: SlotTable | None = None
        self._push: _Push | None = None

    def begin(self, sparse: KeyedJaggedTensor, clock: int) -> _Read:
        """Plan the read of a batch by a worker at `clock`."""
        rows, offsets = self.lookups(sparse)
        reading = self.copies.begin(rows, clock)
        place = torch.full((len(reading.rows),), -1, dtype=torch.int64)
        place[reading.fetched] = torch.arange(len(reading.fetched))
        by_owner = by_part(self.placement, reading.rows)
        fetched = [(at := place[part])[at >= 0] for part in by_owner]
        return _Read(reading, offsets, by_owner, fetched)

    def lookups(self, sparse: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        """Global row of every lookup of this group [n], and bag offsets [F * B + 1]."""
        return lookups(sparse, self.features, self._first_rows)

    def asked(self, owner: int, read: _Read | None, audit: bool) -> RowsAsked:
        """What `owner` is told: the gradients that wait, and which rows `read` wants of it."""
        wanted = none() if read is None else read.reading.rows[read.reading.fetched[read.fetched[owner]]]
        asked = RowsAsked.fetch(wanted, self.space.dim)
        if (push := self._push) is not None:
            at = push.by_owner[owner]
            asked.push_rows, asked.push_gradient = push.rows[at], push.gradient.index_select(0, at)
            if audit:
                asked.push_seen = push.seen[at]
        return asked

    def pushed(self) -> None:
        """Every owner has been sent its gradients."""
        self._push = None

    def admit(self, read: _Read, owners: Sequence[int], parts: Sequence[Answer], group: int) -> None:
        """The answers of `owners`; this is width group number `group`. The batch may be computed afterwards."""
        reading, order = read.reading, torch.cat([read.fetched[owner] for owner in owners])
        rows = [part.rows[group] for part in parts]
        tags = [torch.full((len(r.stored),), part.slowest) for r, part in zip(rows, parts, strict=True)]
        stored = torch.cat([r.stored for r in rows])
        # from the order of owners to that of `fetched`
        back, sent = torch.argsort(order), torch.argsort(order[stored])
        applied = torch.cat([r.applied for r in rows])
        self.copies.admit(
            reading,
            stored[back],
            self._codec.read_rows(torch.cat([r.value for r in rows]).index_select(0, sent)),
            torch.cat([r.state for r in rows]).index_select(0, sent),
            torch.cat(tags)[back],
            applied[sent] if len(applied) else applied,
        )
        table = self._table_for(len(reading.rows))
        table.value[: len(reading.value)] = reading.value.to(self._device)

    def _table_for(self, rows: int) -> SlotTable:
        if self._table is None or len(self._table.value) < rows:
            slots = 1 << max(rows - 1, 1).bit_length()
            self._table = SlotTable(
                len(self.features), slots, self.space.dim, self._optimizer, self._device, held_back=False
            )
        return self._table

    def pool(self, read: _Read) -> Tensor:
        """Sums per bag, [B, F * D]."""
        assert self._table is not None
        return self._table.pool(read.reading.positions, read.offsets)

    def stage(self, read: _Read, lr: float) -> None:
        """Once backward is done: the gradients wait to be pushed, and the copies take what is pushed at rate `lr`."""
        assert self._table is not None
        reading = read.reading
        gradient = self._table.gradients(torch.arange(len(reading.rows))).cpu()
        encode = self._codec.pushes if self.residue is None else partial(self.residue.take, reading.rows)
        gradient = encode(gradient)
        self._push = _Push(reading.rows, gradient, reading.seen, read.by_owner)
        self.copies.commit(reading, self._codec.read_pushes(gradient), lr)

    def stage_rest(self) -> None:
        """All that a threshold kept waits to be pushed, nothing else being staged."""
        if self.residue is not None:
            rows, rest = self.residue.waiting()
            seen = torch.full_like(rows, SEEN_ALL)
            self._push = _Push(rows, self._codec.pushes(rest), seen, by_part(self.placement, rows))
            self.residue.clear()


class PulledBags(nn.Module):
    """Embedding bags over pulled rows: `begin`, then asking, then `admit`, the network, backward, `stage`."""

    def __init__(self, groups: Sequence[PulledGroup], owners: Sequence[int]) -> None:
        """`owners`: the ranks that own rows, in the order their answers are given."""
        super().__init__()
        self.groups, self._owners = tuple(groups), tuple(owners)
        self._reads: list[_Read] = []
        self._looked_at: list[Tensor] | None = None  # pooled rows of a batch that is only looked at, by group
        self._keys = [f for group in groups for f in group.features]
        self._widths = [group.space.dim for group in groups for _ in group.features]

    def forward(self, sparse: KeyedJaggedTensor) -> KeyedTensor:
        """Pooled rows of the batch admitted, or looked at, last; keys are features, width group by group."""
        pooled = self._looked_at
        if pooled is None:
            pooled = [group.pool(read) for group, read in zip(self.groups, self._reads, strict=True)]
        values = pooled[0] if len(pooled) == 1 else torch.cat(pooled, dim=1)
        return KeyedTensor(self._keys, self._widths, values)

    def begin(self, sparse: KeyedJaggedTensor, clock: int) -> None:
        """Plan the read of a batch."""
        self._reads = [group.begin(sparse, clock) for group in self.groups]

    def asked(self, owner: int, *, reads: bool, audit: bool) -> list[RowsAsked]:
        """What `owner` is told, by width group; `reads`: also what the batch begun wants of it."""
        each = self._reads if reads else [None] * len(self.groups)
        return [group.asked(owner, read, audit) for group, read in zip(self.groups, each, strict=True)]

    def pushed(self) -> None:
        """Every owner has been sent its gradients."""
        for group in self.groups:
            group.pushed()

    def admit(self, answers: Sequence[Answer]) -> None:
        """What the owners answered, in their order."""
        for g, (group, read) in enumerate(zip(self.groups, self._reads, strict=True)):
            group.admit(read, self._owners, answers, g)

    def stage(self, lr: float) -> None:
        """Once backward is done."""
        for group, read in zip(self.groups, self._reads, strict=True):
            group.stage(read, lr)
        self._reads = []

    @property
    def _residues(self) -> list[Residue]:
        return [group.residue for group in self.groups if group.residue is not None]

    def stage_rest(self) -> bool:
        """All that a threshold kept is pushed next, if there is anything."""
        rest = any(residue.count for residue in self._residues)
        for group in self.groups if rest else ():
            group.stage_rest()
        return rest

    def report_of_rest(self) -> dict[str, int]:
        """With dct: the most pushes of a row that something waited for."""
        return {"residue_age_max": max(residue.age_max for residue in self._residues)} if self._residues else {}

    def state_of_rest(self) -> list[dict[str, Any]]:
        """With dct: for a checkpoint, by width group."""
        return [residue.state_dict() for residue in self._residues]

    def load_state_of_rest(self, state: Sequence[dict[str, Any]]) -> None:
        """Take up what `state_of_rest` gave."""
        for residue, of_residue in zip(self._residues, state, strict=True):
            residue.load_state_dict(of_residue)

    def restart(self, steps: int) -> None:
        """Forget all copies, what was begun and what waits; `steps` were trained before."""
        self._reads = []
        for group in self.groups:
            group.copies.clear()
        for residue in self._residues:
            residue.clear()
            residue.threshold.restart(steps)

    @contextmanager
    def looking(self, looks: Sequence["Look"], answers: Sequence[Answer], device: torch.device) -> Iterator[None]:
        """While open, forwards see the rows that `looks` asked the owners for."""
        self._looked_at = [
            look.pooled([answer.rows[g] for answer in answers], self._owners, device) for g, look in enumerate(looks)
        ]
        try:
            yield
        finally:
            self._looked_at = None


class Look:
    """The read of one batch by one width group that leaves no copy behind."""

    def __init__(self, group: PulledGroup, sparse: KeyedJaggedTensor) -> None:
        self._group = group
        rows, self._offsets = group.lookups(sparse)
        self._rows, self._positions = torch.unique(rows, return_inverse=True)
        self._by_owner = by_part(group.placement, self._rows)

    def asked(self, owner: int) -> RowsAsked:
        """What `owner` is told."""
        return RowsAsked.fetch(self._rows[self._by_owner[owner]], self._group.space.dim)

    def pooled(self, parts: Sequence[RowsAnswered], owners: Sequence[int], device: torch.device) -> Tensor:
        """Sums per bag, [B, F * D], from the owners' answers."""
        order = torch.cat([self._by_owner[owner] for owner in owners])
        stored = torch.cat([part.stored for part in parts])
        value = torch.cat([part.value for part in parts])
        rows = self._group.copies.whole(self._rows[order], stored, value)[torch.argsort(order)].to(device)
        return sums_per_bag(rows, self._positions, self._offsets, len(self._group.features))
