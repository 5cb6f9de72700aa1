"""Rounds: one lockstep exchange of all ranks, requests of workers to owners and replies back."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist

from hetrain.roles import Roles
from hetrain.store.audit import AuditReport
from hetrain.store.messages import Message, Part, Reply, Request
from hetrain.store.row_codec import RowCodec
from hetrain.telemetry import Traffic
from hetrain.transport.leg import Leg, ShortLeg, SizedLeg
from hetrain.transport.wire import BITS, Codec, Layout, push_width, row_width

FIRST_TAG, TAGS_PER_LEG = 100, 2


class Server(Protocol):
    """The part of an owner that a round needs."""

    def serve(self, requests: Sequence[Request], part: Part = Part.WHOLE, block: int = 0) -> list[Reply]:
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
        blocks: int = 1,
        rows: str = "none",
    ) -> None:
        """`widths`: columns of a row and of the optimizer state that travels with it, per owner.

        `group`: None without other ranks or for all of them. `device`: where NCCL sends from.
        `servers`: the group's last ranks, which alone own rows and never ask; such a group has gloo.
        `blocks`: the most that `start` is given. `rows`: the option that rows and pushes are encoded by.
        """
        self._owners = list(owners)
        self.world_size = dist.get_world_size(group) if dist.is_initialized() else 1
        self.rank = dist.get_rank(group) if dist.is_initialized() else 0
        self._roles = Roles(self.world_size, servers)
        self._asks, self._owns = self._roles.computes(self.rank), self._roles.owns(self.rank)
        codecs = [(RowCodec(rows, dim), state) for dim, state in widths]
        self._requests = Codec([_layout(Request.CHANNELS, REQUEST_WIDTHS, *c) for c in codecs], traffic)
        self._replies = Codec([_layout(Reply.CHANNELS, REPLY_WIDTHS, *c) for c in codecs], traffic)
        reports = Layout(AuditReport.CHANNELS, (None,) * len(AuditReport.CHANNELS))
        self._reports = Codec([reports] * len(self._owners), traffic, overhead="audit")
        self._group, self._device = group, torch.device("cpu")
        self._legs: dict[Part, list[tuple[Leg, Leg]]] = {}  # of each block: requests, replies
        if self.world_size > 1 and dist.get_backend(group) == "gloo":
            tags = itertools.count(FIRST_TAG, 2 * TAGS_PER_LEG)
            self._legs = {part: [self._short_legs(next(tags), timeout_s) for _ in range(blocks)] for part in Part}
        elif self.world_size > 1:
            assert not servers, "a server has no GPU to send from"
            self._device = device or self._device
            asking, answering = (SizedLeg(self._device, timeout_s, group) for _ in range(2))
            self._legs = {Part.WHOLE: [(asking, answering)]}

    def _short_legs(self, tag: int, timeout_s: float) -> tuple[Leg, Leg]:
        asking = ShortLeg(self._requests.length, tag, timeout_s, self._group, roles=self._roles)
        tag += TAGS_PER_LEG
        answering = ShortLeg(self._replies.length, tag, timeout_s, self._group, roles=self._roles, answers=True)
        return asking, answering

    @property
    def concurrent(self) -> bool:
        """Whether there are rounds worth overlapping that may run on one thread while another reduces gradients.

        gloo tells them apart by their tags. Two threads on one NCCL communicator could issue their operations in
        another order on another rank, and wait for each other for ever.
        """
        return Part.LATE in self._legs

    @property
    def waited_s(self) -> float:
        """Seconds this rank waited for others since the start."""
        return sum(leg.waited_s for leg in self._all_legs())

    def exchange(self, requests: Sequence[Sequence[Request]] = (), part: Part = Part.WHOLE) -> list[list[Reply]]:
        """One round, or a part of it, in a single block; see `start`."""
        return self.start([requests], part)()[0]

    def start(
        self, blocks: Sequence[Sequence[Sequence[Request]]], part: Part = Part.WHOLE
    ) -> Callable[[], list[list[list[Reply]]]]:
        """Send the requests of a round, or of a part of it. What is returned serves, and waits for the replies.

        While a block is answered, the requests of the next one are on their way. Parts started one after the other are
        waited for in the same order, each before the same part is started again.

        Args:
            blocks: equally many on every rank. Of each the requests by peer rank, this one included, then by width
                group; those to a rank without rows are dropped. A server gives none.
            part: the owners are told.

        Returns:
            A function that returns the replies in the same shape, empty ones from ranks without rows; on a server
            none. Their floats may lie in a buffer that the next exchange of this part reuses. It raises TrainingError
            naming the rank that did not answer in time.
        """
        if self.world_size == 1:
            return partial(self._serve_alone, blocks, part)
        legs = self._legs[part][: len(blocks)]
        for asking, answering in legs:
            asking.post()
            answering.post()
        for (asking, _), requests in zip(legs, blocks, strict=True):
            asking.send(self._packed(self._requests, requests, self._roles.owners))
        return partial(self._finish, blocks, part)

    def _serve_alone(self, blocks: Sequence[Sequence[Sequence[Request]]], part: Part) -> list[list[list[Reply]]]:
        return [
            [[owner.serve([r], part, b)[0] for owner, r in zip(self._owners, requests[0], strict=True)]]
            for b, requests in enumerate(blocks)
        ]

    def _finish(self, blocks: Sequence[Sequence[Sequence[Request]]], part: Part) -> list[list[list[Reply]]]:
        answers = [self._answer(b, requests, part) for b, requests in enumerate(blocks)]
        arrived = [answering.receive() for _, answering in self._legs[part][: len(blocks)]]
        return [self._complete(ours, theirs) for ours, theirs in zip(answers, arrived, strict=True)]

    def _answer(self, block: int, requests: Sequence[Sequence[Request]], part: Part) -> list[list[Reply]]:
        """Receive all workers' requests of a block and send the replies; returns them by worker."""
        (asking, answering), workers = self._legs[part][block], range(self._roles.workers)
        arrived, answers = asking.receive(), []
        if self._owns:
            asked = [requests[p] if (b := arrived[p]) is None else _requests(self._requests, b) for p in workers]
            by_owner = [owner.serve([peer[g] for peer in asked], part, block) for g, owner in enumerate(self._owners)]
            answers = [[replies[p] for replies in by_owner] for p in workers]
        answering.send(self._packed(self._replies, answers, workers))
        return answers

    def _complete(self, answers: Sequence[list[Reply]], arrived: Sequence[torch.Tensor | None]) -> list[list[Reply]]:
        """Replies by peer rank: our own, those that arrived, empty ones for ranks without rows; a server's are none."""
        if not self._asks:
            return []
        found = {p: answers[p] if (b := arrived[p]) is None else _replies(self._replies, b) for p in self._roles.owners}
        nothing = [_nothing(reply) for reply in found[self._roles.owners[0]]] if self._roles.servers else []
        return [found.get(p, nothing) for p in range(self.world_size)]

    def agree(self, yes: bool) -> bool:
        """Whether all ranks say yes."""
        return bool(self._reduce(int(yes), dist.ReduceOp.MIN))

    def most(self, count: int) -> int:
        """The largest count that any rank gives."""
        return self._reduce(count, dist.ReduceOp.MAX)

    def _reduce(self, number: int, operation: dist.ReduceOp.RedOpType) -> int:
        if self.world_size == 1:
            return number
        answer = torch.tensor(number, device=self._device)
        dist.all_reduce(answer, operation, group=self._group)
        return int(answer)

    def _all_legs(self) -> Iterator[Leg]:
        return (leg for legs in self._legs.values() for pair in legs for leg in pair)

    def drain(self) -> None:
        """Wait until everything sent has left: before the process group goes away."""
        for leg in self._all_legs():
            leg.drain()

    def collect(self, reports: Sequence[Sequence[AuditReport]] = ()) -> list[list[AuditReport]]:
        """One leg: workers' reports by peer rank, then width group, to those sent to this owner, by worker.

        A server gives none; a rank without rows gets none.
        """
        if self.world_size == 1:
            return [list(of_peer) for of_peer in reports]
        leg = self._legs[Part.WHOLE][0][0]
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


# rows and pushes are as their codec has them, states [., S]; None: integers [.]; bits: flags [.]
REQUEST_WIDTHS = (None, "push", "S", None, None, None, "bits", None, None)
REPLY_WIDTHS = ("bits", "row", "S", None, None, None, "row", "S", None, None, None, None, "bits", "bits")


def _layout(channels: tuple[str, ...], widths: tuple[str | None, ...], codec: RowCodec, state_width: int) -> Layout:
    sizes = {None: None, "row": row_width(codec), "push": push_width(codec), "S": state_width, "bits": BITS}
    return Layout(channels, tuple(sizes[w] for w in widths))


def _requests(codec: Codec, buffer: torch.Tensor) -> list[Request]:
    return [Request.from_fields(fields) for fields in codec.unpack(buffer)]


def _replies(codec: Codec, buffer: torch.Tensor) -> list[Reply]:
    return [Reply.from_fields(fields) for fields in codec.unpack(buffer)]
