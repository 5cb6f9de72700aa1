"""Messages as bytes: one contiguous buffer per pair of ranks and leg.

A buffer is its two lengths, the head and the floats. The head (transport/compact.py) tells the rows of every field and
holds the integers and flags of all width groups; it is written and read on the CPU. The floats lie behind it as they
are, one field behind the other, so that the receiver can view them in place. Rows that a codec made bytes of
(store/row_codec.py) lie there too; of those that are mostly zeros only the other values do, and the head tells where
they belong (transport/thin.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hetrain.store.row_codec import RowCodec
from hetrain.telemetry import Traffic
from hetrain.transport.compact import Reader, Writer, words_for
from hetrain.transport.thin import Thin, thin_out

BITS = -1  # width of a field of flags
UNIT = 4  # bytes; lengths count in it, and floats can be viewed where they lie
LENGTHS = 8  # bytes of the two lengths: the head's in the lowest HEAD_BITS bits, the floats' in the others
HEAD_BITS = 28  # a head of up to 1 GiB and floats of up to 128 GiB


@dataclass(frozen=True)
class Coded:
    """A field of rows as bytes, [n, row_bytes] uint8; or exact, [n, dim] float32, which the message then says.

    `thin`: the bytes are halves, most of which are zero in some rows.
    """

    dim: int
    row_bytes: int
    thin: bool = False


Width = int | None | Coded


@dataclass(frozen=True)
class Layout:
    """What a message type looks like in one width group: per field its channel and width.

    `widths[i]` is None for an integer field [n], BITS for a bool field [n], the number of columns of a float
    field [n, width], or Coded.
    """

    channels: tuple[str, ...]
    widths: tuple[Width, ...]


class _Field(NamedTuple):
    """One field of a message to pack."""

    channel: str
    width: Width
    tensor: Tensor
    thin: Thin | None

    @property
    def numbers(self) -> int:
        """At most so many integers or flags lie in the head."""
        if self.thin is not None:
            return len(self.thin.whole) + len(self.thin.positions)
        return 0 if _is_float(self.width) else len(self.tensor)

    def data(self) -> Tensor:
        """What lies behind the head: [n] uint8."""
        return self.tensor.reshape(-1).view(torch.uint8) if self.thin is None else self.thin.values


class Codec:
    """Packs and unpacks the messages of one type, one per width group."""

    def __init__(self, layouts: Sequence[Layout], traffic: Traffic, overhead: str = "ids") -> None:
        """`overhead`: the channel of lengths, rows of fields and padding; they too say which rows are meant."""
        self._layouts = list(layouts)
        self._widths = [width for layout in layouts for width in layout.widths]
        self._coded = any(isinstance(width, Coded) for width in self._widths)
        self._traffic, self._overhead = traffic, overhead

    def pack(self, messages: Sequence[Sequence[tuple[str, Tensor]]]) -> Tensor:
        """One uint8 buffer of the fields of every group's message, where the floats are; counts its bytes by channel.

        Integers are int64 and flags bool, on any device.
        """
        fields = [
            _Field(channel, width, tensor, _thinned(width, tensor) if self._coded else None)
            for layout, message in zip(self._layouts, messages, strict=True)
            for channel, width, (_, tensor) in zip(layout.channels, layout.widths, message, strict=True)
        ]
        head = self._head(fields)
        parts: list[Tensor] = []
        for field in fields:
            if _is_float(field.width) and field.tensor.numel():
                parts += self._floats(field)
        lengths = len(head) // UNIT | sum(part.numel() for part in parts) // UNIT << HEAD_BITS
        front = [torch.tensor([lengths]).view(torch.uint8), torch.from_numpy(head)]
        if parts:
            front = [part.to(parts[0].device) for part in front]
        return torch.cat([*front, *parts])

    def _floats(self, field: _Field) -> list[Tensor]:
        """The floats, counted, and what fills their last unit."""
        data = field.data()
        self._traffic.add(field.channel, len(data))
        if missing := -len(data) % UNIT:
            self._traffic.add(self._overhead, missing)
            return [data, data.new_zeros(missing)]
        return [data]

    def _head(self, fields: Sequence[_Field]) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        """Whole units; its bytes, and those of the lengths, are counted."""
        writer = Writer(words_for([field.numbers for field in fields]))
        rows = counted = 0
        for field in fields:
            writer.count(len(field.tensor), rows)
            rows = len(field.tensor)
        for field in fields if self._coded else ():
            if isinstance(field.width, Coded):
                writer.bits(int(field.tensor.dtype == torch.float32), 1)
        writer.align(1)
        for field in fields:
            if field.thin is None and _is_float(field.width):
                continue
            start = writer.nbytes
            if field.thin is not None:
                field.thin.write(writer)
            else:
                values = np.ascontiguousarray(field.tensor.cpu().numpy())
                (writer.flags if field.width == BITS else writer.integers)(values)
            writer.align(1)
            self._traffic.add(field.channel, writer.nbytes - start)
            counted += writer.nbytes - start
        writer.align(UNIT)
        self._traffic.add(self._overhead, LENGTHS + writer.nbytes - counted)
        return writer.bytes()

    def length(self, buffer: Tensor) -> int:
        """Bytes of the message that starts in `buffer`, of which at least the first 8 bytes are here."""
        head, floats = _lengths(buffer)
        return LENGTHS + head + floats

    def unpack(self, buffer: Tensor) -> list[list[Tensor]]:
        """The fields of every group's message: int64 and bool on the CPU; floats are views of `buffer`, thin rows not.

        Coded rows are uint8, or float32 where they were sent exact.
        """
        position = LENGTHS + _lengths(buffer)[0]
        reader, counts, rows = Reader(buffer[LENGTHS:position].cpu().numpy()), [], 0
        for _ in self._widths:
            rows = reader.count(rows)
            counts.append(rows)
        widths = [_as_sent(width, reader) for width in self._widths] if self._coded else self._widths
        reader.align(1)
        fields: list[Tensor] = []
        for width, n in zip(widths, counts, strict=True):
            if width is None or width == BITS:
                fields.append(torch.from_numpy(reader.integers(n) if width is None else reader.flags(n)))
                reader.align(1)
                continue
            if isinstance(width, Coded):
                field, end = _coded(width, n, reader, buffer, position)
            else:
                end = position + n * width * 4
                field = buffer[position:end].view(torch.float32).view(n, width)
            fields.append(field)
            position = end + -(end - position) % UNIT
        left = iter(fields)
        return [[next(left) for _ in layout.widths] for layout in self._layouts]


def row_width(codec: RowCodec) -> Width:
    """Of a field of rows."""
    return codec.dim if codec.exact else Coded(codec.dim, codec.row_bytes)


def push_width(codec: RowCodec) -> Width:
    """Of a field of pushes."""
    return codec.dim if codec.exact else Coded(codec.dim, codec.row_bytes, thin=codec.thin)


def _thinned(width: Width, tensor: Tensor) -> Thin | None:
    return thin_out(tensor) if isinstance(width, Coded) and width.thin and tensor.dtype != torch.float32 else None


def _as_sent(width: Width, reader: Reader) -> Width:
    """What the message says of coded rows: plain columns where they were sent exact."""
    return width.dim if isinstance(width, Coded) and reader.bits(1) else width


def _coded(width: Coded, n: int, reader: Reader, buffer: Tensor, start: int) -> tuple[Tensor, int]:
    """A field of `n` coded rows that begins at `start`, and where it ends."""
    if width.thin:
        thin = Thin.read(reader, n, width.row_bytes, buffer[start:])
        reader.align(1)
        return thin.spread(width.row_bytes), start + len(thin.values)
    end = start + n * width.row_bytes
    return buffer[start:end].view(n, width.row_bytes), end


def _is_float(width: Width) -> bool:
    return width is not None and width != BITS


def _lengths(buffer: Tensor) -> tuple[int, int]:
    """Bytes of the head and of the floats."""
    lengths = int(buffer[:LENGTHS].view(torch.int64).item())
    return (lengths & (1 << HEAD_BITS) - 1) * UNIT, (lengths >> HEAD_BITS) * UNIT
