import contextlib
import math

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hetrain.data.batch import Batch
from hetrain.errors import TrainingError
from hetrain.evaluate import area_under_roc, compute_metrics, evaluate
from hetrain.ranks import Ranks
from tests.ranks import run_ranks


class Echo:
    """Predicts the dense column."""

    opened = 0

    @contextlib.contextmanager
    def evaluating(self):
        self.opened += 1
        yield

    def predict(self, batch):
        return batch.dense[:, 0]


def batch_of(logits, labels, weights=None):
    n = len(logits)
    sparse = KeyedJaggedTensor(
        keys=["a"], values=torch.zeros(n, dtype=torch.long), lengths=torch.ones(n, dtype=torch.int32)
    )
    return Batch(torch.as_tensor(logits).float().reshape(n, 1), sparse, torch.as_tensor(labels).float(), n, weights)


def slow_auc(logits, labels):
    wins = total = 0.0
    for p in logits[labels == 1]:
        for n in logits[labels == 0]:
            total += 1
            wins += 1.0 if p > n else 0.5 if p == n else 0.0
    return wins / total


@pytest.mark.parametrize("levels", [1, 3, 17, 10_000])
def test_auc_equals_pair_counting_with_ties(levels):
    rng = np.random.default_rng(levels)
    for n in (2, 5, 200):
        logits = rng.integers(0, levels, n) / 3.0
        labels = rng.integers(0, 2, n)
        labels[:2] = [0, 1]
        got = area_under_roc(torch.tensor(logits), torch.tensor(labels))
        assert got == pytest.approx(slow_auc(logits, labels), abs=1e-12)


def test_metrics_against_the_formulas():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=1000), rng.integers(0, 2, 1000)
    m = compute_metrics(torch.tensor(x), torch.tensor(y))
    p = 1 / (1 + np.exp(-x))
    logloss = -(y * np.log(p) + (1 - y) * np.log(1 - p)).mean()
    rate = y.mean()
    assert m.logloss == pytest.approx(logloss)
    assert m.base_rate == pytest.approx(rate)
    assert m.normalized_entropy == pytest.approx(logloss / -(rate * np.log(rate) + (1 - rate) * np.log(1 - rate)))


def test_one_class_has_no_auc_and_no_examples_no_numbers():
    m = compute_metrics(torch.randn(5), torch.ones(5))
    assert math.isnan(m.auc)
    assert math.isnan(m.normalized_entropy)
    assert math.isfinite(m.logloss)
    assert m.as_dict()["auc"] is None
    assert compute_metrics(torch.empty(0), torch.empty(0)).examples == 0


def test_padding_does_not_count():
    padded = batch_of([1.0, -1.0, 5.0], [1, 0, 0], weights=torch.tensor([1.0, 1.0, 0.0]))
    assert evaluate(Echo(), [padded], Ranks()) == evaluate(Echo(), [batch_of([1.0, -1.0], [1, 0])], Ranks())


def test_diverged_weights_are_an_error():
    with pytest.raises(TrainingError, match="lr"):
        evaluate(Echo(), [batch_of([float("nan"), 0.0], [1, 0])], Ranks())


def data():
    rng = np.random.default_rng(3)
    return rng.integers(-9, 9, 500).astype(np.float32) / 4, rng.integers(0, 2, 500)


def on_a_rank(rank, world_size, cuts):
    logits, labels = data()
    mine = slice(cuts[rank], cuts[rank + 1])
    x, y = logits[mine], labels[mine]
    batches = [batch_of(x[:7], y[:7]), batch_of(x[7:], y[7:])]
    return evaluate(Echo(), batches, Ranks(rank, world_size, dist.group.WORLD))


@pytest.mark.parametrize("cuts", [(0, 100, 500), (0, 0, 500), (0, 500, 500)])
def test_all_ranks_get_the_numbers_of_the_whole(cuts):
    logits, labels = data()
    whole = evaluate(Echo(), [batch_of(logits, labels)], Ranks())
    assert run_ranks(2, on_a_rank, cuts) == [whole, whole]
