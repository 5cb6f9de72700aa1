"""Counts what TorchRec sends, and how long this rank waits for it.

TorchRec calls torch.distributed through the names `dist` of two of its modules. Those names are
replaced by a stand-in that hands everything on, adds bytes to a channel and times every wait. Bytes a
rank keeps for itself are not counted.
"""

import contextlib
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed import comm_ops, dist_data

from hetrain.telemetry import Traffic


class Counter:
    """Where one engine's exchanges are counted. `pooled` is the channel of floats: forward or backward."""

    def __init__(self, traffic: Traffic) -> None:
        self.traffic = traffic
        self.pooled = "pooled_fwd"
        self.wait_s = 0.0

    def add(self, tensor: Tensor, elements: int) -> None:
        """Count `elements` of `tensor`, ids and lengths by their integer dtype."""
        channel = self.pooled if tensor.dtype.is_floating_point else "ids"
        self.traffic.add(channel, elements * tensor.element_size())


class _TimedWork(dist.Work):
    """A collective in flight whose wait is timed."""

    def __init__(self, work: dist.Work, counter: Counter) -> None:
        super().__init__()
        self._work: dist.Work | None = work
        self._counter = counter

    def wait(self, timeout: timedelta | None = None) -> bool:
        # TorchRec waits twice here and there, which hangs on some of gloo's works
        if self._work is not None:
            start = time.perf_counter()
            self._work.wait() if timeout is None else self._work.wait(timeout)
            self._counter.wait_s += time.perf_counter() - start
            self._work = None
            self._finish()
        return True

    def _finish(self) -> None:
        pass


class _SummedWork(_TimedWork):
    """A reduce-scatter as an all-to-all whose parts are summed in rank order when they are there."""

    def __init__(self, work: dist.Work, counter: Counter, parts: Tensor, output: Tensor) -> None:
        super().__init__(work, counter)
        self._parts, self._output = parts, output

    def _finish(self) -> None:
        torch.sum(self._parts, dim=0, out=self._output)
        del self._parts


class _Stand:
    """Stands where TorchRec looks for torch.distributed."""

    def __init__(self) -> None:
        self.counter: Counter | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> dist.Work | None:
        work: dist.Work | None = dist.all_to_all_single(
            output, input, output_split_sizes, input_split_sizes, group, async_op
        )
        if self.counter is None:
            return work
        world_size, rank = dist.get_world_size(group), dist.get_rank(group)
        rows = input.shape[0] // world_size if input_split_sizes is None else input_split_sizes[rank]
        kept = rows * input[:1].numel() if input.shape[0] else 0
        self.counter.add(input, input.numel() - kept)
        return work if work is None else _TimedWork(work, self.counter)

    def reduce_scatter_tensor(
        self,
        output: Tensor,
        input: Tensor,
        op: Any = dist.ReduceOp.SUM,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> dist.Work | None:
        if self.counter is None or dist.get_backend(group) != "gloo" or op != dist.ReduceOp.SUM or not async_op:
            work: dist.Work | None = dist.reduce_scatter_tensor(output, input, op, group, async_op)
            if self.counter is None:
                return work
            self.counter.add(input, input.numel() - output.numel())
            return work if work is None else _TimedWork(work, self.counter)
        # gloo has no reduce-scatter: its own all-reduces the whole input, twice the bytes
        parts = torch.empty_like(input)
        work = dist.all_to_all_single(parts, input.contiguous(), group=group, async_op=True)
        assert work is not None
        self.counter.add(input, input.numel() - output.numel())
        return _SummedWork(work, self.counter, parts.view(dist.get_world_size(group), *output.shape), output)

    def all_gather_into_tensor(
        self, output: Tensor, input: Tensor, group: dist.ProcessGroup | None = None, async_op: bool = False
    ) -> dist.Work | None:
        work: dist.Work | None = dist.all_gather_into_tensor(output, input, group, async_op)
        if self.counter is None:
            return work
        self.counter.add(input, input.numel() * (dist.get_world_size(group) - 1))
        return work if work is None else _TimedWork(work, self.counter)


_STAND = _Stand()


@contextlib.contextmanager
def counting(counter: Counter) -> Iterator[None]:
    """Count what TorchRec sends inside of this context; works started here may be waited for later."""
    before = _STAND.counter, dist_data.dist, comm_ops.dist
    _STAND.counter, dist_data.dist, comm_ops.dist = counter, _STAND, _STAND
    try:
        yield
    finally:
        _STAND.counter, dist_data.dist, comm_ops.dist = before
