"""The hidden model the sample's labels are drawn from.

logit = scale * (dense effects + id effects + products of latent vectors of a few pairs of columns) + bias.
An id's effect and latent vector shrink with its frequency, so that nothing worth learning hides in rows a
learner sees too seldom. Scale and bias are set so that the AUC of the true probabilities is about 0.80
and their mean is the base rate.

Suffixes: n examples, I dense columns, F sparse columns, K ids of a column.
"""

import numpy as np
from numpy.typing import NDArray

from hetrain.config import SampleConfig
from hetrain.errors import ConfigError

Floats = NDArray[np.float64]

BEST_AUC = 0.80
# A small Criteo: its order of sizes, its many tiny columns.
CARDINALITIES = [
    1460, 583, 9000, 7000, 305, 24, 4500, 633, 3, 3500, 2800, 8000, 2200,
    27, 3000, 6500, 10, 2000, 1200, 4, 8500, 18, 15, 4000, 105, 3200,
]  # fmt: skip
_MISSING = 0.03  # share of id 0, and of dense values that are 0
_KNOWN_AT = 1e-3  # an id of this frequency has half of a frequent id's effect
_PAIRS, _LATENT = 8, 2
_SHARES = (0.30, 0.50, 0.20)  # of the logit's variance: dense, ids, pairs
_CALIBRATION_ROWS = 65_536


def random_stream(seed: int, stream: int, chunk: int = 0) -> np.random.Generator:
    """Independent generators: stream 0 the hidden model, 1 its calibration, 2 the rows of a chunk."""
    return np.random.default_rng([seed, stream, chunk])


class HiddenModel:
    """Draws examples and their true probabilities."""

    def __init__(self, cfg: SampleConfig) -> None:
        _check(cfg)
        self.rows = list(cfg.cardinalities or CARDINALITIES)
        rng = random_stream(cfg.seed, 0)
        frequencies = [_frequencies(rows, cfg.zipf) for rows in self.rows]
        self._cumulative = [np.cumsum(frequency) / frequency.sum() for frequency in frequencies]
        self._dense_mean, self._dense_spread = rng.uniform(0.5, 3.0, cfg.dense), rng.uniform(0.5, 1.5, cfg.dense)
        self._dense_weight = rng.normal(size=cfg.dense)
        self._id_effect = [_effects(rng, frequency, ()) for frequency in frequencies]
        self._pairs = _pairs(rng, len(self.rows))
        self._latent = {
            f: _effects(rng, frequencies[f], (_LATENT,)) for f in sorted({f for p in self._pairs for f in p})
        }
        self._part_scale = np.ones(3)
        self._scale, self._bias = 1.0, 0.0
        self._calibrate(cfg)

    def draw(self, rng: np.random.Generator, n: int) -> tuple[NDArray[np.float32], list[NDArray[np.int32]], Floats]:
        """Dense [n, I] float32, ids F x [n] int32 and the probability of a click [n]."""
        dense, ids = self._inputs(rng, n)
        return dense, ids, _sigmoid(self._scale * self._score(dense, ids) + self._bias)

    def _inputs(self, rng: np.random.Generator, n: int) -> tuple[NDArray[np.float32], list[NDArray[np.int32]]]:
        noise = rng.standard_normal((n, len(self._dense_mean)), np.float32)
        dense = np.maximum(noise * self._dense_spread + self._dense_mean, 0.0).astype(np.float32)
        dense[rng.random(dense.shape, np.float32) < _MISSING] = 0.0
        ids = [np.searchsorted(steps, rng.random(n), "right").astype(np.int32) for steps in self._cumulative]
        return dense, ids

    def _score(self, dense: NDArray[np.float32], ids: list[NDArray[np.int32]]) -> Floats:
        of_dense, of_ids, of_pairs = self._parts(dense, ids)
        return self._part_scale[0] * of_dense + self._part_scale[1] * of_ids + self._part_scale[2] * of_pairs

    def _parts(self, dense: NDArray[np.float32], ids: list[NDArray[np.int32]]) -> tuple[Floats, Floats, Floats]:
        """What dense columns, ids and pairs add to the logit, each [n], before scaling."""
        of_dense = np.tanh((dense - self._dense_mean) / (2 * self._dense_spread)) @ self._dense_weight
        of_ids, of_pairs = np.zeros(len(dense)), np.zeros(len(dense))
        for effect, column in zip(self._id_effect, ids, strict=True):
            of_ids += effect[column]
        for f, g in self._pairs:
            of_pairs += np.einsum("nl,nl->n", self._latent[f][ids[f]], self._latent[g][ids[g]])
        return of_dense, of_ids, of_pairs

    def _calibrate(self, cfg: SampleConfig) -> None:
        dense, ids = self._inputs(random_stream(cfg.seed, 1), _CALIBRATION_ROWS)
        spread = np.array([part.std() for part in self._parts(dense, ids)])
        shares = np.where(spread > 0, _SHARES, 0.0)
        self._part_scale = np.sqrt(shares / max(shares.sum(), 1e-9)) / np.maximum(spread, 1e-9)
        score = np.sort(self._score(dense, ids))
        low, high = 0.0, 16.0
        for _ in range(24):
            self._scale = (low + high) / 2
            self._bias = _bias_for(self._scale * score, cfg.base_rate)
            auc = _expected_auc(_sigmoid(self._scale * score + self._bias))
            low, high = (self._scale, high) if auc < BEST_AUC else (low, self._scale)


def _check(cfg: SampleConfig) -> None:
    checks = [
        ("rows", cfg.rows, cfg.rows >= 10, "at least 10"),
        ("dense", cfg.dense, cfg.dense >= 1, "at least 1"),
        ("cardinalities", cfg.cardinalities, all(rows >= 2 for rows in cfg.cardinalities), "numbers of at least 2"),
        ("zipf", cfg.zipf, cfg.zipf >= 0, "0 (even) or above"),
        ("base_rate", cfg.base_rate, 0 < cfg.base_rate < 1, "a share between 0 and 1"),
        ("seed", cfg.seed, cfg.seed >= 0, "0 or above"),
    ]
    for key, value, good, expected in checks:
        if not good:
            raise ConfigError(f"data.sample.{key}={value}: expected {expected}.")


def _frequencies(rows: int, zipf: float) -> Floats:
    """[K] share of each id of a column: 0 is missing, 1 .. follow a power law."""
    ranked = np.arange(1, rows, dtype=np.float64) ** -zipf
    return np.concatenate([[_MISSING], (1 - _MISSING) * ranked / ranked.sum()])


def _effects(rng: np.random.Generator, frequency: Floats, shape: tuple[int, ...]) -> Floats:
    """[K, *shape] effects, normal, shrunk where an id is rare."""
    shrunk = frequency / (frequency + _KNOWN_AT)
    return rng.normal(size=(len(frequency), *shape)) * shrunk.reshape(-1, *(1 for _ in shape))


def _pairs(rng: np.random.Generator, columns: int) -> list[tuple[int, int]]:
    """A few pairs of columns, each column in one pair at most."""
    order = rng.permutation(columns)
    return [(int(order[2 * i]), int(order[2 * i + 1])) for i in range(min(_PAIRS, columns // 2))]


def _sigmoid(x: Floats) -> Floats:
    return 1 / (1 + np.exp(-x))


def _bias_for(logit: Floats, base_rate: float) -> float:
    low, high = -40.0, 40.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if _sigmoid(logit + middle).mean() < base_rate else (low, middle)
    return (low + high) / 2


def _expected_auc(probability: Floats) -> float:
    """AUC of ascending true probabilities, in expectation over the labels."""
    negative = 1 - probability
    below = np.cumsum(negative) - negative / 2
    return float((probability * below).sum() / (probability.sum() * negative.sum()))
