"""Sums of gradients in fewer bytes on real ranks: equal everywhere bit for bit, close to the sum, bytes as sent."""

from typing import Any

import numpy as np
import pytest
import torch

from hetrain.comms import sparse_message
from hetrain.comms.dense import DenseReducer, wrap_dense
from hetrain.comms.dense_exchange import DenseComms, exchange
from hetrain.comms.thresholds import Compressor, Parts
from hetrain.config import DctConfig
from hetrain.errors import ConfigError, TrainingError
from hetrain.telemetry import Traffic
from tests.comms.test_dense import _data, _model
from tests.handed_to_gloo import handed_to_gloo
from tests.ranks import run_ranks

SIZES = [3, 90_000, 200, 5]  # the messages of two ranks exceed the room a receive starts with
STEPS = 4
DCT = DctConfig(dense_sparsity=0.9, refresh_steps=3, dense_warmup_steps=1)


def _gradients(rank: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(rank)
    return torch.randn(STEPS, sum(SIZES), generator=g) * torch.tensor([1e-7, 1.0, 30.0, 1e4])[:, None]


def _sums(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for number, name in enumerate(("fp16", "bf16", "dct")):
        traffic = Traffic()
        parts = Parts(SIZES, [size < DCT.smallest for size in SIZES])
        compressor = Compressor(parts, DCT) if name == "dct" else None
        summing = exchange(DenseComms(name, DCT, 30), compressor, torch.device("cpu"), traffic, None, number)
        sums, nbytes, handed = [], [], []
        for gradient in _gradients(rank):
            before = traffic.bytes["dense"]
            with handed_to_gloo() as given:
                summing.start(gradient)
                nbytes.append(traffic.bytes["dense"] - before)  # all of it: evaluation may come before `finish`
                sums.append(summing.finish().numpy().copy())
            handed.append(given.nbytes)
            assert traffic.bytes["dense"] - before == nbytes[-1]
        waiting = None if compressor is None else compressor.waiting.numpy()
        found[name] = {"sums": sums, "bytes": nbytes, "handed": handed, "waiting": waiting}
    return found


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return run_ranks(request.param, _sums)


@pytest.mark.parametrize("name", ["fp16", "bf16", "dct"])
def test_every_rank_has_the_same_bits_and_bytes_are_those_handed_over(ranks: list[dict[str, Any]], name: str) -> None:
    for rank in ranks:
        for ours, first in zip(rank[name]["sums"], ranks[0][name]["sums"], strict=True):
            np.testing.assert_array_equal(ours, first)
        assert rank[name]["bytes"] == rank[name]["handed"]


@pytest.mark.parametrize(("name", "unit"), [("fp16", 2.0**-11), ("bf16", 2.0**-8)])
def test_narrow_sums_are_rounded_twice(ranks: list[dict[str, Any]], name: str, unit: float) -> None:
    every = [_gradients(rank).double().numpy() for rank in range(len(ranks))]
    adds_up = np.arange(sum(SIZES)) // -(-sum(SIZES) // len(ranks))  # the rank that does, of every value
    for step, got in enumerate(ranks[0][name]["sums"]):
        parts = [gradients[step] for gradients in every]
        came = sum(np.abs(part) * (adds_up != rank) for rank, part in enumerate(parts))
        bound = 1.01 * unit * (came + np.abs(sum(parts)))
        np.testing.assert_array_less(np.abs(got - sum(parts)), bound + 1e-11 * np.abs(got).max())
    world_size = len(ranks)
    slice_bytes = 2 * -(-sum(SIZES) // world_size)
    for nbytes in ranks[0][name]["bytes"]:  # an exponent, and what rounding up to words adds
        assert 0 <= nbytes - 2 * (world_size - 1) * slice_bytes <= 2 * (world_size - 1) * 6


def test_thresholded_sums_lose_nothing(ranks: list[dict[str, Any]]) -> None:
    wanted = sum(_gradients(rank).double().sum(0).numpy() for rank in range(len(ranks)))
    got = np.sum([np.asarray(s, np.float64) for s in ranks[0]["dct"]["sums"]], 0)
    waiting = np.sum([np.asarray(rank["dct"]["waiting"], np.float64) for rank in ranks], 0)
    assert np.abs(waiting[3:-205]).max() > 0
    np.testing.assert_allclose(got + waiting, wanted, rtol=1e-5, atol=2e-2)  # of values of 1e4
    first, *later = ranks[0]["dct"]["bytes"]  # the warm-up's step, then a tenth of it with positions
    assert all(nbytes < 0.3 * first for nbytes in later)


OPTIONS = {
    "none": DenseComms(timeout_s=5),
    "fp16": DenseComms("fp16", timeout_s=5),
    "bf16": DenseComms("bf16", timeout_s=5),
    "everything": DenseComms("dct", DctConfig(dense_sparsity=0.0), 5),
    "warm-up": DenseComms("dct", DctConfig(dense_warmup_steps=9, smallest=4), 5),
    "half": DenseComms("dct", DctConfig(dense_sparsity=0.5, smallest=4), 5),
}


def _train(rank: int, world_size: int) -> dict[str, Any]:
    """Weights after some steps with every option; DDP orders its buckets anew after the first."""
    found = {}
    for number, (name, comms) in enumerate(OPTIONS.items()):
        plain = _model()
        reducer = DenseReducer(Traffic(), comms=comms, number=number)
        model = wrap_dense(plain, reducer)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        x, y = _data()
        for cut in ([0, 6, 12], [0, 1, 12], [0, 12, 12], [0, 0, 12]):
            lo, hi = cut[rank], cut[rank + 1]
            logits = model(x[lo:hi]).squeeze(1)
            loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, y[lo:hi], reduction="sum") / 12
            optimizer.zero_grad()
            loss.backward()
            reducer.wait()
            optimizer.step()
        found[name] = [p.detach().numpy().copy() for p in plain.parameters()]
        found[f"{name} report"] = reducer.report()
    return found


def test_training_with_every_option() -> None:
    first, second = run_ranks(2, _train)
    close = {"fp16": 2e-3, "bf16": 2e-2, "everything": 2e-3, "warm-up": 2e-3}
    for name in OPTIONS:
        for ours, theirs in zip(first[name], second[name], strict=True):
            np.testing.assert_array_equal(ours, theirs)
        pairs = list(zip(first[name], first["none"], strict=True))
        furthest = max(np.abs(ours - exact).max() for ours, exact in pairs)
        assert (furthest == 0) == (name == "none")
        assert furthest <= close.get(name, 1.0)
    assert first["fp16 report"] is None
    assert first["everything report"]["values_sent"] == first["everything report"]["values"] == 4 * 50
    sent = first["half report"]["values_sent"]  # 35 and 7 weights of which half may go, 7 biases, and one below 4
    assert 4 * 1 < sent < 4 * 50


def _deserted(rank: int, world_size: int, name: str) -> str:
    reducer = DenseReducer(Traffic(), comms=OPTIONS[name])
    model = wrap_dense(_model(), reducer)
    if rank == 1:
        return ""
    model(_data()[0]).sum().backward()
    with pytest.raises(TrainingError) as error:
        reducer.wait()
    return str(error.value)


@pytest.mark.parametrize("name", ["fp16", "half"])
def test_a_rank_that_left_is_an_error_with_advice(name: str) -> None:
    assert "launch.timeout_s" in run_ranks(2, _deserted, name)[0]


def _not_float32(rank: int, world_size: int) -> str:
    with pytest.raises(ConfigError) as error:
        wrap_dense(_model().double(), DenseReducer(Traffic(), comms=OPTIONS["fp16"]))
    return str(error.value)


def test_parameters_that_cannot_be_narrowed_are_named() -> None:
    for message in run_ranks(2, _not_float32):
        assert message.startswith("comms.dense=fp16: parameter '0.weight' is torch.float64, expected torch.float32.")


def test_a_message_of_nothing_but_a_head() -> None:
    compressor = Compressor(Parts([500], [False]), DctConfig())
    message = compressor.compress(torch.zeros(500))
    assert sparse_message.length(message) == len(message) <= sparse_message.HEAD + 12
