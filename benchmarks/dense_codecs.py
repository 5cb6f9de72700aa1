"""What it costs to make dense gradients small, on one thread: CPU time and bytes per step of one of two ranks.

python benchmarks/dense_codecs.py

A step encodes what this rank sends and decodes and adds what the other one sent. Gradients are drawn so that few are
large (log-normal sizes); the first 100 steps, in which what waits grows, are left out of the figures. The break-even
speed is that of a link on which the bytes saved take as long as the codec: on slower ones it pays.
"""

import argparse
import json
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from hetrain.comms import scaled_half
from hetrain.comms.sparse_message import HEAD, Sparse, pack, unpack
from hetrain.comms.thresholds import Compressor, Parts
from hetrain.config import DctConfig
from hetrain.transport.compact import Writer, words_for

WDL = [13 * 256, 256, 256 * 256, 256, 256 * 256, 256, 26 * 128, 256]  # the paper's, D=128
MILLION = [500_000, 1024, 400_000, 1024, 100_000, 512]
CPU = torch.device("cpu")
Step = Callable[[Tensor], int]


def narrow(name: str, elements: int) -> Step:
    """Both halves of the exchange of two ranks; the other's messages are as this one's."""
    half = elements // 2

    def step(gradient: Tensor) -> int:
        sent = scaled_half.encode(gradient[half : 2 * half], name)
        total = gradient[:half] + scaled_half.decode(sent, half, name)
        summed = scaled_half.encode(total, name)
        torch.cat([scaled_half.decode(summed, half, name) for _ in range(2)])
        return len(sent) + len(summed)

    return step


def thresholded(sizes: list[int], sparsity: float) -> tuple[Step, Compressor]:
    """One message out, two added."""
    dct = DctConfig(dense_sparsity=sparsity)
    compressor = Compressor(Parts(sizes, [size < dct.smallest for size in sizes]), dct)

    def step(gradient: Tensor) -> int:
        message, total = compressor.compress(gradient), torch.zeros(len(gradient))
        for _ in range(2):
            unpack(message, len(total), CPU).add_to(total)
        return len(message)

    return step, compressor


def measure(step: Step, elements: int, warmup: int, steps: int) -> tuple[float, float]:
    """Milliseconds of CPU time (median) and bytes (mean) of a step."""
    g = torch.Generator().manual_seed(1)
    size = torch.randn(elements, generator=g).mul_(1.5).exp_()
    times, nbytes = [], []
    for _ in range(warmup + steps):
        gradient = torch.randn(elements, generator=g).mul_(size)
        start = time.thread_time()
        nbytes.append(step(gradient))
        times.append(time.thread_time() - start)
    return 1e3 * float(np.median(times[warmup:])), float(np.mean(nbytes[warmup:]))


def positions(share: float, elements: int = 1_000_000) -> dict[str, float]:
    """Bits per value sent of the ways to tell which ones are."""
    flags = torch.rand(elements, generator=torch.Generator().manual_seed(2)) < share
    found = flags.nonzero()[:, 0]
    n, gaps = len(found), np.diff(found.numpy(), prepend=-1)
    writer = Writer(words_for([n]))
    writer.integers(found.numpy())
    ours = len(pack(Sparse(0, found, torch.zeros(n)), elements)) - HEAD - scaled_half.nbytes(n)
    nbytes = {
        "differences, adaptive code": writer.nbytes,
        "differences, bytes of 7 bits": float(sum(np.ceil(np.log2(gaps + 1) / 7).clip(1))),
        "16 bits in blocks of 65,536": 2.0 * n + 2 * -(-elements // 65_536),
        "a bit per value": elements / 8,
        "taken": ours,
    }
    return {name: round(8 * size / n, 2) for name, size in nbytes.items()} | {"share": share}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for sizes in (WDL, MILLION):
        elements = sum(sizes)
        whole = 4 * elements  # a ring of two ranks
        for name in ("fp16", "bf16", "dct 0.9", "dct 0.99"):
            compressor = None
            if name.startswith("dct"):
                step, compressor = thresholded(sizes, float(name[4:]))
            else:
                step = narrow(name, elements)
            ms, nbytes = measure(step, elements, 100 if compressor else 3, args.steps)
            row = {"values": elements, "codec": name, "ms": round(ms, 3), "bytes": round(nbytes)}
            row["times fewer"] = round(whole / nbytes, 1)
            if compressor is not None:
                row["times fewer values"] = round(compressor.seen / compressor.sent, 1)
            row["break-even Mbit/s"] = round(8e-3 * (whole - nbytes) / ms)
            print(json.dumps(row), flush=True)
    for share in (0.001, 0.01, 0.1, 0.3):
        print(json.dumps(positions(share)), flush=True)


if __name__ == "__main__":
    main()
