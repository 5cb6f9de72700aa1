"""Exact metrics over the examples of all ranks, equal on every rank.

Logits and labels of all ranks meet on rank 0 (5 bytes an example); averaging per-rank AUCs would be wrong.
"""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from hetrain.data.batch import Batch
from hetrain.engine import Engine
from hetrain.errors import TrainingError
from hetrain.ranks import Ranks


@dataclass(frozen=True)
class Metrics:
    """Quality on one split. NaN where a number is not defined."""

    auc: float  # NaN without both classes
    logloss: float  # nats per example
    normalized_entropy: float  # logloss / entropy of the base rate (He et al. 2014, section 2)
    base_rate: float  # share of positive labels
    examples: int

    def as_dict(self) -> dict[str, float | int | None]:
        """For JSON, which has no NaN: undefined numbers are None."""
        return {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in asdict(self).items()}


def area_under_roc(logits: Tensor, labels: Tensor) -> float:
    """AUC of scores [n] against labels [n] in {0, 1}; a tie counts half; NaN when a class is missing.

    The Mann-Whitney form: for each distinct score, its positives beat every negative of a lower score.
    """
    scores, order = torch.sort(logits)
    positive = labels[order].double()
    _, group_sizes = torch.unique_consecutive(scores, return_counts=True)
    ends = torch.cumsum(group_sizes, 0) - 1
    seen = torch.cumsum(positive, 0)[ends]
    group_positive = torch.diff(seen, prepend=seen.new_zeros(1))
    group_negative = group_sizes.double() - group_positive
    negatives_below = torch.cumsum(group_negative, 0) - group_negative
    pairs = group_positive.sum() * group_negative.sum()
    if pairs == 0:
        return math.nan
    return float((group_positive * (negatives_below + group_negative / 2)).sum() / pairs)


def compute_metrics(logits: Tensor, labels: Tensor) -> Metrics:
    """Metrics of all examples: logits [n] float32, labels [n] in {0, 1}."""
    n = int(labels.shape[0])
    if n == 0:
        return Metrics(math.nan, math.nan, math.nan, math.nan, 0)
    x, y = logits.double(), labels.double()
    logloss = float((F.softplus(x) - y * x).mean())
    rate = float(y.mean())
    entropy = -sum(p * math.log(p) for p in (rate, 1 - rate) if p > 0)
    return Metrics(
        auc=area_under_roc(logits, labels),
        logloss=logloss,
        normalized_entropy=logloss / entropy if entropy > 0 else math.nan,
        base_rate=rate,
        examples=n,
    )


def evaluate(engine: Engine, batches: Iterable[Batch], ranks: Ranks) -> Metrics:
    """Metrics of this rank's `batches` and those of all other ranks, the same on every rank.

    Collective: every rank passes equally many batches (some may be empty). Raises TrainingError on every rank when
    a prediction is not finite.
    """
    numbers = torch.zeros(5, dtype=torch.float64)
    found = predictions(engine, batches, ranks)
    if found is not None:
        m = compute_metrics(*found)
        numbers = torch.tensor([m.auc, m.logloss, m.normalized_entropy, m.base_rate, m.examples], dtype=torch.float64)
    if not ranks.alone:
        dist.broadcast(numbers, group_src=0, group=ranks.group)
    auc, logloss, entropy, rate, examples = numbers.tolist()
    if examples and not math.isfinite(logloss):
        raise TrainingError(
            "evaluation met a prediction that is not finite: the weights have diverged. "
            "Lower optimizer.dense.lr or optimizer.rows.lr, or add optimizer.schedule.warmup_steps."
        )
    return Metrics(auc, logloss, entropy, rate, int(examples))


def predictions(engine: Engine, batches: Iterable[Batch], ranks: Ranks) -> tuple[Tensor, Tensor] | None:
    """Logits [n] and labels [n] of the batches of all ranks, in rank order, on rank 0; None elsewhere. Collective."""
    logits: list[Tensor] = []
    labels: list[Tensor] = []
    # Dropout and the like are off while predicting; a model of the user's that draws all the same must not
    # shift the random numbers of training, or how often one evaluates would alter the result.
    with torch.random.fork_rng(devices=[]), torch.no_grad(), engine.evaluating():
        for batch in batches:
            score = engine.predict(batch).detach().float().cpu()
            label = batch.labels.cpu()
            if batch.weights is not None:
                kept = batch.weights.cpu() > 0
                score, label = score[kept], label[kept]
            logits.append(score)
            labels.append(label)
    all_logits = gather(_concat(logits), ranks)
    all_labels = gather(_concat(labels).to(torch.uint8), ranks)
    if all_logits is None or all_labels is None:
        return None
    return all_logits, all_labels


def _concat(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts) if parts else torch.empty(0)


def gather(values: Tensor, ranks: Ranks) -> Tensor | None:
    """Every rank's 1-d CPU tensor, of any length, one after the other on rank 0; None elsewhere. Collective."""
    if ranks.alone:
        return values
    sizes = torch.zeros(ranks.world_size, dtype=torch.int64)
    sizes[ranks.rank] = values.shape[0]
    dist.all_reduce(sizes, group=ranks.group)
    # gloo's gather wants equal sizes
    padded = torch.zeros(int(sizes.max()), dtype=values.dtype)
    padded[: values.shape[0]] = values
    out = [torch.zeros_like(padded) for _ in range(ranks.world_size)] if ranks.first else None
    dist.gather(padded, out, group_dst=0, group=ranks.group)
    return None if out is None else torch.cat([part[:n] for part, n in zip(out, sizes.tolist(), strict=True)])
