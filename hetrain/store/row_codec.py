"""How rows and pushes look while they travel between caches and owners: as they are, or as a codec's bytes.

Owners keep float32. A fetched copy's base is the decoded row, so that no rounding adds up: what is pushed is the
difference to that base, and a push is taken for what its bytes mean, by the worker too.

Pushes are far smaller than rows: gradients of means over a global batch, and steps of them. Below 6e-5 float16 has
ever fewer digits, and FBGEMM's 8-bit rows shrink where a row's range is near 1e-8. So pushes are multiplied by
PUSH_SCALE, exactly, before they are encoded: float16 then has all its digits from 1.5e-8 to 16.
"""

import torch
from torch import Tensor

from hetrain.store.threshold import Dct
from hetrain.telemetry import Traffic
from hetrain.value_codec import value_codec

PUSH_SCALE = 4096.0
OF_DCT = "fp16"  # what travels of rows, and of the values of a push that reach the threshold


class RowCodec:
    """Of one embedding dim. Rows and pushes [n, D] float32 become bytes [n, row_bytes] uint8; with `none` they stay."""

    def __init__(self, option: str, dim: int, traffic: Traffic | None = None, dct: Dct | None = None) -> None:
        """`option`: none | fp16 | bf16 | int8 | dct, which encodes as fp16. `traffic`: told of values clipped.

        `dct`: how pushes are thinned out, for those that push.
        """
        self.dct, self.thin = dct, option == "dct"  # of a push most is zero
        self.exact = option == "none"
        self._name, self._traffic = OF_DCT if self.thin else option, traffic
        self.dim, self.row_bytes = dim, value_codec(self._name).row_bytes(dim)

    def rows(self, values: Tensor) -> Tensor:
        """What an owner sends."""
        return self._encoded(values)

    def read_rows(self, data: Tensor) -> Tensor:
        """Rows that came."""
        return self._decoded(data)

    def pushes(self, values: Tensor) -> Tensor:
        """What a worker sends: gradients, or differences as store/difference.py encodes them."""
        return values if self.exact else self._encoded(values * PUSH_SCALE)

    def read_pushes(self, data: Tensor) -> Tensor:
        """Pushes that came, or what one that goes out means."""
        return data if data.dtype == torch.float32 else self._decoded(data).mul_(1 / PUSH_SCALE)

    def _encoded(self, values: Tensor) -> Tensor:
        if self.exact:
            return values
        codec = value_codec(self._name)  # one of its own: several threads may encode
        data = codec.encode(values)
        if codec.clipped and self._traffic is not None:
            self._traffic.clip(codec.clipped)
        return data

    def _decoded(self, data: Tensor) -> Tensor:
        """float32 came as it was."""
        return data if data.dtype == torch.float32 else value_codec(self._name).decode(data, self.dim)
