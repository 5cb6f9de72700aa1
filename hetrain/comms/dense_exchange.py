"""Sums of dense gradients over ranks in fewer bytes than float32: every rank ends with the same bits.

Ranks add in float32 and in rank order. All-reduce of gloo and NCCL adds 16-bit gradients in 16 bits: what is below
half a unit of the sum so far is lost, and float16 sums overflow to infinity (two times 40,000 does).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from hetrain.comms import scaled_half, sparse_message
from hetrain.comms.thresholds import Compressor, Parts
from hetrain.config import DctConfig
from hetrain.telemetry import Traffic
from hetrain.transport.background import Background
from hetrain.transport.leg import Leg, ShortLeg, SizedLeg

FIRST_TAG, TAGS_PER_LEG, LEGS = 10_000, 2, 2  # beyond those of rounds on the same group


@dataclass(frozen=True)
class DenseComms:
    """What travels for the dense part: none, fp16, bf16 or dct, and how."""

    name: str = "none"
    dct: DctConfig = field(default_factory=DctConfig)
    timeout_s: float = 300.0

    def of_tables(self) -> "DenseComms":
        """For gradients of replicated tables. With dct they travel whole: rows without a gradient are not stepped."""
        return replace(self, name="fp16") if self.name == "dct" else self


class Exchange(Protocol):
    """One sum at a time: `start`, then `finish`."""

    def start(self, gradient: Tensor) -> None:
        """Send this rank's part of [P], which is read here."""
        ...

    def finish(self) -> Tensor:
        """The sum over ranks [P] float32. Raises TrainingError naming a rank that stays silent."""
        ...


def exchange(
    comms: DenseComms,
    compressor: Compressor | None,
    device: torch.device,
    traffic: Traffic,
    group: dist.ProcessGroup | None,
    number: int = 0,
) -> Exchange:
    """The exchange of `comms`, which is not none; `compressor`: for dct. `number`: among those of the group."""

    def leg(which: int, length: Callable[[Tensor], int]) -> Leg:
        if dist.get_backend(group) == "gloo":
            tag = FIRST_TAG + (number * LEGS + which) * TAGS_PER_LEG
            return ShortLeg(length, tag, comms.timeout_s, group)
        return SizedLeg(device, comms.timeout_s, group)

    if compressor is not None:
        return ThresholdedSum(compressor, leg(0, sparse_message.length), traffic, group)
    beside = Background("dense") if dist.get_backend(group) == "gloo" else None
    return NarrowSum(comms.name, leg, traffic, group, beside)


class NarrowSum:
    """16 bits a value. Each rank adds up a slice, its own part of which never leaves float32, and sends the sum to all.

    Twice (W - 1) / W of the values are sent, as by a ring, and every value is rounded twice whatever W.
    """

    def __init__(
        self,
        name: str,
        make_leg: Callable[[int, Callable[[Tensor], int]], Leg],
        traffic: Traffic,
        group: dist.ProcessGroup | None,
        beside: Background | None,
    ) -> None:
        """`name`: fp16 or bf16; `beside`: adds up and sends while the caller computes; None: only in `finish`."""
        self._name, self._traffic = name, traffic
        self._rank, self._world_size = dist.get_rank(group), dist.get_world_size(group)
        self._scatter, self._gather = (make_leg(i, lambda _: scaled_half.nbytes(self._slice)) for i in range(2))
        self._beside = beside
        self._slice = 0  # values that a rank adds up; the last ranks' are padded
        self._own = torch.empty(0)
        self._elements = 0

    def start(self, gradient: Tensor) -> None:
        """See Exchange."""
        self._elements = len(gradient)
        self._slice = -(-self._elements // self._world_size)
        padded = torch.nn.functional.pad(gradient, (0, self._slice * self._world_size - self._elements))
        slices = padded.split(self._slice)
        self._own = slices[self._rank]
        self._scatter.post()
        self._gather.post()
        # All is counted here: whoever looks before `finish` counts aside what is sent meanwhile.
        self._traffic.add("dense", 2 * (self._world_size - 1) * scaled_half.nbytes(self._slice))
        _send(self._scatter, [scaled_half.encode(s, self._name) for s in self._others(slices)], self._rank)

        if self._beside is not None:
            self._beside.start(self._add_and_gather)

    def finish(self) -> Tensor:
        """See Exchange."""
        summed: Tensor = self._add_and_gather() if self._beside is None else self._beside.result()
        return summed

    def _add_and_gather(self) -> Tensor:
        total = torch.zeros_like(self._own)
        for message in self._scatter.receive():
            total += self._own if message is None else self._values(message)
        ours = scaled_half.encode(total, self._name)
        _send(self._gather, [ours] * (self._world_size - 1), self._rank)
        summed = [self._values(ours if message is None else message) for message in self._gather.receive()]
        self._scatter.drain()
        self._gather.drain()
        return torch.cat(summed)[: self._elements]

    def _values(self, message: Tensor) -> Tensor:
        return scaled_half.decode(message, self._slice, self._name)

    def _others(self, slices: Sequence[Tensor]) -> list[Tensor]:
        return [s for rank, s in enumerate(slices) if rank != self._rank]


class ThresholdedSum:
    """DCT-DP: what exceeds a threshold, with its positions, from every rank to every other.

    W - 1 messages per rank: for hundreds of ranks that is more than a ring of 16 bits a value.
    """

    def __init__(self, compressor: Compressor, leg: Leg, traffic: Traffic, group: dist.ProcessGroup | None) -> None:
        self._compressor, self._leg, self._traffic = compressor, leg, traffic
        self._rank, self._world_size = dist.get_rank(group), dist.get_world_size(group)
        self._own, self._device = torch.empty(0), torch.device("cpu")

    @property
    def _parts(self) -> Parts:
        return self._compressor.parts

    def start(self, gradient: Tensor) -> None:
        """See Exchange."""
        self._device = gradient.device
        self._own = self._compressor.compress(gradient)
        self._leg.post()
        self._traffic.add("dense", (self._world_size - 1) * len(self._own))
        _send(self._leg, [self._own] * (self._world_size - 1), self._rank)

    def finish(self) -> Tensor:
        """See Exchange."""
        total = torch.zeros(self._parts.elements, device=self._device)
        for message in self._leg.receive():
            found = sparse_message.unpack(self._own if message is None else message, len(total), self._device)
            found.add_to(total)
        self._leg.drain()
        return self._parts.flat(total)


def _send(leg: Leg, messages: list[Tensor], rank: int) -> None:
    """Send `messages`, one to every other rank in order."""
    leg.send([*messages[:rank], None, *messages[rank:]])
