"""The ranks of a run as the trainer, checkpoints and the summary see them: who am I, and do all agree."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from hetrain.errors import HetrainError
from hetrain.roles import Roles

GPU_BACKEND = "cpu:gloo,cuda:nccl"  # of a process group whose ranks have GPUs


@dataclass(frozen=True)
class Ranks:
    """All ranks of a run. `group` has a backend for CPU tensors; may be None at one rank."""

    rank: int = 0
    world_size: int = 1
    group: dist.ProcessGroup | None = None
    servers: int = 0  # the last ranks, which own all rows and compute nothing

    @property
    def roles(self) -> Roles:
        """Who computes and who owns rows."""
        return Roles(self.world_size, self.servers)

    @property
    def computes(self) -> bool:
        """Whether this rank reads data and trains; a server does not."""
        return self.roles.computes(self.rank)

    @property
    def first(self) -> bool:
        """Whether this is the rank that writes what is written once."""
        return self.rank == 0

    @property
    def alone(self) -> bool:
        """Whether there is no other rank to ask."""
        return self.world_size == 1

    def gather(self, value: Any) -> list[Any]:
        """Every rank's picklable value, in rank order, on every rank."""
        if self.alone:
            return [value]
        out: list[Any] = [None] * self.world_size
        dist.all_gather_object(out, value, group=self.group)
        return out

    def add_up(self, sums: Tensor) -> Tensor:
        """Sums over ranks of `sums` [n], on the CPU, which they replace. Collective."""
        if not self.alone:
            dist.all_reduce(sums, group=self.group)
        return sums

    def together(
        self,
        work: Callable[[], None],
        failures: tuple[type[Exception], ...] = (HetrainError,),
        error: Callable[[str], HetrainError] | None = None,
    ) -> None:
        """Do local work on every rank; when one of `failures` meets any rank, all ranks raise. Collective.

        They raise `error(what happened where)`, or the failure itself where `error` is None. Without this a rank that
        failed alone would leave the others waiting for it.
        """
        mine: Exception | None = None
        try:
            work()
        except failures as e:
            mine = e
        told: Exception | str | None = mine
        if mine is not None and error is not None:
            told = f"{self.roles.name(self.rank)}: {type(mine).__name__}: {mine}"
        first = next((t for t in self.gather(told) if t is not None), None)
        if isinstance(first, Exception):
            raise first from mine
        if first is not None and error is not None:
            raise error(first) from mine
