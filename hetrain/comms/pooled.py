"""The exchange of pooled embeddings between TorchRec's ranks, in place of TorchRec's own where a codec is used.

TorchRec's quantised exchanges silently send float16 for other types on a CPU, or die there. Here bytes of our own
making travel both ways: a rank encodes its rows per destination and decodes what it gets; partial sums are added as
float32, in rank order. What a rank keeps for itself goes through the codec as well, so that the model computes the same
function of an example on whichever rank it is read.
"""

import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torchrec.distributed.types import Awaitable, NoWait

from hetrain.comms.columns import Columns
from hetrain.comms.pooled_codec import PooledCodec, exact_codec
from hetrain.telemetry import Traffic


class PooledExchange:
    """Exchanges of one engine, counted on `pooled_fwd` and `pooled_bwd`. Collective, as TorchRec's are."""

    def __init__(self, codec: PooledCodec, traffic: Traffic) -> None:
        self._codec, self._exact, self._seen = codec, exact_codec(), exact_codec(codec.sparsity)
        self._traffic = traffic
        self._waited_s, self._clipped = 0.0, 0
        self.exact = False  # while set, everything travels as float32, and so do the gradients that belong to it
        self.looking = False  # while set, what is sent in training travels as float32

    def take_wait_s(self) -> float:
        """Seconds waited for other ranks since the last call."""
        waited, self._waited_s = self._waited_s, 0.0
        return waited

    def all_to_all(self, pooled: Tensor, columns: Sequence[Columns], group: dist.ProcessGroup) -> Awaitable[Tensor]:
        """[W * B, width], B rows for every rank, to [B, sum of widths]: `columns[r]` of every rank side by side."""
        return self._started(_Passage(self, group, list(columns), summed=False), pooled)

    def reduce_scatter(self, pooled: Tensor, columns: Columns, group: dist.ProcessGroup) -> Awaitable[Tensor]:
        """Partial sums [W * B, width], B rows for every rank, to their sums [B, width]."""
        everywhere = [columns] * dist.get_world_size(group)
        return self._started(_Passage(self, group, everywhere, summed=True), pooled)

    def thinned(self, pooled: Tensor, columns: Columns) -> Tensor:
        """[B, width] that stays on this rank, with zeros for what would not be sent of it.

        So the model computes one function of an example, however tables are cut and however many ranks there are.
        """
        kept = self.codec().kept
        return pooled if kept is None else pooled * kept.mask(pooled, columns)

    def _started(self, passage: "_Passage", pooled: Tensor) -> Awaitable[Tensor]:
        if passage.ranks == 1:
            return NoWait(pooled)
        return _Underway(passage, _Send.apply(pooled, passage))

    def codec(self) -> PooledCodec:
        """Of an exchange that starts now, forward and back."""
        if self.exact:
            return self._exact
        return self._seen if self.looking else self._codec

    def scatter(
        self, channel: str, data: Tensor, given: Sequence[int], taken: Sequence[int], group: dist.ProcessGroup
    ) -> "_Message":
        """Start an all-to-all of uint8 [n]: `given[r]` bytes go to rank r, `taken[r]` come from it."""
        self._count(channel, len(data) - given[dist.get_rank(group)])
        into = data.new_empty(sum(taken))
        work = dist.all_to_all_single(into, data, list(taken), list(given), group, async_op=True)
        return _Message(work, data, into)

    def gather(self, channel: str, data: Tensor, group: dist.ProcessGroup) -> "_Message":
        """Start an all-gather of uint8 [n], equally long on all ranks."""
        world_size = dist.get_world_size(group)
        self._count(channel, len(data) * (world_size - 1))
        into = data.new_empty(len(data) * world_size)
        return _Message(dist.all_gather_into_tensor(into, data, group, async_op=True), data, into)

    def _count(self, channel: str, nbytes: int) -> None:
        self._traffic.add(channel, nbytes)
        before, self._clipped = self._clipped, self._codec.clipped
        if self._clipped > before:
            self._traffic.clip(self._clipped - before)

    def wait(self, message: "_Message") -> Tensor:
        """What the other ranks sent, and this one for itself, in rank order."""
        start = time.perf_counter()
        message.work.wait()
        self._waited_s += time.perf_counter() - start
        return message.into


class _Message:
    """Bytes in flight. `data` must live until they are there."""

    def __init__(self, work: Any, data: Tensor, into: Tensor) -> None:
        self.work, self.data, self.into = work, data, into


class _Passage:
    """One exchange: rows forward, then their gradients back the same way. B rows of this rank go to every rank."""

    def __init__(
        self, exchange: PooledExchange, group: dist.ProcessGroup, columns: list[Columns], *, summed: bool
    ) -> None:
        self._exchange, self._group, self._columns, self._summed = exchange, group, columns, summed
        self._codec = exchange.codec()
        self.ranks, self._mine = dist.get_world_size(group), columns[dist.get_rank(group)]
        self._batch = 0
        self._kept: Tensor | None = None  # positions sent of this rank's rows; None: all
        self._kept_of: list[Tensor | None] = []  # of the rows it got, by the rank that sent them
        self._message: _Message | None = None

    def send(self, rows: Tensor) -> None:
        """Start sending [W * B, width]."""
        self._batch = len(rows) // self.ranks
        data, self._kept = self._codec.encode(rows, self._mine)
        given = [self._batch * data.shape[1]] * self.ranks
        taken = [self._batch * self._codec.row_bytes(columns) for columns in self._columns]
        self._message = self._exchange.scatter("pooled_fwd", data.view(-1), given, taken, self._group)

    def receive(self) -> Tensor:
        """What came: [B, width] summed, or [B, sum of widths]."""
        each = [self._codec.row_bytes(columns) for columns in self._columns]
        parts = self._waited().split([self._batch * nbytes for nbytes in each])
        rows = [part.view(self._batch, nbytes) for part, nbytes in zip(parts, each, strict=True)]
        decoded = [self._codec.decode(part, held) for part, held in zip(rows, self._columns, strict=True)]
        self._kept_of = [kept for _, kept in decoded]
        values = [value for value, _ in decoded]
        return torch.stack(values).sum(0) if self._summed else torch.cat(values, 1)

    def send_gradient(self, gradient: Tensor) -> None:
        """Start sending the gradient of what `receive` gave."""
        if self._summed and self._codec.sparsity is None:  # the same for all ranks
            data = self._codec.encode_gradient(gradient, None)
            self._message = self._exchange.gather("pooled_bwd", data.view(-1), self._group)
            return
        widths = [columns.width for columns in self._columns]
        parts = [gradient] * self.ranks if self._summed else gradient.split(widths, 1)
        encoded = [self._codec.encode_gradient(part, kept) for part, kept in zip(parts, self._kept_of, strict=True)]
        data = torch.cat([part.view(-1) for part in encoded])
        taken = [self._batch * self._codec.gradient_bytes(self._mine)] * self.ranks
        given = [part.numel() for part in encoded]
        self._message = self._exchange.scatter("pooled_bwd", data, given, taken, self._group)

    def receive_gradient(self) -> Tensor:
        """The gradient [W * B, width] of what `send` was given."""
        data = self._waited().view(self.ranks * self._batch, self._codec.gradient_bytes(self._mine))
        return self._codec.decode_gradient(data, self._mine, self._kept)

    def _waited(self) -> Tensor:
        assert self._message is not None
        message, self._message = self._message, None
        return self._exchange.wait(message)


class _Underway(Awaitable[Tensor]):
    """Rows on their way."""

    def __init__(self, passage: _Passage, token: Tensor) -> None:
        super().__init__()
        self._passage, self._token = passage, token

    def _wait_impl(self) -> Tensor:
        received: Tensor = _Receive.apply(self._token, self._passage)
        return received


class _Send(Function):
    """Starts a passage forward and ends it backward, so that what lies between runs beside it. Gives a token."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, passage: _Passage) -> Tensor:
        ctx.passage = passage
        passage.send(rows)
        return rows.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.passage.receive_gradient(), None


class _Receive(Function):
    """Ends a passage forward and starts it backward."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, passage: _Passage) -> Tensor:
        ctx.passage = passage
        return passage.receive()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.passage.send_gradient(gradient.contiguous())
        return gradient.new_zeros(()), None
