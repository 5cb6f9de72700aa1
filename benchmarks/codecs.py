"""Time of encoding and decoding against the bytes they save: the link speed below which a codec pays.

    python benchmarks/codecs.py

One thread, no network. Every rank encodes what it sends and decodes as much: a codec pays on links on which the bytes
it saves would take longer than that. Quote it from a quiet machine.
"""

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from comms import print_table

from hetrain.codec import OPTIONS
from hetrain.comms.columns import Columns
from hetrain.comms.pooled_codec import PooledCodec, PooledComms
from hetrain.config import DctConfig
from hetrain.value_codec import ValueCodec, value_codec

EXAMPLES = 512  # of both ranks
SPARSITY = 0.95
WINDOWS, WINDOW_S = 15, 0.05  # the median of the windows counts


def main() -> None:
    """Pooled embeddings of 13 columns of width 16 and 128, forward and back, and rows of the store."""
    torch.set_num_threads(1)
    rows = []
    for dim in (16, 128):
        columns = Columns((dim,) * 13)
        values, width = torch.randn(EXAMPLES, columns.width) * 0.1, columns.width
        for option in OPTIONS[1:]:
            codec = PooledComms(option, option, DctConfig(pooled_sparsity=SPARSITY)).codec(EXAMPLES)
            assert codec is not None
            data, kept = codec.encode(values, columns)
            forward = partial(_forward, codec, values, columns)
            back = partial(_backward, codec, values, columns, kept)
            rows.append(_line(f"pooled forward, {width} wide", option, values, data, forward))
            gradient = codec.encode_gradient(values, kept)
            rows.append(_line(f"pooled backward, {width} wide", option, values, gradient, back))
    for dim in (16, 128):
        values = torch.randn(4096, dim) * 0.1
        for option in ("fp16", "bf16", "int8"):
            there = value_codec(option)
            rows.append(
                _line(f"values, D={dim}", option, values, there.encode(values), partial(_values, there, values))
            )
    print_table(["what", "comms", "bytes a value", "ns a value", "pays below Mbit/s"], rows)


def _forward(codec: PooledCodec, values: Tensor, columns: Columns) -> None:
    codec.decode(codec.encode(values, columns)[0], columns)


def _backward(codec: PooledCodec, values: Tensor, columns: Columns, kept: Tensor | None) -> None:
    codec.decode_gradient(codec.encode_gradient(values, kept), columns, kept)


def _values(codec: ValueCodec, values: Tensor) -> None:
    codec.decode(codec.encode(values), values.shape[1])


def _line(what: str, option: str, values: Tensor, sent: Tensor, once: Callable[[], None]) -> list[str]:
    n, seconds = values.numel(), _seconds(once)
    pays = 8 * (4 * n - sent.numel()) / seconds / 1e6
    return [what, option, f"{sent.numel() / n:.3f}", f"{seconds / n * 1e9:.2f}", f"{pays:,.0f}"]


def _seconds(once: Callable[[], None]) -> float:
    """Of one call."""
    once()
    found = []
    for _ in range(WINDOWS):
        calls, start = 0, time.perf_counter()
        while time.perf_counter() - start < WINDOW_S:
            once()
            calls += 1
        found.append((time.perf_counter() - start) / calls)
    return statistics.median(found)


if __name__ == "__main__":
    main()
