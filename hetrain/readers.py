"""From a config to the readers of a rank."""

from typing import Any

import torch

from hetrain.config import RunConfig
from hetrain.data.reader import Reader
from hetrain.ranks import Ranks

OWN_PACE = ("asp", "ssp")  # consistency.mode of ranks that do not step together


def train_reader(cfg: RunConfig, ranks: Ranks, state: dict[str, Any] | None) -> Reader:
    """The training split, from `state` on: all epochs."""
    return Reader(
        cfg.data.path,
        "train",
        cfg.train.batch_size,
        *_share(ranks),
        epochs=cfg.train.epochs,
        shuffle=cfg.data.shuffle,
        seed=cfg.seed,
        shuffle_window=cfg.data.shuffle_window,
        prefetch=_prefetch(cfg, ranks),
        lockstep=cfg.consistency.mode not in OWN_PACE,
        state=state,
    )


def _share(ranks: Ranks) -> tuple[int | None, int]:
    """Which share of the data is this rank's, of how many: it is dealt over the workers."""
    return ranks.rank if ranks.computes else None, ranks.roles.workers


def _prefetch(cfg: RunConfig, ranks: Ranks) -> int:
    """Batches read ahead. Where the CPU computes, reading threads would take time slices from compute threads that
    wait for each other: 42 to 45 ms a step of 4,096 in place of 36 on two idle cores."""
    if not ranks.computes:  # there is nothing to read
        return 0
    if cfg.data.prefetch is not None:
        return cfg.data.prefetch
    on_gpu = cfg.launch.device == "cuda" or (cfg.launch.device == "auto" and torch.cuda.is_available())
    return 4 if on_gpu else 0


def split_reader(cfg: RunConfig, ranks: Ranks, split: str) -> Reader:
    """One pass over a split, in the data set's order."""
    return Reader(cfg.data.path, split, cfg.train.eval_batch_size, *_share(ranks), prefetch=_prefetch(cfg, ranks))
