"""Rows of many values in chunks, each a row of the value codec: a scale of its own for every few values."""

import torch
from torch import Tensor

from hetrain.value_codec import ValueCodec


class Chunked:
    """A value codec that cuts rows into chunks of `size` values and what is left; see ValueCodec."""

    def __init__(self, inner: ValueCodec, size: int) -> None:
        self.name = inner.name
        self._inner, self._size = inner, size

    @property
    def clipped(self) -> int:
        """See ValueCodec."""
        return self._inner.clipped

    def row_bytes(self, dim: int) -> int:
        """See ValueCodec."""
        chunks, rest = divmod(dim, self._size)
        return chunks * self._inner.row_bytes(self._size) + (self._inner.row_bytes(rest) if rest else 0)

    def encode(self, values: Tensor) -> Tensor:
        """See ValueCodec."""
        chunks, rest = divmod(values.shape[1], self._size)
        into = values.new_empty((len(values), self.row_bytes(values.shape[1])), dtype=torch.uint8)
        cut, cut_bytes = chunks * self._size, chunks * self._inner.row_bytes(self._size)
        if chunks:
            found = self._inner.encode(values[:, :cut].reshape(-1, self._size))
            into[:, :cut_bytes] = found.view(len(values), cut_bytes)
        if rest:
            into[:, cut_bytes:] = self._inner.encode(values[:, cut:])
        return into

    def decode(self, data: Tensor, dim: int) -> Tensor:
        """See ValueCodec."""
        each = self._inner.row_bytes(self._size)
        chunks, rest = divmod(dim, self._size)
        cut, cut_bytes = chunks * self._size, chunks * each
        parts = []
        if chunks:
            found = self._inner.decode(data[:, :cut_bytes].reshape(-1, each), self._size)
            parts.append(found.view(len(data), cut))
        if rest:
            parts.append(self._inner.decode(data[:, cut_bytes:], rest))
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)
