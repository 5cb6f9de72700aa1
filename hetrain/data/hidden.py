"""The hidden model the sample's labels are drawn from.

logit = scale * (dense effects + id effects + products of the id effects of a few pairs of columns) + bias.
An id's effect shrinks with its frequency, so that nothing worth learning hides in rows a learner sees too
seldom. Pairs multiply the effects themselves: random latent vectors of their own are no harder for the
hidden model, but no network learns them from a million rows (measured: they cost 0.006 to 0.026
AUC). Scale and bias are set so that the AUC of the true probabilities is about 0.80 and their mean is the
base rate.

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
_KNOWN_AT = 5e-3  # an id of this frequency has half of a frequent id's effect
_PAIRS = 4
_SHARES = (0.40, 0.50, 0.10)  # of the logit's variance: dense, ids, pairs
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
        self._id_effect = [_effects(rng, frequency) for frequency in frequencies]
        self._pairs = _pairs(rng, self.rows)
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
        score: Floats = np.stack(self._parts(dense, ids), 1) @ self._part_scale
        return score

    def _parts(self, dense: NDArray[np.float32], ids: list[NDArray[np.int32]]) -> tuple[Floats, Floats, Floats]:
        """What dense columns, ids and pairs add to the logit, each [n], before scaling."""
        of_dense = np.tanh((dense - self._dense_mean) / (2 * self._dense_spread)) @ self._dense_weight
        of_ids, of_pairs = np.zeros(len(dense)), np.zeros(len(dense))
        for effect, column in zip(self._id_effect, ids, strict=True):
            of_ids += effect[column]
        for f, g in self._pairs:
            of_pairs += self._id_effect[f][ids[f]] * self._id_effect[g][ids[g]]
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


def _effects(rng: np.random.Generator, frequency: Floats) -> Floats:
    """[K] effects, normal, shrunk where an id is rare."""
    return rng.normal(size=len(frequency)) * frequency / (frequency + _KNOWN_AT)


def _pairs(rng: np.random.Generator, rows: list[int]) -> list[tuple[int, int]]:
    """A few pairs of columns, each column in one pair at most; of the smaller columns, whose ids meet often."""
    small = np.argsort(rows, kind="stable")[: max(len(rows) // 2, 2)]
    order = rng.permutation(small)
    return [(int(order[2 * i]), int(order[2 * i + 1])) for i in range(min(_PAIRS, len(order) // 2))]


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
