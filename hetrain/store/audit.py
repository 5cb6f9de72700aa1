"""Audit rounds: how many updates of others a read really misses, which clocks alone do not tell.

After `Cache.admit` each worker reports, per owner, the rows it is about to read with their clocks and the updates
their copies include, and all rows it holds updates back for. The owner then knows every update there
is: those it has applied and those pending at workers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hetrain.store.cache import Cache
from hetrain.store.messages import Message
from hetrain.store.owner import Owner
from hetrain.store.read import ReadPlan
from hetrain.store.space import Placement


@dataclass
class AuditReport(Message):
    """One worker to one owner. All int64; rows are global and distinct."""

    read_rows: Tensor  # [U]
    read_clock: Tensor  # [U] c_c of the copies as they are read
    included: Tensor  # [U] updates in the copy: applied at its last fetch, and its own since
    pending_rows: Tensor  # [P] rows whose updates are held back, staged ones included
    pending_updates: Tensor  # [P]

    CHANNELS = ("audit",) * 5


def audit_report(cache: Cache, plan: ReadPlan) -> AuditReport:
    """What `cache` reads and holds back between `admit` and `commit` of `plan`; needs Cache(audit=True)."""
    pending = cache.pending_counts()
    clock = torch.from_numpy(cache.copies.current[plan.touched])
    return AuditReport(plan.rows, clock, torch.from_numpy(cache.included_updates(plan.touched)), *pending)


def split_report(report: AuditReport, placement: Placement) -> list[AuditReport]:
    """`report` by owner."""
    readers, holders = placement.owner_of(report.read_rows), placement.owner_of(report.pending_rows)
    return [
        AuditReport(
            report.read_rows[readers == rank],
            report.read_clock[readers == rank],
            report.included[readers == rank],
            report.pending_rows[holders == rank],
            report.pending_updates[holders == rank],
        )
        for rank in range(placement.world_size)
    ]


def missed_updates(owner: Owner, reports: Sequence[AuditReport]) -> int:
    """The most updates any read of `reports` (all workers' to this owner) misses: applied or pending, not included.

    The owner's `observed_staleness_max` takes in how far its clocks were ahead of the copies read.
    """
    device = owner.applied.device
    total = owner.applied.clone()
    for report in reports:
        total.index_add_(0, owner.local_of(report.pending_rows.to(device)), report.pending_updates.to(device))
    most = 0
    for report in reports:
        if report.read_rows.numel():
            rows = owner.local_of(report.read_rows.to(device))
            most = max(most, int((total.index_select(0, rows) - report.included.to(device)).max()))
            ahead = owner.clocks_before(rows) - report.read_clock.to(device)
            owner.observed_staleness_max = max(owner.observed_staleness_max, int(ahead.max()))
    return most
