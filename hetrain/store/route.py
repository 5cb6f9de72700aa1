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
    """One request cut into one part per block and owner; `merge` undoes the cut on their replies."""

    requests: list[list[Request]]  # by block, then owner rank
    fetch_order: list[Tensor]  # of each part, block after block: positions of its fetches in the whole request
    check_order: list[Tensor]

    def merge(self, replies: Sequence[Sequence[Reply]]) -> Reply:
        """The reply to the whole request: rows in the order asked, invalid positions ascending; integers on the CPU.

        `replies`: by block, then owner rank; not those to an announcement.
        """
        flat = [reply for of_block in replies for reply in of_block]
        parts = {f.name: [getattr(reply, f.name) for reply in flat] for f in fields(Reply)}
        whole = {
            name: torch.cat([t if t.is_floating_point() else t.cpu() for t in part]) for name, part in parts.items()
        }
        stored = whole["stored"]
        invalid = torch.cat([order[r.invalid.cpu()] for order, r in zip(self.check_order, flat, strict=True)])
        whole["invalid"] = invalid
        for names, positions in ((FETCHED, torch.cat(self.fetch_order)[stored]), (INVALID, invalid)):
            order = torch.argsort(positions)
            for name in names:
                if len(whole[name]):  # clocks and counts may not travel
                    whole[name] = whole[name].index_select(0, order.to(whole[name].device))
        whole["stored"] = self.in_order(stored)
        return Reply(**whole)

    def flags(self, replies: Sequence[Reply], before: "Routed | None") -> tuple[Tensor, Tensor]:
        """Of the replies to an announcement, by owner: `late` in the order of its rows, and `hot` in that of `before`.

        `before`: the announcement before this one; None: there was none, and none of its rows are hot.
        """
        late, hot = (torch.cat([getattr(reply, name).cpu() for reply in replies]) for name in ("late", "hot"))
        return self.in_order(late), hot if before is None else before.in_order(hot)

    def in_order(self, flags: Tensor) -> Tensor:
        """`flags` [N] of the rows fetched, part after part, in the order they were asked for."""
        return torch.empty_like(flags).index_copy_(0, torch.cat(self.fetch_order), flags)


def split(request: Request, placement: Placement, blocks: int = 1) -> Routed:
    """Cut `request` by block (row number modulo `blocks`) and owner.

    Rows ascend within each part: so their numbers travel in few bytes.
    """
    push, fetch, check = (
        by_part(placement, rows, blocks) for rows in (request.push_rows, request.fetch_rows, request.check_rows)
    )
    parts = []
    for pushed, fetched, checked in zip(push, fetch, check, strict=True):
        part = request.pushes(pushed)
        part.fetch_rows, part.fetch_again = request.fetch_rows[fetched], request.fetch_again[fetched]
        part.check_rows, part.check_clock = request.check_rows[checked], request.check_clock[checked]
        parts.append(part)
    owners = placement.world_size
    return Routed([parts[first : first + owners] for first in range(0, len(parts), owners)], fetch, check)


def by_part(placement: Placement, rows: Tensor, blocks: int = 1) -> list[Tensor]:
    """Positions of `rows` [n] per block and owner, in the order of ascending rows."""
    order = torch.argsort(rows)
    owners = placement.world_size
    if owners == blocks == 1:
        return [order]
    ascending = rows[order]
    part = placement.owner_of(ascending)
    if blocks > 1:
        part = part + owners * (ascending % blocks)
    return [order[part == number] for number in range(blocks * owners)]
