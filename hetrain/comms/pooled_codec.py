"""Pooled embeddings and their gradients as bytes.

A row is what one rank sends of one example: the pooled values of all columns that it holds, whole or in part, and that
go in one exchange.
"""

import math
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from hetrain.comms.chunked import Chunked
from hetrain.comms.columns import Columns, Kept
from hetrain.config import DctConfig
from hetrain.value_codec import Exact, ValueCodec, value_codec

CHUNK = 64  # values that share a scale with int8: one per column, often 16 values, would add half of their bytes
DCT_VALUES = "fp16"  # what the values that dct keeps travel as
SCALED = ("fp16", "int8")  # gradients that travel as these are scaled


@dataclass(frozen=True)
class PooledCodec:
    """How rows travel forward, and their gradients back. Sizes follow from widths alone, so that none is sent.

    With `sparsity` a row keeps, of every column, the share 1 - sparsity of its values that is largest in magnitude, and
    sends their positions too; its gradient is sent for these alone, without positions, which both ends know. The
    function that is computed is the row with zeros for the values left out, and this is its gradient.

    Args:
        forward: of the values that are sent.
        backward: of the gradients that are sent.
        scale: a power of two that gradients are multiplied by on the way. Those of a mean over many examples lie
            where float16 has few digits left, and below 1e-6 FBGEMM's 8-bit rows shrink them.
        sparsity: share of a column's values that is left out; None: all travel.
    """

    forward: ValueCodec
    backward: ValueCodec
    scale: float = 1.0
    sparsity: float | None = None

    @cached_property
    def kept(self) -> Kept | None:
        """Which values are sent; None: all."""
        return None if self.sparsity is None else Kept(self.sparsity)

    def _sent(self, columns: Columns) -> int:
        """Values sent of a row."""
        return columns.width if self.kept is None else self.kept.count(columns)

    def row_bytes(self, columns: Columns) -> int:
        """Bytes of a row forward."""
        if not columns.width:
            return 0
        positions = 0 if self.kept is None else self.kept.position_bytes(columns)
        return self.forward.row_bytes(self._sent(columns)) + positions

    def gradient_bytes(self, columns: Columns) -> int:
        """Bytes of the gradient of a row."""
        return self.backward.row_bytes(self._sent(columns)) if columns.width else 0

    def encode(self, rows: Tensor, columns: Columns) -> tuple[Tensor, Tensor | None]:
        """float32 [M, width] as uint8 [M, row_bytes], and the positions [M, k] kept; None: all."""
        if not columns.width:
            return rows.new_empty((len(rows), 0), dtype=torch.uint8), None
        if self.kept is None:
            return self.forward.encode(rows), None
        kept, packed = self.kept.choose(rows, columns)
        return torch.cat([self.forward.encode(rows.gather(1, kept)), packed], 1), kept

    def decode(self, data: Tensor, columns: Columns) -> tuple[Tensor, Tensor | None]:
        """uint8 [M, row_bytes] as float32 [M, width], and the positions [M, k] that are kept; None: all."""
        if not columns.width:
            return data.new_empty((len(data), 0), dtype=torch.float32), None
        if self.kept is None:
            return self.forward.decode(data, columns.width), None
        parts = data.split([self.forward.row_bytes(self._sent(columns)), self.kept.position_bytes(columns)], 1)
        # copied: where rows end at odd bytes, numbers of more than one byte cannot be read in place
        values, packed = (part.clone(memory_format=torch.contiguous_format) for part in parts)
        kept = self.kept.read(packed, columns)
        return _spread(self.forward.decode(values, self._sent(columns)), kept, columns.width), kept

    def encode_gradient(self, gradient: Tensor, kept: Tensor | None) -> Tensor:
        """float32 [M, width] of rows of which the positions `kept` were sent, as uint8 [M, gradient_bytes]."""
        if gradient.shape[1] == 0:
            return gradient.new_empty((len(gradient), 0), dtype=torch.uint8)
        values = gradient if kept is None else gradient.gather(1, kept)
        return self.backward.encode(values if self.scale == 1 else values * self.scale)

    def decode_gradient(self, data: Tensor, columns: Columns, kept: Tensor | None) -> Tensor:
        """uint8 [M, gradient_bytes] as float32 [M, width], zero where nothing was sent."""
        if not columns.width:
            return data.new_empty((len(data), 0), dtype=torch.float32)
        values = self.backward.decode(data, self._sent(columns))
        if self.scale != 1:
            values /= self.scale
        return values if kept is None else _spread(values, kept, columns.width)

    @property
    def clipped(self) -> int:
        """Values so far that were too large for what they travelled as."""
        return self.forward.clipped + self.backward.clipped


def exact_codec(sparsity: float | None = None) -> PooledCodec:
    """Four bytes a value, both ways; `sparsity` as in PooledCodec."""
    return PooledCodec(Exact(), Exact(), sparsity=sparsity)


@dataclass(frozen=True)
class PooledComms:
    """What pooled embeddings and their gradients travel as: options that config.comms has accepted."""

    forward: str = "none"
    backward: str = "none"  # dct with forward dct only
    dct: DctConfig = field(default_factory=DctConfig)

    @property
    def exact_steps(self) -> int:
        """Steps at the start in which everything travels as float32."""
        return self.dct.pooled_warmup_steps if self.forward == "dct" else 0

    def codec(self, examples: int) -> PooledCodec | None:
        """None where everything is float32. `examples`: of all ranks in a full step."""
        if self.forward == self.backward == "none":
            return None
        forward, backward = (DCT_VALUES if name == "dct" else name for name in (self.forward, self.backward))
        scale = 2.0 ** math.ceil(math.log2(examples)) if backward in SCALED else 1.0
        sparsity = self.dct.pooled_sparsity if self.forward == "dct" else None
        return PooledCodec(_values(forward), _values(backward), scale, sparsity)


def _values(name: str) -> ValueCodec:
    codec = value_codec(name)
    return Chunked(codec, CHUNK) if name == "int8" else codec


def _spread(values: Tensor, kept: Tensor, width: int) -> Tensor:
    """[M, k] at positions [M, k] of zeros [M, width]."""
    return values.new_zeros((len(values), width)).scatter_(1, kept, values)
