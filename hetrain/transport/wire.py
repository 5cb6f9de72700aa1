"""Messages as bytes: one contiguous buffer per pair of ranks and leg.

A buffer is its two lengths, the head and the floats. The head (transport/compact.py) tells the rows of every field and
holds the integers and flags of all width groups; it is written and read on the CPU. The floats lie behind it as they
are, one field behind the other, so that the receiver can view them in place.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hetrain.telemetry import Traffic
from hetrain.transport.compact import Reader, Writer, words_for

BITS = -1  # width of a field of flags
UNIT = 4  # bytes; lengths count in it, and floats can be viewed where they lie
LENGTHS = 8  # bytes of the two lengths: the head's in the lowest HEAD_BITS bits, the floats' in the others
HEAD_BITS = 28  # a head of up to 1 GiB and floats of up to 128 GiB


@dataclass(frozen=True)
class Layout:
    """What a message type looks like in one width group: per field its channel and width.

    `widths[i]` is None for an integer field [n], BITS for a bool field [n] and the number of columns of a float
    field [n, width].
    """

    channels: tuple[str, ...]
    widths: tuple[int | None, ...]


class Codec:
    """Packs and unpacks the messages of one type, one per width group."""

    def __init__(self, layouts: Sequence[Layout], traffic: Traffic, overhead: str = "ids") -> None:
        """`overhead`: the channel of lengths, rows of fields and padding; they too say which rows are meant."""
        self._layouts = list(layouts)
        self._traffic, self._overhead = traffic, overhead

    def pack(self, messages: Sequence[Sequence[tuple[str, Tensor]]]) -> Tensor:
        """One uint8 buffer of the fields of every group's message, where the floats are; counts its bytes by channel.

        Integers are int64 and flags bool, on any device.
        """
        fields = [
            (channel, width, tensor)
            for layout, message in zip(self._layouts, messages, strict=True)
            for channel, width, (_, tensor) in zip(layout.channels, layout.widths, message, strict=True)
        ]
        head = self._head(fields)
        floats = [(channel, tensor) for channel, width, tensor in fields if _is_float(width) and tensor.numel()]
        for channel, tensor in floats:
            self._traffic.add(channel, tensor.numel() * 4)
        lengths = len(head) // UNIT | sum(tensor.numel() for _, tensor in floats) << HEAD_BITS
        parts = [torch.tensor([lengths]).view(torch.uint8), torch.from_numpy(head)]
        if floats:
            parts = [part.to(floats[0][1].device) for part in parts]
        return torch.cat([*parts, *(tensor.reshape(-1).view(torch.uint8) for _, tensor in floats)])

    def _head(self, fields: Sequence[tuple[str, int | None, Tensor]]) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        """Whole units; its bytes, and those of the lengths, are counted."""
        writer = Writer(words_for([0 if _is_float(width) else len(tensor) for _, width, tensor in fields]))
        rows = counted = 0
        for _, _, tensor in fields:
            writer.count(len(tensor), rows)
            rows = len(tensor)
        writer.align(1)
        for channel, width, tensor in fields:
            if _is_float(width):
                continue
            start, values = writer.nbytes, np.ascontiguousarray(tensor.cpu().numpy())
            if width == BITS:
                writer.flags(values)
            else:
                writer.integers(values)
            writer.align(1)
            self._traffic.add(channel, writer.nbytes - start)
            counted += writer.nbytes - start
        writer.align(UNIT)
        self._traffic.add(self._overhead, LENGTHS + writer.nbytes - counted)
        return writer.bytes()

    def length(self, buffer: Tensor) -> int:
        """Bytes of the message that starts in `buffer`, of which at least the first 8 bytes are here."""
        head, floats = _lengths(buffer)
        return LENGTHS + head + floats

    def unpack(self, buffer: Tensor) -> list[list[Tensor]]:
        """The fields of every group's message: int64 and bool on the CPU; floats are views of `buffer`."""
        position = LENGTHS + _lengths(buffer)[0]
        reader, counts, rows = Reader(buffer[LENGTHS:position].cpu().numpy()), [], 0
        for layout in self._layouts:
            for _ in layout.widths:
                rows = reader.count(rows)
                counts.append(rows)
        reader.align(1)
        left, messages = iter(counts), []
        for layout in self._layouts:
            fields: list[Tensor] = []
            for width, n in zip(layout.widths, left, strict=False):
                if width is None or width == BITS:
                    fields.append(torch.from_numpy(reader.integers(n) if width is None else reader.flags(n)))
                    reader.align(1)
                else:
                    end = position + n * width * 4
                    fields.append(buffer[position:end].view(torch.float32).view(n, width))
                    position = end
            messages.append(fields)
        return messages


def _is_float(width: int | None) -> bool:
    return width is not None and width != BITS


def _lengths(buffer: Tensor) -> tuple[int, int]:
    """Bytes of the head and of the floats."""
    lengths = int(buffer[:LENGTHS].view(torch.int64).item())
    return (lengths & (1 << HEAD_BITS) - 1) * UNIT, (lengths >> HEAD_BITS) * UNIT
