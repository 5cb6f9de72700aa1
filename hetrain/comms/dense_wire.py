"""Dense gradients and parameters between workers and owners that step at their own pace, in fewer bytes.

What a rank tells itself stays as it is. Parameters are rounded for the network to compute with; the owner's, which
gradients are added to, stay float32. With dct gradients are thresholded per owner (comms/thresholds.py), and what waits
waits at the worker; parameters travel as fp16, since every one may have changed.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hetrain.comms import scaled_half, sparse_message
from hetrain.comms.dense_exchange import DenseComms
from hetrain.comms.thresholds import Compressor, Parts

CPU = torch.device("cpu")


class DenseWire:
    """One rank's end. Slices [P] by owner; words are float32 [n] that hold a message's bytes."""

    def __init__(self, comms: DenseComms, sizes: Sequence[int], bounds: Sequence[tuple[int, int]]) -> None:
        """`comms`: not none. `sizes` of the parameters in the flat vector; `bounds` of the owners' slices of it."""
        self.sparse = comms.name == "dct"
        self._name = sparse_message.VALUES if self.sparse else comms.name
        self._bounds = list(bounds)
        self._parts = [_pieces(sizes, b, comms.dct.smallest) for b in self._bounds]
        self._compressors = [Compressor(parts, comms.dct) for parts in self._parts] if self.sparse else []

    def push(self, owner: int, gradient: Tensor) -> Tensor:
        """A gradient [P] to the `owner`-th owner as words."""
        if not len(gradient):
            return gradient
        if self.sparse:
            return self._compressors[owner].compress(gradient).view(torch.float32)
        return self.pull(gradient)

    def pushed(self, owner: int, words: Tensor) -> Tensor:
        """The gradient [P], at the owner."""
        if not self.sparse or not len(words):
            return self.pulled(owner, words)
        parts = self._parts[owner]
        gradient = torch.zeros(parts.elements)
        sparse_message.unpack(words.view(torch.uint8), len(gradient), CPU).add_to(gradient)
        return parts.flat(gradient)

    def pull(self, value: Tensor) -> Tensor:
        """An owner's parameters [P] as words."""
        return scaled_half.encode(value, self._name).view(torch.float32) if len(value) else value

    def pulled(self, owner: int, words: Tensor) -> Tensor:
        """The parameters [P] of the `owner`-th owner, at the worker."""
        if not len(words):
            return words
        first, last = self._bounds[owner]
        return scaled_half.decode(words.view(torch.uint8), last - first, self._name)

    def waiting(self) -> Tensor:
        """Gradients not pushed yet, of the flat vector; a copy. With dct."""
        return torch.cat([compressor.waiting.cpu() for compressor in self._compressors])

    def restart(self, step: int) -> None:
        """Nothing waits, `step` steps were taken before."""
        for compressor in self._compressors:
            compressor.restart(step)

    def state_dict(self) -> list[dict[str, Any]]:
        """By owner."""
        return [compressor.state_dict() for compressor in self._compressors]

    def load_state_dict(self, states: Sequence[dict[str, Any]]) -> None:
        """Go on where `state_dict` was taken, with the same owners."""
        for compressor, state in zip(self._compressors, states, strict=True):
            compressor.load_state_dict(state)

    def report(self) -> dict[str, int] | None:
        """Values pushed and values there were, by this rank; None where all are pushed."""
        if not self.sparse:
            return None
        return {
            "values_sent": sum(compressor.sent for compressor in self._compressors),
            "values": sum(compressor.seen for compressor in self._compressors),
        }


def _pieces(sizes: Sequence[int], bounds: tuple[int, int], smallest: int) -> Parts:
    """Tensors, and pieces of tensors, in elements `bounds` of the flat vector."""
    first, last = bounds
    pieces, whole, start = [], [], 0
    for size in sizes:
        inside = min(start + size, last) - max(start, first)
        if inside > 0:
            pieces.append(inside)
            whole.append(size < smallest)
        start += size
    return Parts(pieces, whole)
