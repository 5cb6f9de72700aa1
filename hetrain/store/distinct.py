"""Distinct rows of several parts, each distinct in itself."""

from collections.abc import Sequence

import torch
from torch import Tensor


def distinct_rows(rows: Sequence[Tensor], mark: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Distinct rows [U] of all parts, and for each part the positions of its rows among them; of one part: none.

    Rows are positions in an owner's memory; `mark` [R] int32: scratch. Linear: each part is distinct in itself, so a
    row is new unless an earlier part marked it.
    """
    if len(rows) == 1:
        return rows[0], []
    touched, places, count = [], [], 0
    for part in rows:
        mark.index_fill_(0, part, -1)
    for part in rows:
        new = part[mark.index_select(0, part) < 0]
        mark.index_copy_(0, new, torch.arange(count, count + len(new), dtype=mark.dtype, device=mark.device))
        count += len(new)
        touched.append(new)
        places.append(mark.index_select(0, part).long())
    return torch.cat(touched), places
