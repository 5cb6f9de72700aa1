"""One leg of a round: one buffer from every rank that has something to say to every rank it is for.

`ShortLeg` is for gloo, where a receive may be posted with more room than the message needs: sizes need not
be known ahead, so a message costs one trip. `SizedLeg` is for NCCL, whose receives want the exact size and
whose sends and receives must be started as one group.
"""

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from hetrain.errors import lost_peer
from hetrain.roles import Roles

FIRST_ROOM = 1 << 16  # bytes a receive is posted with at first
MOST_ROOM = 1 << 23  # bytes a receive is posted with at most; what lies beyond follows in a second message


class Leg(Protocol):
    """`post` then `send` then `receive`, once each per round; buffers are 1-d uint8."""

    waited_s: float

    def post(self) -> None:
        """Get ready to receive, as early as possible."""
        ...

    def send(self, outgoing: Sequence[Tensor | None]) -> None:
        """Start sending `outgoing[p]` to rank p; None for this rank itself and for ranks it has nothing to say to."""
        ...

    def receive(self) -> list[Tensor | None]:
        """What each rank sent, None for those that do not speak to this one; valid until the next `post`.

        Raises TrainingError naming a rank that stays silent.
        """
        ...

    def drain(self) -> None:
        """Wait until what was sent has left."""
        ...


def _wait(work: dist.Work, timeout: timedelta, peer: str, doing: str) -> None:
    try:
        work.wait(timeout)
    except RuntimeError as error:
        raise lost_peer(
            f"gave up {doing} {peer} (launch.timeout_s={timeout.total_seconds():g}): {error}. "
            "Look at that rank's own output; raise launch.timeout_s if it is only slow.",
            error,
        ) from error


class ShortLeg:
    """Receives posted with room to spare, all of them before any send.

    Both ends of a pair keep the same figure for the room of that direction, and raise it alike when a
    message exceeds it; the part beyond the room goes as a second message.
    """

    def __init__(
        self,
        length: Callable[[Tensor], int],
        tag: int,
        timeout_s: float,
        group: dist.ProcessGroup | None = None,
        *,
        roles: Roles | None = None,
        answers: bool = False,
    ) -> None:
        """`length`: bytes of a message, read from its first part; `tag` and `tag + 1` are this leg's own.

        From workers to owners, or with `answers` from owners to workers; `roles` None: from all to all.
        """
        self._length = length
        self._tag = tag
        self._timeout = timedelta(seconds=timeout_s)
        self._group = group
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        self._roles = roles or Roles(world_size)
        speaks, listens = self._roles.computes, self._roles.owns
        if answers:
            speaks, listens = listens, speaks
        others = [p for p in range(world_size) if p != rank]
        self._targets = [p for p in others if listens(p)] if speaks(rank) else []
        self._sources = [p for p in others if speaks(p)] if listens(rank) else []
        self._send_room = [FIRST_ROOM] * world_size
        rooms = [FIRST_ROOM if p in self._sources else 0 for p in range(world_size)]
        self._rooms = [torch.empty(room, dtype=torch.uint8) for room in rooms]
        self._receives: list[tuple[int, dist.Work]] = []
        self._sends: list[tuple[int, dist.Work, Tensor]] = []
        self.waited_s = 0.0

    def drain(self) -> None:
        """Wait for every send."""
        for peer, work, _ in self._sends:
            _wait(work, self._timeout, self._roles.name(peer), "sending to")
        self._sends.clear()

    def post(self) -> None:
        """Post every receive; the previous round's sends are waited for first."""
        self.drain()
        self._receives = [(p, self._irecv(self._rooms[p], p, self._tag)) for p in self._sources]

    def send(self, outgoing: Sequence[Tensor | None]) -> None:
        """Start sending; the buffers are kept until the next `post`."""
        for peer in self._targets:
            buffer = outgoing[peer]
            assert buffer is not None
            buffer = buffer.cpu()  # rows of a GPU's cache, on their way to servers
            room = self._send_room[peer]
            self._isend(buffer[:room], peer, self._tag)
            if buffer.shape[0] > room:
                self._isend(buffer[room:], peer, self._tag + 1)
                self._send_room[peer] = _raised(buffer.shape[0])

    def receive(self) -> list[Tensor | None]:
        """Wait in turn for every rank that speaks to this one."""
        start = time.perf_counter()
        incoming: list[Tensor | None] = [None] * len(self._rooms)
        for peer, work in self._receives:
            _wait(work, self._timeout, self._roles.name(peer), "waiting for")
            incoming[peer] = self._whole(peer)
        self.waited_s += time.perf_counter() - start
        return incoming

    def _whole(self, peer: int) -> Tensor:
        room = self._rooms[peer]
        length = self._length(room)
        if length <= room.shape[0]:
            return room[:length]
        whole = torch.empty(length, dtype=torch.uint8)
        work = self._irecv(whole[room.shape[0] :], peer, self._tag + 1)
        whole[: room.shape[0]] = room
        _wait(work, self._timeout, self._roles.name(peer), "waiting for")
        self._rooms[peer] = torch.empty(_raised(length), dtype=torch.uint8)
        return whole

    def _irecv(self, buffer: Tensor, peer: int, tag: int) -> dist.Work:
        work = dist.irecv(buffer, group=self._group, group_src=peer, tag=tag)
        assert work is not None
        return work

    def _isend(self, buffer: Tensor, peer: int, tag: int) -> None:
        work = dist.isend(buffer, group=self._group, group_dst=peer, tag=tag)
        assert work is not None
        self._sends.append((peer, work, buffer))


def _raised(length: int) -> int:
    return min(1 << (length - 1).bit_length(), MOST_ROOM)


class SizedLeg:
    """Sizes first, in a small all-to-all, then every send and receive as one group."""

    def __init__(self, device: torch.device, timeout_s: float, group: dist.ProcessGroup | None = None) -> None:
        """`device`: where buffers have to lie to be sent; they are moved there and back."""
        self._device = device
        self._timeout = timedelta(seconds=timeout_s)
        self._group = group
        self._rank, self._world_size = dist.get_rank(group), dist.get_world_size(group)
        self._peers = [p for p in range(self._world_size) if p != self._rank]
        self._incoming: list[Tensor | None] = []
        self._origin = torch.device("cpu")
        self.waited_s = 0.0

    def drain(self) -> None:
        """Nothing is under way after `send`."""

    def post(self) -> None:
        """Nothing can be posted before the sizes are known."""

    def send(self, outgoing: Sequence[Tensor | None]) -> None:
        """Swap the sizes and start the transfers."""
        sizes = [0 if b is None else b.shape[0] for b in outgoing]
        self._origin = next((b.device for b in outgoing if b is not None), self._origin)
        start = time.perf_counter()
        ours = torch.tensor(sizes, device=self._device)
        theirs = torch.empty_like(ours)
        dist.all_to_all_single(theirs, ours, group=self._group)
        self._incoming = [
            None if p == self._rank else torch.empty(n, dtype=torch.uint8, device=self._device)
            for p, n in enumerate(theirs.tolist())
        ]
        operations = []
        for peer in self._peers:
            buffer, room = outgoing[peer], self._incoming[peer]
            assert buffer is not None
            assert room is not None
            operations.append(dist.P2POp(dist.irecv, room, group=self._group, group_peer=peer))
            operations.append(dist.P2POp(dist.isend, buffer.to(self._device), group=self._group, group_peer=peer))
        for work in dist.batch_isend_irecv(operations) if operations else []:
            _wait(work, self._timeout, f"rank {self._peers[0]}", "exchanging rows with")
        self.waited_s += time.perf_counter() - start

    def receive(self) -> list[Tensor | None]:
        """What arrived, on the device of what was sent."""
        return [None if b is None else b.to(self._origin) for b in self._incoming]
