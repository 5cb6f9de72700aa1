"""Messages as bytes: one contiguous buffer per pair of ranks and leg.

A buffer is a header of int64 and then, per width group, four blocks: row numbers and positions,
counters, floats, and flags of one bit each, each block the fields of its kind one behind the other. An integer block
travels as int32 when all its values fit, since ids seldom need 64 bits and counters never do in practice.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hetrain.telemetry import Traffic

INT32_END = 1 << 31
BITS = -1  # width of a field of flags
ALIGNMENT = 8  # bytes; so that an int64 block can be viewed where it lies


@dataclass(frozen=True)
class Layout:
    """What a message type looks like in one width group: per field its channel and width.

    `widths[i]` is None for an integer field [n], BITS for a bool field [n] and the number of columns of a float
    field [n, width].
    """

    channels: tuple[str, ...]
    widths: tuple[int | None, ...]

    @property
    def blocks(self) -> tuple[list[int], list[int], list[int], list[int]]:
        """Positions of the fields that go into the id, counter, float and flag block."""
        integers = [i for i, w in enumerate(self.widths) if w is None]
        ids = [i for i in integers if self.channels[i] == "ids"]
        counters = [i for i in integers if self.channels[i] != "ids"]
        floats = [i for i, w in enumerate(self.widths) if w is not None and w != BITS]
        return ids, counters, floats, [i for i, w in enumerate(self.widths) if w == BITS]


class Codec:
    """Packs and unpacks the messages of one type, one per width group."""

    def __init__(self, layouts: Sequence[Layout], traffic: Traffic, overhead: str = "ids") -> None:
        """`overhead`: the channel that header and padding are counted on; they too say which rows are meant."""
        self._layouts = [(layout, *layout.blocks) for layout in layouts]
        # length of the message, then per group the two dtypes of its integer blocks and the rows of each field
        self._header = 1 + sum(2 + len(layout.widths) for layout in layouts)
        self._traffic, self._overhead = traffic, overhead

    def pack(self, messages: Sequence[Sequence[tuple[str, Tensor]]]) -> Tensor:
        """One uint8 buffer of the fields of every group's message; counts its bytes by channel."""
        header, parts, counted = [0], [], 0
        for (layout, ids, counters, floats, flags), fields in zip(self._layouts, messages, strict=True):
            tensors = [tensor for _, tensor in fields]
            blocks = [_integers(tensors, ids), _integers(tensors, counters), _floats(tensors, floats)]
            header += [blocks[0].element_size(), blocks[1].element_size(), *(t.shape[0] for t in tensors)]
            for block, positions in zip(blocks, (ids, counters, floats), strict=True):
                counted += self._count(block, layout, positions, tensors)
                parts += _aligned(block)
            for i in flags:
                parts += _aligned(_packed(tensors[i]))  # their bytes are counted as overhead
        length = self._header * 8 + sum(part.shape[0] for part in parts)
        header[0] = length
        self._traffic.add(self._overhead, length - counted)
        device = parts[0].device if parts else None
        return torch.cat([torch.tensor(header, dtype=torch.int64, device=device).view(torch.uint8), *parts])

    def length(self, buffer: Tensor) -> int:
        """Bytes of the message that starts in `buffer`, of which at least the first 8 bytes are here."""
        return int(buffer[:8].view(torch.int64).item())

    def unpack(self, buffer: Tensor) -> list[list[Tensor]]:
        """The fields of every group's message, integers as int64; floats are views of `buffer`."""
        header = buffer[: self._header * 8].view(torch.int64).tolist()
        position, at, messages = self._header * 8, 1, []
        for layout, *blocks, flags in self._layouts:
            sizes, rows = [*header[at : at + 2], 4], header[at + 2 : at + 2 + len(layout.widths)]
            at += 2 + len(layout.widths)
            fields: dict[int, Tensor] = {}
            for size, positions, is_float in zip(sizes, blocks, (False, False, True), strict=True):
                shapes = [(rows[i], layout.widths[i]) for i in positions]
                counts = [n if w is None else n * w for n, w in shapes]
                nbytes = sum(counts) * size
                flat = buffer[position : position + nbytes]
                flat = flat.view(torch.float32) if is_float else _widened(flat, size)
                for i, part, (n, w) in zip(positions, flat.split(counts), shapes, strict=True):
                    fields[i] = part if w is None else part.view(n, w)
                position += nbytes + -nbytes % ALIGNMENT
            for i in flags:
                nbytes = -(-rows[i] // 8)
                fields[i] = _unpacked(buffer[position : position + nbytes], rows[i])
                position += nbytes + -nbytes % ALIGNMENT
            messages.append([fields[i] for i in range(len(layout.widths))])
        return messages

    def _count(self, block: Tensor, layout: Layout, positions: list[int], tensors: list[Tensor]) -> int:
        if not block.shape[0]:
            return 0
        for i in positions:
            if tensors[i].numel():
                self._traffic.add(layout.channels[i], tensors[i].numel() * block.element_size())
        return block.shape[0] * block.element_size()


def _integers(tensors: list[Tensor], positions: list[int]) -> Tensor:
    if not positions:
        return torch.empty(0, dtype=torch.int32)
    block = torch.cat([tensors[i] for i in positions])
    if block.shape[0] and int(block.max()) >= INT32_END:
        return block
    return block.to(torch.int32)


def _floats(tensors: list[Tensor], positions: list[int]) -> Tensor:
    return torch.cat([tensors[i].reshape(-1) for i in positions]) if positions else torch.empty(0)


def _packed(flags: Tensor) -> Tensor:
    """Eight flags a byte: [n] bool to [ceil(n / 8)] uint8."""
    bits = torch.zeros(-(-len(flags) // 8) * 8, dtype=torch.uint8, device=flags.device)
    bits[: len(flags)] = flags
    return (bits.view(-1, 8) << torch.arange(8, dtype=torch.uint8, device=flags.device)).sum(1, dtype=torch.uint8)


def _unpacked(packed: Tensor, count: int) -> Tensor:
    bits = (packed.unsqueeze(1) >> torch.arange(8, dtype=torch.uint8, device=packed.device)) & 1
    return bits.view(-1)[:count].bool()


def _widened(flat: Tensor, size: int) -> Tensor:
    return flat.view(torch.int64) if size == 8 else flat.view(torch.int32).to(torch.int64)


def _aligned(block: Tensor) -> list[Tensor]:
    nbytes = block.shape[0] * block.element_size()
    if not nbytes:
        return []
    data = block.view(torch.uint8)
    if nbytes % ALIGNMENT == 0:
        return [data]
    return [data, torch.zeros(-nbytes % ALIGNMENT, dtype=torch.uint8, device=block.device)]
