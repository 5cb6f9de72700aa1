"""What travels, by path and mode: the options there are, and where each of them runs. Pure rules, no torch."""

import math
from dataclasses import dataclass

OPTIONS = ("none", "fp16", "bf16", "int8", "dct")
PATHS = ("rows", "pooled_forward", "pooled_backward", "dense")

# Paths that a mode has: rows travel between caches and owners, pooled embeddings between TorchRec's ranks.
OF_MODE = {
    "bsp": ("pooled_forward", "pooled_backward", "dense"),
    "het": ("rows", "dense"),
    "asp": ("rows", "dense"),
    "ssp": ("rows", "dense"),
}

# Options other than none that run, by mode and path, on the CPU and on CUDA alike.
RUNS: dict[tuple[str, str], tuple[str, ...]] = {
    ("bsp", "pooled_forward"): ("fp16", "bf16", "int8", "dct"),
    ("bsp", "pooled_backward"): ("fp16", "bf16", "int8", "dct"),
    ("bsp", "dense"): ("fp16", "bf16", "dct"),
    ("het", "rows"): ("fp16", "bf16", "int8", "dct"),
    ("het", "dense"): ("fp16", "bf16", "dct"),
    ("asp", "rows"): ("fp16", "bf16", "int8", "dct"),
    ("asp", "dense"): ("fp16", "bf16", "dct"),
    ("ssp", "rows"): ("fp16", "bf16", "int8", "dct"),
    ("ssp", "dense"): ("fp16", "bf16", "dct"),
}


@dataclass(frozen=True)
class Codecs:
    """The option of every path of a run; none where the mode has no such path."""

    rows: str = "none"
    pooled_forward: str = "none"
    pooled_backward: str = "none"
    dense: str = "none"


def of_name(name: str, path: str) -> str:
    """What `comms=name` means for `path`, where no finer key says otherwise."""
    return "bf16" if name == "int8" and path == "dense" else name


def kept(values: int, sparsity: float) -> int:
    """Of so many values those that are sent where the share `sparsity` is left out, or waits: at least one."""
    return max(1, values - math.floor(values * sparsity + 1e-6))
