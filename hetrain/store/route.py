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
    fetch_order: list[Tensor]  # per owner, positions of its fetches in the whole request
    check_order: list[Tensor]

    def merge(self, replies: Sequence[Reply]) -> Reply:
        """The reply to the whole request: rows in the order asked, invalid positions ascending; integers on the CPU."""
        parts = {f.name: [getattr(reply, f.name) for reply in replies] for f in fields(Reply)}
        whole = {
            name: torch.cat([t if t.is_floating_point() else t.cpu() for t in part]) for name, part in parts.items()
        }
        fetched, stored = torch.cat(self.fetch_order), whole["stored"]
        invalid = torch.cat([order[r.invalid.cpu()] for order, r in zip(self.check_order, replies, strict=True)])
        whole["stored"], whole["invalid"] = torch.empty_like(stored).index_copy_(0, fetched, stored), invalid
        for names, positions in ((FETCHED, fetched[stored]), (INVALID, invalid)):
            order = torch.argsort(positions)
            for name in names:
                if len(whole[name]):  # clocks and counts may not travel
                    whole[name] = whole[name].index_select(0, order.to(whole[name].device))
        return Reply(**whole)


def split(request: Request, placement: Placement) -> Routed:
    """Cut `request` by owner. Rows ascend within each part: so their numbers travel in few bytes."""
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
        for owner in range(placement.world_size)
    ]
    return Routed(requests, fetch, check)


def _part(counters: Tensor, at: Tensor) -> Tensor:
    """`counters` [M] at `at`; [0] where they do not travel."""
    return counters[at] if counters.numel() else counters


def _by_owner(placement: Placement, rows: Tensor) -> list[Tensor]:
    """Positions of `rows` [n] per owner, in the order of ascending rows."""
    order = torch.argsort(rows)
    if placement.world_size == 1:
        return [order]
    owner = placement.owner_of(rows[order])
    return [order[owner == rank] for rank in range(placement.world_size)]
