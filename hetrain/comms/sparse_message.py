"""Some values of a vector as bytes: the first ones without positions, of the others those sent with theirs.

Positions ascend and are written as their differences (transport/compact.py: 8.3 bits each where one value in a hundred
is sent) or, where that is smaller, as a bit per value of the vector.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hetrain.comms import scaled_half
from hetrain.transport.compact import Reader, Writer, words_for

HEAD = 16  # bytes: int32 length of the message, values sent whole, values sent with positions, whether those are bits
VALUES = "fp16"  # what is lost in rounding waits with the rest


@dataclass
class Sparse:
    """The values at 0 .. whole - 1, then those at whole + positions."""

    whole: int
    positions: Tensor  # [K] int64, ascending
    values: Tensor  # [whole + K] float32

    def add_to(self, total: Tensor, sign: float = 1.0) -> None:
        """Add the values, times `sign`, to `total` [P] in place."""
        total[: self.whole].add_(self.values[: self.whole], alpha=sign)
        total[self.whole :].index_add_(0, self.positions, self.values[self.whole :], alpha=sign)


def pack(sparse: Sparse, elements: int) -> Tensor:
    """uint8 on the CPU, a multiple of 4 bytes; `elements`: P, values in the vector, fewer than 2^31."""
    values = scaled_half.encode(sparse.values, VALUES).cpu()
    positions, is_bits = _packed(sparse.positions.cpu().numpy(), elements - sparse.whole)
    length = HEAD + len(values) + 4 * -(-len(positions) // 4)
    message = torch.zeros(length, dtype=torch.uint8)
    head = torch.tensor([length, sparse.whole, len(sparse.positions), is_bits], dtype=torch.int32)
    message[:HEAD] = head.view(torch.uint8)
    message[HEAD : HEAD + len(values)] = values
    message[HEAD + len(values) :][: len(positions)] = torch.from_numpy(positions)
    return message


def arrives(message: Tensor, sparse: Sparse) -> Tensor:
    """What the values of `sparse`, of which `message` was made, become: [whole + K] float32 on their device."""
    count = len(sparse.values)
    values = message[HEAD : HEAD + scaled_half.nbytes(count)].to(sparse.values.device)
    return scaled_half.decode(values, count, VALUES)


def length(message: Tensor) -> int:
    """Bytes of the message that starts with these, at least HEAD."""
    return int(message[:4].view(torch.int32))


def unpack(message: Tensor, elements: int, device: torch.device) -> Sparse:
    """What was packed, the values rounded; `elements` as there."""
    _, whole, count, is_bits = message[:HEAD].view(torch.int32).tolist()
    end = HEAD + scaled_half.nbytes(whole + count)
    values = scaled_half.decode(message[HEAD:end].to(device), whole + count, VALUES)
    data = message[end:].cpu().numpy()
    bits = np.unpackbits(data, count=elements - whole) if is_bits else None
    found = Reader(data).integers(count) if bits is None else np.flatnonzero(bits)
    return Sparse(whole, torch.from_numpy(found).to(device), values)


def _packed(positions: np.ndarray, elements: int) -> tuple[np.ndarray, bool]:
    """The smaller of the two ways, and whether it is bits."""
    writer = Writer(words_for([len(positions)]))
    writer.integers(positions)
    if writer.nbytes <= -(-elements // 8):
        return writer.bytes(), False
    flags = np.zeros(elements, dtype=bool)
    flags[positions] = True
    return np.packbits(flags), True
