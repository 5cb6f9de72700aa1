"""Dense gradients: DistributedDataParallel with a hook that sums them and counts what it costs.

Backward only starts the sums; whoever trains calls `DenseReducer.wait` before the gradients are used, and has that
long to do other work.
"""

import time
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

from hetrain.comms.dense_exchange import DenseComms, Exchange, exchange
from hetrain.comms.thresholds import Compressor, Parts
from hetrain.errors import ConfigError, lost_peer
from hetrain.telemetry import Traffic


class DenseReducer:
    """A communication hook of DDP: gradients are summed, bytes counted, waiting measured. `wait` after every backward.

    Gradients are summed, never averaged, since each rank's loss is already divided by the number of
    examples of all ranks. With `none` an all-reduce per bucket, counted as what a ring sends from each rank:
    2 (W - 1) / W of the buffer. Else one exchange (comms/dense_exchange.py) of all, begun with the last bucket.
    """

    def __init__(
        self,
        traffic: Traffic,
        group: dist.ProcessGroup | None = None,
        comms: DenseComms | None = None,
        number: int = 0,
    ) -> None:
        """`number`: this reducer's among those of a rank with the same group."""
        self._traffic = traffic
        self._group = group
        self._comms, self._number = comms or DenseComms(), number
        self._world_size = dist.get_world_size(group) if dist.is_initialized() else 1
        self._first = self._world_size == 1 or dist.get_rank(group) == 0
        self._in_flight: list[dist.Work] = []
        self._waited_s = 0.0
        self._parameters: dict[str, Parameter] = {}
        self._carried: dict[Tensor, Tensor] = {}  # by parameter: gradients to add to the next ones of this rank
        self._compressor: Compressor | None = None
        self._exchange: Exchange | None = None
        self._gradients: dict[Tensor, Tensor] = {}  # by parameter: of the backward that runs, or is being summed
        self._started = False  # the exchange
        self._failed: RuntimeError | None = None  # what starting it met with; autograd would make a traceback of it

    @property
    def world_size(self) -> int:
        """Ranks the gradients are summed over."""
        return self._world_size

    @property
    def group(self) -> dist.ProcessGroup | None:
        """Of these ranks."""
        return self._group

    def serve(self, parameters: dict[str, Parameter]) -> None:
        """Sum gradients of `parameters`, which need them. Once, before the first backward.

        Raises ConfigError for parameters that are not float32 where they would be sent as something else.
        """
        self._parameters = parameters
        if self._world_size == 1 or self._comms.name == "none":
            return
        for name, parameter in parameters.items():
            if parameter.dtype != torch.float32:
                raise ConfigError(
                    f"comms.dense={self._comms.name}: parameter {name!r} is {parameter.dtype}, expected torch.float32. "
                    "Make it float32, or set comms.dense=none."
                )
        sizes = [parameter.numel() for parameter in parameters.values()]
        if self._comms.name == "dct":
            whole = [size < self._comms.dct.smallest for size in sizes]
            self._compressor = Compressor(Parts(sizes, whole), self._comms.dct)
        device = next(iter(parameters.values())).device
        self._exchange = exchange(self._comms, self._compressor, device, self._traffic, self._group, self._number)

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
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            self._add_carried(parameter, gradient)
            self._gradients[parameter] = gradient
        if self._exchange is not None:
            if bucket.is_last():
                self._start(self._exchange)
        else:
            self._all_reduce(buffer)
        # Gradients are views of the buffer (gradient_as_bucket_view): the sum arrives in them, and DDP need not wait.
        started: torch.futures.Future[Tensor] = torch.futures.Future()
        started.set_result(buffer)
        return started

    def _start(self, exchange: Exchange) -> None:
        self._started = True
        try:
            exchange.start(torch.cat([self._gradients[p].reshape(-1) for p in self._parameters.values()]))
        except RuntimeError as error:
            self._failed = error

    def _all_reduce(self, buffer: Tensor) -> None:
        nbytes = buffer.numel() * buffer.element_size()
        self._traffic.add("dense", 2 * nbytes * (self._world_size - 1) // self._world_size)
        work = dist.all_reduce(buffer, group=self._group, async_op=True)
        assert work is not None
        self._in_flight.append(work)

    def wait(self) -> None:
        """Wait until the gradients of the last backward are summed.

        Raises TrainingError when another rank does not answer.
        """
        if self._world_size == 1:
            for parameter in list(self._carried):
                assert parameter.grad is not None
                self._add_carried(parameter, parameter.grad)
            return
        start = time.perf_counter()
        in_flight, self._in_flight = self._in_flight, []
        try:
            for work in in_flight:
                work.wait()
            if self._started:
                self._finish()
        except RuntimeError as error:
            raise lost_peer(
                f"another rank stopped answering while dense gradients were summed ({error}). The first error in the "
                "other ranks' output is the cause; raise launch.timeout_s if a rank is only slow.",
                error,
            ) from error
        self._gradients = {}
        self._waited_s += time.perf_counter() - start

    def _finish(self) -> None:
        """Put the sums where DDP left this rank's gradients."""
        assert self._exchange is not None
        self._started = False
        if self._failed is not None:
            raise self._failed
        parts = self._exchange.finish().split([parameter.numel() for parameter in self._parameters.values()])
        for parameter, part in zip(self._parameters.values(), parts, strict=True):
            self._gradients[parameter].copy_(part.view(parameter.shape))

    def _add_carried(self, parameter: Tensor, gradient: Tensor) -> None:
        if self._carried and parameter in self._carried:
            gradient.add_(self._carried.pop(parameter).to(gradient.device))

    # -- checkpoints ------------------------------------------------------------------------------

    def pending(self) -> dict[str, Tensor]:
        """Gradients that were not sent yet, summed over ranks, by parameter; {} where none wait. Collective.

        Without thresholds those that `restore` took up and no backward met since: on the first rank alone.
        """
        if self._compressor is None:
            return {name: self._carried[p] for name, p in self._parameters.items() if p in self._carried}
        device = next(iter(self._parameters.values())).device
        waiting = self._compressor.waiting.to(device, copy=True)
        dist.all_reduce(waiting, group=self._group)
        sizes = [parameter.numel() for parameter in self._parameters.values()]
        parts = zip(self._parameters.items(), waiting.split(sizes), strict=True)
        return {name: part.view(parameter.shape).cpu() for (name, parameter), part in parts}

    def state_dict(self) -> dict[str, Any]:
        """What waits on this rank, and its thresholds; {} where nothing ever waits."""
        return {} if self._compressor is None else self._compressor.state_dict()

    def restore(self, step: int, pending: dict[str, Tensor], state: dict[str, Any] | None) -> None:
        """Take up `state` of this rank or, without one that fits, `pending` of all ranks: the first rank sends it.

        `step`: steps taken before. Whatever `comms` says now, the gradients are those that waited in the checkpoint.
        """
        self._carried = {}
        if self._compressor is not None:
            self._compressor.restart(step)
            if state:
                self._compressor.load_state_dict(state)
            elif self._first and pending:
                self._compressor.hold(torch.cat([pending[name].reshape(-1) for name in self._parameters]))
        elif self._first:
            self._carried = {self._parameters[name]: gradient for name, gradient in pending.items()}

    def report(self) -> dict[str, int] | None:
        """Values sent and values there were, by this rank; None where all are sent."""
        found = self._compressor
        return None if found is None else {"values_sent": found.sent, "values": found.seen}


def wrap_dense(module: nn.Module, reducer: DenseReducer, ignore: Iterable[str] = ()) -> nn.Module:
    """`module` with its dense gradients summed over all ranks; with one rank, `module` itself.

    Every parameter must take part in every backward, on a rank whose batch is empty too: a forward
    on B = 0 examples does. Weights are made equal to rank 0's here, once; buffers are left alone.

    Args:
        module: a network whose parameters are dense.
        reducer: counts and measures; serves this module alone.
        ignore: names of parameters and buffers that are not dense (trained elsewhere).
    """
    ignored = set(ignore)
    reducer.serve({n: p for n, p in module.named_parameters() if p.requires_grad and n not in ignored})
    if reducer.world_size == 1:
        return module
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, list(ignored))
    wrapped = DistributedDataParallel(
        module, process_group=reducer.group, forward_sync_buffers=False, gradient_as_bucket_view=True
    )
    sent = [p for n, p in [*module.named_parameters(), *module.named_buffers()] if n not in ignored]
    reducer.count_broadcast(sum(p.numel() * p.element_size() for p in sent))
    reducer.attach(wrapped)
    return wrapped
