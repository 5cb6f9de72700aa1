"""Rows of floats as bytes on the wire, and back."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

LARGEST_HALF = torch.finfo(torch.float16).max
_ROW_SCALE = 8  # bytes that FBGEMM's quantised rows add: scale and offset as float32
_IN_STEP = 4  # values: FBGEMM fills rows up to such a multiple on CUDA, and does not on a CPU


class ValueCodec(Protocol):
    """Floats [M, D] to uint8 [M, row_bytes(D)] and back, on any device; each reads what another wrote."""

    name: str

    @property
    def clipped(self) -> int:
        """Values that were too large for it, so far."""
        ...

    def row_bytes(self, dim: int) -> int:
        """Bytes of one row of `dim` values."""
        ...

    def encode(self, values: Tensor) -> Tensor:
        """float32 [M, D] as uint8 [M, row_bytes(D)]."""
        ...

    def decode(self, data: Tensor, dim: int) -> Tensor:
        """uint8 [M, row_bytes(dim)] as float32 [M, dim]."""
        ...


@dataclass
class Exact:
    """Four bytes a value."""

    name: str = "none"
    clipped: int = 0

    def row_bytes(self, dim: int) -> int:
        """See ValueCodec."""
        return 4 * dim

    def encode(self, values: Tensor) -> Tensor:
        """See ValueCodec."""
        return values.contiguous().view(torch.uint8)

    def decode(self, data: Tensor, dim: int) -> Tensor:
        """See ValueCodec."""
        return data.contiguous().view(torch.float32)


@dataclass
class Half:
    """16 bits a value. float16: 11 significant bits, at most 65,504 (larger values are clipped and counted);
    bfloat16: 8 significant bits and float32's range."""

    name: str
    dtype: torch.dtype
    clipped: int = 0

    def row_bytes(self, dim: int) -> int:
        """See ValueCodec."""
        return 2 * dim

    def encode(self, values: Tensor) -> Tensor:
        """See ValueCodec."""
        if self.dtype == torch.float16 and not _all_within(values, LARGEST_HALF):
            self.clipped += int((values.abs() > LARGEST_HALF).sum())
            values = values.clamp(-LARGEST_HALF, LARGEST_HALF)
        return values.to(self.dtype).contiguous().view(torch.uint8)

    def decode(self, data: Tensor, dim: int) -> Tensor:
        """See ValueCodec."""
        return data.contiguous().view(self.dtype).float()


@dataclass
class RowScaled:
    """8 bits a value between the row's least and largest (FBGEMM's fused 8-bit rows), and 8 bytes a row."""

    name: str = "int8"
    clipped: int = 0

    def row_bytes(self, dim: int) -> int:
        """See ValueCodec."""
        return dim + -dim % _IN_STEP + _ROW_SCALE

    def encode(self, values: Tensor) -> Tensor:
        """See ValueCodec."""
        if missing := -values.shape[1] % _IN_STEP:
            values = torch.cat([values, values[:, -1:].expand(-1, missing)], 1)
        found: Tensor = torch.ops.fbgemm.FloatToFused8BitRowwiseQuantized(values.contiguous())
        if bool(values.sum().isnan()):  # FBGEMM makes NaN the row's least value, and a loss that diverged looks sound
            scale = torch.full((2,), torch.nan, device=values.device).view(torch.uint8)
            found[values.isnan().any(1), -_ROW_SCALE:] = scale
        return found

    def decode(self, data: Tensor, dim: int) -> Tensor:
        """See ValueCodec."""
        found: Tensor = torch.ops.fbgemm.Fused8BitRowwiseQuantizedToFloat(data.contiguous())
        return found[:, :dim]


def _all_within(values: Tensor, most: float) -> bool:
    """Whether no magnitude exceeds `most`; not where one is not a number."""
    if not values.numel():
        return True
    return float(torch.maximum(-values.amin(), values.amax())) <= most  # 0.6 of aminmax's time


def value_codec(name: str) -> ValueCodec:
    """A codec of its own, with its own count: none | fp16 | bf16 | int8. ValueError for others."""
    if name == "none":
        return Exact()
    if name in ("fp16", "bf16"):
        return Half(name, torch.float16 if name == "fp16" else torch.bfloat16)
    if name == "int8":
        import fbgemm_gpu  # noqa: F401 - its operators are there once it is imported

        return RowScaled()
    raise ValueError(f"no value codec {name!r}")
