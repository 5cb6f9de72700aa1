"""Sums of dense gradients by one message from every rank to every other: each adds up all of them, in rank order."""

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from hetrain.comms import scaled_half, sparse_message
from hetrain.comms.thresholds import Compressor
from hetrain.telemetry import Traffic
from hetrain.transport.leg import Leg


class Summand(Protocol):
    """What a rank's part looks like as a message."""

    def encode(self, gradient: Tensor) -> Tensor:
        """[P] float32 as uint8."""
        ...

    def total(self, messages: list[Tensor], device: torch.device) -> Tensor:
        """What the messages of all ranks add up to, [P] float32."""
        ...


class Narrow:
    """16 bits a value, each rounded once."""

    def __init__(self, name: str) -> None:
        """`name`: fp16 or bf16."""
        self._name, self.elements = name, 0

    def encode(self, gradient: Tensor) -> Tensor:
        """See Summand."""
        self.elements = len(gradient)
        return scaled_half.encode(gradient, self._name)

    def total(self, messages: list[Tensor], device: torch.device) -> Tensor:
        """See Summand."""
        first, *others = (scaled_half.decode(message, self.elements, self._name) for message in messages)
        for other in others:
            first += other
        return first


class Thresholded:
    """DCT-DP: what exceeds a threshold, with its positions."""

    def __init__(self, compressor: Compressor) -> None:
        self._compressor = compressor

    def encode(self, gradient: Tensor) -> Tensor:
        """See Summand."""
        return self._compressor.compress(gradient)

    def total(self, messages: list[Tensor], device: torch.device) -> Tensor:
        """See Summand."""
        parts = self._compressor.parts
        total = torch.zeros(parts.elements, device=device)
        for message in messages:
            sparse_message.unpack(message, len(total), device).add_to(total)
        return parts.flat(total)


class DirectSum:
    """W - 1 messages per rank: with two ranks the bytes of a ring, in one trip; for many, only where they are short."""

    def __init__(self, summand: Summand, leg: Leg, traffic: Traffic, group: dist.ProcessGroup | None) -> None:
        self._summand, self._leg, self._traffic = summand, leg, traffic
        self._rank, self._world_size = dist.get_rank(group), dist.get_world_size(group)
        self._own, self._device = torch.empty(0), torch.device("cpu")

    def start(self, gradient: Tensor) -> None:
        """See Exchange."""
        self._leg.post()
        self._device = gradient.device
        self._own = own = self._summand.encode(gradient)
        self._traffic.add("dense", (self._world_size - 1) * len(own))
        self._leg.send([None if rank == self._rank else own for rank in range(self._world_size)])

    def finish(self) -> Tensor:
        """See Exchange."""
        messages = [self._own if message is None else message for message in self._leg.receive()]
        total = self._summand.total(messages, self._device)
        self._leg.drain()
        return total
