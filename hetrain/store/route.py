"""Splits one request over the owners of its rows and puts their replies back into one."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from hetrain.store.messages import Reply, Request
from hetrain.store.space import Placement

FETCHED = ("value", "state", "clock", "applied")
INVALID = ("invalid", "invalid_value", "invalid_state", "invalid_clock", "invalid_applied")


@dataclass
class Routed:
    """One request cut into one part per owner; `merge` undoes the cut on their replies."""

    requests: list[Request]  # by owner rank
    fetch_order: list[Tensor] | None  # per owner, positions of its fetches in the whole request; None: one owner
    check_order: list[Tensor] | None

    def merge(self, replies: Sequence[Reply]) -> Reply:
        """The reply to the whole request: rows in the order asked, invalid positions ascending."""
        if self.fetch_order is None or self.check_order is None:
            return replies[0]
        fetched, stored = torch.cat(self.fetch_order), torch.cat([r.stored.cpu() for r in replies])
        invalid = torch.cat([order[r.invalid.cpu()] for order, r in zip(self.check_order, replies, strict=True)])
        parts = {f.name: torch.cat([getattr(r, f.name) for r in replies]) for f in fields(Reply)}
        parts["stored"] = stored[torch.argsort(fetched)]
        parts["invalid"] = invalid
        by_fetch, by_check = torch.argsort(fetched[stored]), torch.argsort(invalid)
        for names, order in ((FETCHED, by_fetch), (INVALID, by_check)):
            for name in names:
                if len(parts[name]):  # clocks and counts may not travel
                    parts[name] = parts[name].index_select(0, order.to(parts[name].device))
        return Reply(**parts)


def split(request: Request, placement: Placement) -> Routed:
    """Cut `request` by owner, keeping the order of rows within each part."""
    world_size = placement.world_size
    if world_size == 1:
        return Routed([request], None, None)
    push, fetch, check = (
        _by_owner(placement, rows) for rows in (request.push_rows, request.fetch_rows, request.check_rows)
    )
    requests = [
        Request(
            request.push_rows[push[owner]],
            request.push_value.index_select(0, push[owner].to(request.push_value.device)),
            request.push_state.index_select(0, push[owner].to(request.push_state.device)),
            _part(request.push_clock, push[owner]),
            _part(request.push_updates, push[owner]),
            request.fetch_rows[fetch[owner]],
            request.fetch_again[fetch[owner]],
            request.check_rows[check[owner]],
            request.check_clock[check[owner]],
        )
        for owner in range(world_size)
    ]
    return Routed(requests, fetch, check)


def _part(counters: Tensor, at: Tensor) -> Tensor:
    """`counters` [M] at `at`; [0] where they do not travel."""
    return counters[at] if counters.numel() else counters


def _by_owner(placement: Placement, rows: Tensor) -> list[Tensor]:
    """Positions of `rows` [n] per owner, ascending within each."""
    owner = placement.owner_of(rows)
    return [torch.nonzero(owner == rank).flatten() for rank in range(placement.world_size)]
