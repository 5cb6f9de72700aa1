"""Dense gradients: DistributedDataParallel with a hook that sums them and counts what it costs.

Backward only starts the sums; whoever trains calls `DenseReducer.wait` before the gradients are used, and has that
long to do other work.
"""

import time
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from hetrain.errors import lost_peer
from hetrain.telemetry import Traffic


class DenseReducer:
    """A communication hook of DDP: all-reduce with SUM, bytes counted, waiting measured. `wait` after every backward.

    Gradients are summed, never averaged, since each rank's loss is already divided by the number of
    examples of all ranks. Bytes are what a ring sends from each rank: 2 (W - 1) / W of the buffer.
    """

    def __init__(self, traffic: Traffic, group: dist.ProcessGroup | None = None) -> None:
        self._traffic = traffic
        self._group = group
        self._world_size = dist.get_world_size(group) if dist.is_initialized() else 1
        self._in_flight: list[dist.Work] = []
        self._waited_s = 0.0

    @property
    def world_size(self) -> int:
        """Ranks the gradients are summed over."""
        return self._world_size

    def attach(self, module: DistributedDataParallel) -> None:
        """Make `module` reduce its gradients here; once per module."""
        module.register_comm_hook(None, self._reduce)

    def take_wait_s(self) -> float:
        """Seconds that `wait` took since the last call."""
        waited, self._waited_s = self._waited_s, 0.0
        return waited

    def count_broadcast(self, nbytes: int) -> None:
        """Count a broadcast of `nbytes` to all ranks, before training: each rank's mean share of what is sent."""
        with self._traffic.set_aside():
            self._traffic.add("dense", nbytes * (self._world_size - 1) // self._world_size)

    def _reduce(self, _: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        buffer = bucket.buffer()
        nbytes = buffer.numel() * buffer.element_size()
        self._traffic.add("dense", 2 * nbytes * (self._world_size - 1) // self._world_size)
        work = dist.all_reduce(buffer, group=self._group, async_op=True)
        assert work is not None
        self._in_flight.append(work)
        # Gradients are views of the buffer (gradient_as_bucket_view): the sum arrives in them, and DDP need not wait.
        started: torch.futures.Future[Tensor] = torch.futures.Future()
        started.set_result(buffer)
        return started

    def wait(self) -> None:
        """Wait until the gradients of the last backward are summed.

        Raises TrainingError when another rank does not answer.
        """
        start = time.perf_counter()
        in_flight, self._in_flight = self._in_flight, []
        try:
            for work in in_flight:
                work.wait()
        except RuntimeError as error:
            raise lost_peer(
                f"another rank stopped answering while dense gradients were summed ({error}). The first error in the "
                "other ranks' output is the cause; raise launch.timeout_s if a rank is only slow.",
                error,
            ) from error
        self._waited_s += time.perf_counter() - start


def wrap_dense(module: nn.Module, reducer: DenseReducer, ignore: Iterable[str] = ()) -> nn.Module:
    """`module` with its dense gradients summed over all ranks; with one rank, `module` itself.

    Every parameter must take part in every backward, on a rank whose batch is empty too: a forward
    on B = 0 examples does. Weights are made equal to rank 0's here, once; buffers are left alone.

    Args:
        module: a network whose parameters are dense.
        reducer: counts and measures; serves this module alone.
        ignore: names of parameters and buffers that are not dense (trained elsewhere).
    """
    if reducer.world_size == 1:
        return module
    ignored = set(ignore)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, list(ignored))
    wrapped = DistributedDataParallel(
        module, process_group=reducer._group, forward_sync_buffers=False, gradient_as_bucket_view=True
    )
    sent = [p for n, p in [*module.named_parameters(), *module.named_buffers()] if n not in ignored]
    reducer.count_broadcast(sum(p.numel() * p.element_size() for p in sent))
    reducer.attach(wrapped)
    return wrapped
