"""What of a gradient is sent, against one tensor after the other in plain numpy; nothing is lost."""

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hetrain.comms.sparse_message import unpack
from hetrain.comms.thresholds import Compressor, Parts
from hetrain.config import DctConfig

CPU = torch.device("cpu")


def rounded(values: np.ndarray) -> np.ndarray:
    """As they arrive."""
    largest = float(np.abs(values).max(initial=0))
    scale = np.float32(2.0) ** (15 - max(math.frexp(largest)[1], -100))
    return (values * scale).astype(np.float16).astype(np.float32) / scale


class Reference:
    """One tensor after the other; thresholds by sorting."""

    def __init__(self, sizes: list[int], whole: list[bool], dct: DctConfig) -> None:
        self.waiting = [np.zeros(size, np.float32) for size in sizes]
        self.thresholds: list[float | None] = [None] * len(sizes)
        self.whole, self.dct, self.step, self.found = whole, dct, 0, -1

    def send(self, gradients: list[np.ndarray]) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """By tensor the values that arrive, 0 where none do, and which were sent."""
        f = [g + w for g, w in zip(gradients, self.waiting, strict=True)]
        masks = [np.ones(len(one), bool) for one in f]
        if self.step >= self.dct.dense_warmup_steps and self.dct.dense_sparsity > 0:
            due = self.found < 0 or self.step - self.found >= self.dct.refresh_steps
            self.found = self.step if due else self.found
            for i, one in enumerate(f):
                if not self.whole[i]:
                    masks[i] = self.mask(i, one, due)
        sent = rounded(np.concatenate([one[m] for one, m in zip(f, masks, strict=True)]))
        arrived = [np.zeros_like(one) for one in f]
        for values, mask, part in zip(
            arrived, masks, np.split(sent, np.cumsum([m.sum() for m in masks])[:-1]), strict=True
        ):
            values[mask] = part
        self.waiting = [one - values for one, values in zip(f, arrived, strict=True)]
        self.step += 1
        return arrived, masks

    def mask(self, i: int, f: np.ndarray, due: bool) -> np.ndarray:
        magnitudes = sorted(np.abs(f).tolist(), reverse=True)
        most = max(1, math.ceil(round(len(f) * (1 - self.dct.dense_sparsity), 6)))
        least = float(np.finfo(np.float32).tiny)
        threshold = self.thresholds[i]
        count = 0 if threshold is None else (np.abs(f) >= np.float32(threshold)).sum()
        if due or threshold is None or count > 1.5 * most or 1.5 * count < most:
            threshold = self.thresholds[i] = max(magnitudes[most - 1], least)
        return np.abs(f) >= np.float32(threshold)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_against_the_reference_and_nothing_is_lost(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 60), min_size=1, max_size=5))
    whole = [size < 12 for size in sizes]
    dct = DctConfig(
        dense_sparsity=data.draw(st.sampled_from([0.0, 0.3, 0.5, 0.9, 0.99])),
        refresh_steps=data.draw(st.integers(1, 5)),
        dense_warmup_steps=data.draw(st.integers(0, 2)),
        smallest=12,
    )
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    compressor, reference = Compressor(Parts(sizes, whole), dct), Reference(sizes, whole, dct)
    pushed = np.zeros(sum(sizes))
    arrived = np.zeros(sum(sizes))
    kept_back = 0
    for step in range(8):
        size = data.draw(st.sampled_from([1.0, 1e-6, 30.0]), label="size")
        gradients = [(size * rng.standard_normal(n)).astype(np.float32) for n in sizes]
        if data.draw(st.booleans(), label="mostly zero"):
            gradients = [g * (rng.random(len(g)) < 0.1) for g in gradients]
        flat = torch.from_numpy(np.concatenate(gradients))
        before = flat.clone()
        message = compressor.compress(flat)
        assert torch.equal(flat, before)
        total = torch.zeros(len(flat))
        unpack(message, len(flat), CPU).add_to(total)
        got = compressor.parts.flat(total).numpy()
        expected, masks = reference.send(gradients)
        np.testing.assert_array_equal(got, np.concatenate(expected), err_msg=f"step {step}")
        np.testing.assert_array_equal(compressor.waiting.numpy(), np.concatenate(reference.waiting))
        kept_back += sum(int((~mask).sum()) for mask in masks)
        assert compressor.sent == compressor.seen - kept_back
        pushed += flat.double().numpy()
        arrived += got
    np.testing.assert_allclose(arrived + compressor.waiting.numpy(), pushed, rtol=1e-5, atol=1e-5)


def gradients(steps: int, elements: int) -> torch.Tensor:
    return torch.randn(steps, elements, generator=torch.Generator().manual_seed(2))


def test_a_fixed_threshold_lets_no_more_through_as_what_waits_grows() -> None:
    compressor = Compressor(Parts([20_000], [False]), DctConfig(dense_sparsity=0.99, refresh_steps=1000))
    for gradient in gradients(60, 20_000):
        before = compressor.sent
        compressor.compress(gradient)
        assert 1 <= compressor.sent - before <= 1.5 * 200


def test_gradients_that_shrink_are_sent_all_the_same() -> None:
    compressor = Compressor(Parts([20_000], [False]), DctConfig(dense_sparsity=0.99, refresh_steps=1000))
    for step, gradient in enumerate(gradients(60, 20_000)):
        before = compressor.sent
        compressor.compress(gradient * 0.8**step)
        assert compressor.sent - before >= 200 / 1.5


def test_zeros_are_never_sent() -> None:
    compressor = Compressor(Parts([1000], [False]), DctConfig())
    compressor.compress(torch.zeros(1000))
    assert compressor.sent == 0
    compressor.compress(torch.zeros(1000).index_fill(0, torch.tensor([3]), 1e-3))
    assert compressor.sent == 1


def test_what_is_not_a_number_is_sent_at_once() -> None:
    compressor = Compressor(Parts([1000], [False]), DctConfig())
    compressor.compress(torch.ones(1000))
    bad = torch.zeros(1000)
    bad[17] = float("nan")
    total = torch.zeros(1000)
    unpack(compressor.compress(bad), 1000, CPU).add_to(total)
    assert total[17].isnan()


def test_state_goes_on_bit_for_bit() -> None:
    parts, dct = Parts([5, 40, 300], [True, False, False]), DctConfig(dense_sparsity=0.9, refresh_steps=7, smallest=6)
    data = gradients(20, 345)
    one = Compressor(parts, dct)
    for gradient in data[:10]:
        one.compress(gradient)
    state: dict[str, Any] = one.state_dict()
    saved = copy.deepcopy(state)
    other = Compressor(parts, dct)
    other.compress(data[0])
    other.load_state_dict(state)
    for gradient in data[10:]:
        assert torch.equal(one.compress(gradient), other.compress(gradient))
    assert (one.sent, one.seen) == (other.sent, other.seen)
    for name in ("waiting", "thresholds"):
        assert torch.equal(state[name], saved[name])  # neither changes what was saved


@pytest.mark.parametrize("changed", [DctConfig(dense_sparsity=0.5, smallest=6), DctConfig(smallest=50)])
def test_other_settings_keep_what_waits(changed: DctConfig) -> None:
    sizes, data = [40, 300, 5], gradients(4, 345)
    one = Compressor(Parts(sizes, [s < 6 for s in sizes]), DctConfig(smallest=6))
    one.compress(data[0])
    other = Compressor(Parts(sizes, [s < changed.smallest for s in sizes]), changed)
    other.load_state_dict(one.state_dict())
    assert torch.equal(one.waiting, other.waiting)
    total = torch.zeros(345)
    unpack(other.compress(data[1]), 345, CPU).add_to(total)
    torch.testing.assert_close(other.parts.flat(total) + other.waiting, one.waiting + data[1], rtol=1e-5, atol=1e-6)


def test_a_threshold_of_another_sparsity_is_found_anew() -> None:
    """Even where it would let about as much through."""
    parts, values = Parts([2000], [False]), torch.arange(2000.0)
    one, other = Compressor(parts, DctConfig()), Compressor(parts, DctConfig(dense_sparsity=0.988))
    one.compress(values)
    assert one.sent == 20
    other.load_state_dict(one.state_dict())
    other.compress(values - other.waiting)
    assert other.sent == 20 + 24
