"""Rounds: one lockstep exchange of all ranks, requests to every owner and replies back."""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from hetrain.store.audit import AuditReport
from hetrain.store.messages import Message, Reply, Request
from hetrain.telemetry import Traffic
from hetrain.transport.leg import Leg, ShortLeg, SizedLeg
from hetrain.transport.wire import BITS, Codec, Layout

REQUEST_TAG, REPLY_TAG = 100, 102  # each leg uses its tag and the next one


class Server(Protocol):
    """The part of an owner that a round needs."""

    def serve(self, requests: Sequence[Request]) -> list[Reply]:
        """Answer the requests of all ranks, given in rank order."""
        ...


class CollectiveTransport:
    """Carries requests to the owners of all ranks and their replies back, one owner per width group.

    Every rank calls `exchange` equally often. What a rank asks of itself never becomes bytes.
    """

    def __init__(
        self,
        owners: Sequence[Server],
        widths: Sequence[tuple[int, int]],
        traffic: Traffic,
        *,
        timeout_s: float,
        group: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
    ) -> None:
        """`widths`: columns of a row and of the optimizer state that travels with it, per owner.

        `group`: None without other ranks or for all of them. `device`: where NCCL sends from.
        """
        self._owners = list(owners)
        self.world_size = dist.get_world_size(group) if dist.is_initialized() else 1
        self.rank = dist.get_rank(group) if dist.is_initialized() else 0
        self._requests = Codec([_layout(Request.CHANNELS, REQUEST_WIDTHS, *w) for w in widths], traffic)
        self._replies = Codec([_layout(Reply.CHANNELS, REPLY_WIDTHS, *w) for w in widths], traffic)
        reports = Layout(AuditReport.CHANNELS, (None,) * len(AuditReport.CHANNELS))
        self._reports = Codec([reports] * len(self._owners), traffic, overhead="audit")
        self._legs: tuple[Leg, ...] = ()
        if self.world_size > 1 and dist.get_backend(group) == "gloo":
            codecs = ((self._requests, REQUEST_TAG), (self._replies, REPLY_TAG))
            self._legs = tuple(ShortLeg(codec.length, tag, timeout_s, group) for codec, tag in codecs)
        elif self.world_size > 1:
            self._legs = tuple(SizedLeg(device or torch.device("cpu"), timeout_s, group) for _ in range(2))

    @property
    def waited_s(self) -> float:
        """Seconds this rank waited for others since the start."""
        return sum(leg.waited_s for leg in self._legs)

    def exchange(self, requests: Sequence[Sequence[Request]]) -> list[list[Reply]]:
        """One round.

        Args:
            requests: by peer rank, this one included, then by width group.

        Returns:
            The replies in the same shape. Their floats may lie in a buffer that the next exchange reuses.

        Raises TrainingError naming the rank that did not answer in time.
        """
        if self.world_size == 1:
            return [[owner.serve([request])[0] for owner, request in zip(self._owners, requests[0], strict=True)]]
        asking, answering = self._legs
        asking.post()
        answering.post()
        asking.send([self._packed(self._requests, p, messages) for p, messages in enumerate(requests)])
        asked = [
            requests[self.rank] if buffer is None else _requests(self._requests, buffer) for buffer in asking.receive()
        ]
        by_owner = [owner.serve([peer[g] for peer in asked]) for g, owner in enumerate(self._owners)]
        answers = [[replies[p] for replies in by_owner] for p in range(self.world_size)]
        answering.send([self._packed(self._replies, p, messages) for p, messages in enumerate(answers)])
        return [
            answers[self.rank] if buffer is None else _replies(self._replies, buffer) for buffer in answering.receive()
        ]

    def drain(self) -> None:
        """Wait until everything sent has left: before the process group goes away."""
        for leg in self._legs:
            leg.drain()

    def collect(self, reports: Sequence[Sequence[AuditReport]]) -> list[list[AuditReport]]:
        """One leg: reports by peer, then width group, to those sent to this rank, in the same shape."""
        if self.world_size == 1:
            return [list(of_peer) for of_peer in reports]
        leg = self._legs[0]
        leg.post()
        leg.send([self._packed(self._reports, p, messages) for p, messages in enumerate(reports)])
        return [
            list(reports[self.rank])
            if buffer is None
            else [AuditReport.from_fields(fields) for fields in self._reports.unpack(buffer)]
            for buffer in leg.receive()
        ]

    def _packed(self, codec: Codec, peer: int, messages: Sequence[Message]) -> torch.Tensor | None:
        return None if peer == self.rank else codec.pack([message.fields() for message in messages])


# float fields are [., D] or [., S]; None: integers [.]; bits: flags [.]
REQUEST_WIDTHS = (None, "D", "S", None, None, None, "bits", None, None)
REPLY_WIDTHS = ("bits", "D", "S", None, None, None, "D", "S", None, None, None, None)


def _layout(channels: tuple[str, ...], widths: tuple[str | None, ...], dim: int, state_width: int) -> Layout:
    sizes = {None: None, "D": dim, "S": state_width, "bits": BITS}
    return Layout(channels, tuple(sizes[w] for w in widths))


def _requests(codec: Codec, buffer: torch.Tensor) -> list[Request]:
    return [Request.from_fields(fields) for fields in codec.unpack(buffer)]


def _replies(codec: Codec, buffer: torch.Tensor) -> list[Reply]:
    return [Reply.from_fields(fields) for fields in codec.unpack(buffer)]
