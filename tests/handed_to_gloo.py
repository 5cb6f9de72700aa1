"""What a rank really hands to gloo for rows, to hold what is counted against."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor


@dataclass
class Handed:
    """Bytes, in how many messages, and the ranks they were for."""

    nbytes: int = 0
    messages: int = 0
    peers: set[int] = field(default_factory=set)


@contextmanager
def handed_to_gloo() -> Iterator[Handed]:
    """While open, every isend of this process is counted."""
    handed, isend = Handed(), dist.isend

    def counting(buffer: Tensor, *args: Any, **kwargs: Any) -> Any:
        handed.nbytes += buffer.numel()
        handed.messages += 1
        handed.peers.add(kwargs["group_dst"])
        return isend(buffer, *args, **kwargs)

    with mock.patch.object(dist, "isend", counting):
        yield handed
