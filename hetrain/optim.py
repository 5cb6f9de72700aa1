"""Optimizers of rows and of the dense part, and the learning-rate schedule they share.

The row optimizers are FBGEMM's EXACT_* formulas on plain tensors, for rows that no fused kernel updates: an owner's
merged gradients. A row's gradient arrives once, duplicates already summed ("exact" in FBGEMM's sense).
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from hetrain.config import DenseOptimizerConfig, RowOptimizerConfig, ScheduleConfig
from hetrain.config.checks import DENSE_OPTIMIZERS
from hetrain.errors import ConfigError

ROW_OPTIMIZERS = {"sgd": "EXACT_SGD", "adagrad": "EXACT_ADAGRAD", "rowwise_adagrad": "EXACT_ROWWISE_ADAGRAD"}
DECAYS = ("none", "linear", "cosine")


@dataclass(frozen=True)
class RowOptimizer:
    """sgd, adagrad (Duchi et al. 2011) or rowwise_adagrad: one sum per row, of the mean square over its columns."""

    name: str
    lr: float
    eps: float

    def state_width(self, dim: int) -> int:
        """Columns of optimizer state per row: 0, 1 or `dim`."""
        return {"sgd": 0, "adagrad": dim, "rowwise_adagrad": 1}[self.name]

    @property
    def additive(self) -> bool:
        """Whether states of several workers add up exactly, which held-back updates need. So for every one here."""
        return self.name in ROW_OPTIMIZERS

    @property
    def fbgemm(self) -> Any:
        """FBGEMM's EmbOptimType of the same formula."""
        from fbgemm_gpu.split_embedding_configs import EmbOptimType

        return EmbOptimType[ROW_OPTIMIZERS[self.name]]

    def step_(self, value: Tensor, state: Tensor, gradient: Tensor, lr: float) -> None:
        """One update in place. value [n, D], state [n, S], gradient [n, D], all float32; each row once."""
        if self.name == "sgd":
            value.sub_(gradient, alpha=lr)
            return
        square = gradient * gradient
        state.add_(square if self.name == "adagrad" else square.mean(dim=1, keepdim=True))
        # As FBGEMM: eps outside the root. One multiplier per row for row-wise, a quotient per element otherwise.
        root = state.sqrt().add_(self.eps)
        if self.name == "adagrad":
            value.addcdiv_(gradient, root, value=-lr)
        else:
            value.addcmul_(gradient, lr / root, value=-1.0)


def row_optimizer(cfg: RowOptimizerConfig) -> RowOptimizer:
    """The optimizer `optimizer.rows` asks for; ConfigError when it is unknown or its numbers make no sense."""
    if cfg.name not in ROW_OPTIMIZERS:
        raise ConfigError(
            f"optimizer.rows.name={cfg.name!r}: expected one of {', '.join(ROW_OPTIMIZERS)} (others have no fused CPU "
            "kernel, or a state that does not add up over workers); set optimizer.rows.name=rowwise_adagrad."
        )
    _check_number("optimizer.rows.lr", cfg.lr, above=0.0)
    _check_number("optimizer.rows.eps", cfg.eps, at_least=0.0)
    return RowOptimizer(cfg.name, float(cfg.lr), float(cfg.eps))


def dense_optimizer(params: Iterable[Parameter], cfg: DenseOptimizerConfig) -> torch.optim.Optimizer:
    """The torch optimizer `optimizer.dense` asks for; ConfigError when it is unknown or its numbers make no sense.

    torch's fused implementation everywhere: for ten small tensors on a CPU it takes a third of the time of
    foreach or of the loop (Adam: 0.12 ms against 0.31 and 0.35 for WDL's).
    """
    if cfg.name not in DENSE_OPTIMIZERS:
        raise ConfigError(
            f"optimizer.dense.name={cfg.name!r}: expected one of {', '.join(DENSE_OPTIMIZERS)}; "
            "set optimizer.dense.name=adam."
        )
    _check_number("optimizer.dense.lr", cfg.lr, above=0.0)
    _check_number("optimizer.dense.eps", cfg.eps, at_least=0.0)
    _check_number("optimizer.dense.weight_decay", cfg.weight_decay, at_least=0.0)
    common: dict[str, Any] = {"lr": float(cfg.lr), "weight_decay": float(cfg.weight_decay), "fused": True}
    if cfg.name == "sgd":
        return torch.optim.SGD(params, **common)
    if cfg.name == "adagrad":
        return torch.optim.Adagrad(params, eps=cfg.eps, **common)
    return (torch.optim.Adam if cfg.name == "adam" else torch.optim.AdamW)(params, eps=cfg.eps, **common)


class Schedule:
    """Factor on the learning rates: linear warm-up, then `none`, `linear` or `cosine` decay to `final`."""

    def __init__(self, cfg: ScheduleConfig) -> None:
        if cfg.decay not in DECAYS:
            raise ConfigError(
                f"optimizer.schedule.decay={cfg.decay!r}: expected one of {', '.join(DECAYS)}; set one of them."
            )
        _check_number("optimizer.schedule.warmup_steps", cfg.warmup_steps, at_least=0)
        _check_number("optimizer.schedule.final", cfg.final, at_least=0.0, at_most=1.0)
        if cfg.decay != "none" and cfg.decay_steps <= cfg.warmup_steps:
            raise ConfigError(
                f"optimizer.schedule.decay_steps={cfg.decay_steps}: decay={cfg.decay} ends at that step, which must "
                f"come after warmup_steps={cfg.warmup_steps}; set decay_steps to the steps of the run, or decay=none."
            )
        self.cfg = cfg

    def factor(self, step: int) -> float:
        """Factor for the update that takes the model from `step` updates to `step` + 1."""
        cfg = self.cfg
        if step < cfg.warmup_steps:
            return (step + 1) / cfg.warmup_steps
        if cfg.decay == "none":
            return 1.0
        done = min(1.0, (step - cfg.warmup_steps) / (cfg.decay_steps - cfg.warmup_steps))
        left = 1.0 - done if cfg.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
        return cfg.final + (1.0 - cfg.final) * left


def _check_number(
    key: str, value: float, *, above: float = -math.inf, at_least: float = -math.inf, at_most: float = math.inf
) -> None:
    if math.isfinite(value) and value > above and at_least <= value <= at_most:
        return
    bounds = {"above": above, "at least": at_least, "at most": at_most}
    expected = " and ".join(f"{word} {bound:g}" for word, bound in bounds.items() if math.isfinite(bound))
    raise ConfigError(f"{key}={value}: expected a number {expected}; set {key} to one.")
