"""Rounds: one lockstep exchange of all ranks, requests of workers to owners and replies back."""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from hetrain.roles import Roles
from hetrain.store.audit import AuditReport
from hetrain.store.messages import Message, Reply, Request
from hetrain.telemetry import Traffic
from hetrain.transport.leg import Leg, ShortLeg, SizedLeg
from hetrain.transport.wire import BITS, Codec, Layout

REQUEST_TAG, REPLY_TAG = 100, 102  # each leg uses its tag and the next one


class Server(Protocol):
    """The part of an owner that a round needs."""

    def serve(self, requests: Sequence[Request]) -> list[Reply]:
        """Answer the requests of all workers, given in rank order."""
        ...


class CollectiveTransport:
    """Carries workers' requests to the owners of rows and their replies back, one owner per width group.

    Every rank calls `exchange` equally often, a server as well. What a rank asks of itself never becomes bytes.
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
        servers: int = 0,
    ) -> None:
        """`widths`: columns of a row and of the optimizer state that travels with it, per owner.

        `group`: None without other ranks or for all of them. `device`: where NCCL sends from.
        `servers`: the group's last ranks, which alone own rows and never ask; such a group has gloo.
        """
        self._owners = list(owners)
        self.world_size = dist.get_world_size(group) if dist.is_initialized() else 1
        self.rank = dist.get_rank(group) if dist.is_initialized() else 0
        self._roles = Roles(self.world_size, servers)
        self._asks, self._owns = self._roles.computes(self.rank), self._roles.owns(self.rank)
        self._requests = Codec([_layout(Request.CHANNELS, REQUEST_WIDTHS, *w) for w in widths], traffic)
        self._replies = Codec([_layout(Reply.CHANNELS, REPLY_WIDTHS, *w) for w in widths], traffic)
        reports = Layout(AuditReport.CHANNELS, (None,) * len(AuditReport.CHANNELS))
        self._reports = Codec([reports] * len(self._owners), traffic, overhead="audit")
        self._group, self._device = group, torch.device("cpu")
        self._legs: tuple[Leg, ...] = ()
        if self.world_size > 1 and dist.get_backend(group) == "gloo":
            self._legs = (
                ShortLeg(self._requests.length, REQUEST_TAG, timeout_s, group, roles=self._roles),
                ShortLeg(self._replies.length, REPLY_TAG, timeout_s, group, roles=self._roles, answers=True),
            )
        elif self.world_size > 1:
            assert not servers, "a server has no GPU to send from"
            self._device = device or self._device
            self._legs = tuple(SizedLeg(self._device, timeout_s, group) for _ in range(2))

    @property
    def concurrent(self) -> bool:
        """Whether there are rounds worth overlapping that may run on one thread while another reduces gradients.

        gloo tells them apart by their tags. Two threads on one NCCL communicator could issue their operations in
        another order on another rank, and wait for each other for ever.
        """
        return bool(self._legs) and all(isinstance(leg, ShortLeg) for leg in self._legs)

    @property
    def waited_s(self) -> float:
        """Seconds this rank waited for others since the start."""
        return sum(leg.waited_s for leg in self._legs)

    def exchange(self, requests: Sequence[Sequence[Request]] = ()) -> list[list[Reply]]:
        """One round.

        Args:
            requests: by peer rank, this one included, then by width group; those to a rank without rows are dropped.
                A server gives none.

        Returns:
            The replies in the same shape, empty ones from ranks without rows; on a server none. Their floats may lie
            in a buffer that the next exchange reuses.

        Raises TrainingError naming the rank that did not answer in time.
        """
        if self.world_size == 1:
            return [[owner.serve([request])[0] for owner, request in zip(self._owners, requests[0], strict=True)]]
        asking, answering = self._legs
        asking.post()
        answering.post()
        asking.send(self._packed(self._requests, requests, self._roles.owners))
        arrived, answers = asking.receive(), []
        workers = range(self._roles.workers)
        if self._owns:
            asked = [requests[p] if (b := arrived[p]) is None else _requests(self._requests, b) for p in workers]
            by_owner = [owner.serve([peer[g] for peer in asked]) for g, owner in enumerate(self._owners)]
            answers = [[replies[p] for replies in by_owner] for p in workers]
        answering.send(self._packed(self._replies, answers, workers))
        arrived = answering.receive()
        return self._complete(answers, arrived) if self._asks else []

    def _complete(self, answers: Sequence[list[Reply]], arrived: Sequence[torch.Tensor | None]) -> list[list[Reply]]:
        """Replies by peer rank: our own, those that arrived, and empty ones for ranks without rows."""
        found = {p: answers[p] if (b := arrived[p]) is None else _replies(self._replies, b) for p in self._roles.owners}
        nothing = [_nothing(reply) for reply in found[self._roles.owners[0]]] if self._roles.servers else []
        return [found.get(p, nothing) for p in range(self.world_size)]

    def agree(self, yes: bool) -> bool:
        """Whether all ranks say yes."""
        if self.world_size == 1:
            return yes
        answer = torch.tensor(int(yes), device=self._device)
        dist.all_reduce(answer, dist.ReduceOp.MIN, group=self._group)
        return bool(answer)

    def drain(self) -> None:
        """Wait until everything sent has left: before the process group goes away."""
        for leg in self._legs:
            leg.drain()

    def collect(self, reports: Sequence[Sequence[AuditReport]] = ()) -> list[list[AuditReport]]:
        """One leg: workers' reports by peer rank, then width group, to those sent to this owner, by worker.

        A server gives none; a rank without rows gets none.
        """
        if self.world_size == 1:
            return [list(of_peer) for of_peer in reports]
        leg = self._legs[0]
        leg.post()
        leg.send(self._packed(self._reports, reports, self._roles.owners))
        arrived = leg.receive()
        return [
            list(reports[p])
            if (b := arrived[p]) is None
            else [AuditReport.from_fields(fields) for fields in self._reports.unpack(b)]
            for p in (range(self._roles.workers) if self._owns else ())
        ]

    def _packed(self, codec: Codec, by_rank: Sequence[Sequence[Message]], hearers: range) -> list[torch.Tensor | None]:
        """By rank, the buffers of what this one tells `hearers`, itself left out; it may have nothing to say at all."""
        told = [p for p in hearers if p != self.rank] if by_rank else []
        return [
            codec.pack([message.fields() for message in by_rank[p]]) if p in told else None
            for p in range(self.world_size)
        ]


def _nothing(reply: Reply) -> Reply:
    """A reply like this one, about no row."""
    return Reply.from_fields([tensor[:0] for _, tensor in reply.fields()])


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
