"""Row optimizers against FBGEMM's CPU kernels; dense optimizers and schedule."""

import copy
import math

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from hetrain.config import DenseOptimizerConfig, RowOptimizerConfig, ScheduleConfig
from hetrain.config.checks import DENSE_OPTIMIZERS
from hetrain.errors import ConfigError
from hetrain.optim import ROW_OPTIMIZERS, RowOptimizer, Schedule, dense_optimizer, row_optimizer
from tests.conftest import ROOT

ROWS, STEPS = 20, 12


def fused_table(optimizer: RowOptimizer, dim: int, start: torch.Tensor):
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    table = SplitTableBatchedEmbeddingBagsCodegen(
        [(ROWS, dim, EmbeddingLocation.HOST, ComputeDevice.CPU)],
        optimizer=optimizer.fbgemm,
        learning_rate=optimizer.lr,
        eps=optimizer.eps,
        stochastic_rounding=False,
    )
    table.split_embedding_weights()[0].copy_(start)
    return table


@pytest.mark.parametrize("eps", [1e-8, 0.5], ids=["small_eps", "large_eps"])
@pytest.mark.parametrize("dim", [4, 16, 128])
@pytest.mark.parametrize("name", ROW_OPTIMIZERS)
def test_same_numbers_as_fbgemm_with_duplicate_ids(name: str, dim: int, eps: float) -> None:
    torch.manual_seed(3)
    optimizer = RowOptimizer(name, 0.1, eps)
    value = torch.randn(ROWS, dim)
    state = torch.zeros(ROWS, optimizer.state_width(dim))
    table = fused_table(optimizer, dim, value)
    for step in range(STEPS):
        lr = 0.1 * (step + 1) / STEPS  # the engines change the rate at every step
        table.set_learning_rate(lr)
        ids = torch.randint(0, ROWS, (30,))
        offsets = torch.tensor([0, 3, 3, 10, 30])
        gradient = torch.randn(4, dim)
        table(ids, offsets).backward(gradient)
        bag = torch.repeat_interleave(torch.arange(4), offsets.diff())
        rows, inverse = ids.unique(return_inverse=True)
        merged = torch.zeros(len(rows), dim).index_add_(0, inverse, gradient[bag])
        touched, touched_state = value[rows], state[rows]
        optimizer.step_(touched, touched_state, merged, lr)
        value[rows], state[rows] = touched, touched_state
    torch.testing.assert_close(value, table.split_embedding_weights()[0], rtol=2e-6, atol=2e-6)
    if optimizer.state_width(dim):
        (fused_state,) = table.split_optimizer_states()[0]
        torch.testing.assert_close(state, fused_state.reshape(state.shape), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("name", ROW_OPTIMIZERS)
def test_no_rows_and_zero_gradient_change_nothing(name: str) -> None:
    optimizer = RowOptimizer(name, 0.1, 1e-8)
    optimizer.step_(torch.empty(0, 4), torch.empty(0, optimizer.state_width(4)), torch.empty(0, 4), 0.1)
    value = torch.randn(3, 4)
    before = value.clone()
    optimizer.step_(value, torch.zeros(3, optimizer.state_width(4)), torch.zeros(3, 4), 0.1)
    assert torch.equal(value, before)


def test_rowwise_sum_is_the_mean_square_of_the_row() -> None:
    optimizer = RowOptimizer("rowwise_adagrad", 1.0, 0.0)
    value, state = torch.zeros(1, 2), torch.zeros(1, 1)
    optimizer.step_(value, state, torch.tensor([[3.0, 4.0]]), 1.0)
    assert state.item() == 12.5
    torch.testing.assert_close(value, -torch.tensor([[3.0, 4.0]]) / math.sqrt(12.5))


def parameters() -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape)) for shape in [(5, 3), (5,), (1, 5), (1,)]]


def take_steps(optimizer: torch.optim.Optimizer, params: list[torch.nn.Parameter], first: int, count: int) -> None:
    for step in range(first, first + count):
        generator = torch.Generator().manual_seed(step)
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator)
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * (step + 1)
        optimizer.step()


@pytest.mark.parametrize("name", DENSE_OPTIMIZERS)
def test_dense_optimizer_resumes_bit_for_bit(name: str) -> None:
    cfg = DenseOptimizerConfig(name=name, lr=0.01, weight_decay=0.001)
    whole = parameters()
    take_steps(dense_optimizer(whole, cfg), whole, 0, 8)
    first = parameters()
    optimizer = dense_optimizer(first, cfg)
    take_steps(optimizer, first, 0, 5)
    saved = copy.deepcopy((optimizer.state_dict(), [p.detach() for p in first]))
    second = parameters()
    resumed = dense_optimizer(second, cfg)
    resumed.load_state_dict(saved[0])
    for param, value in zip(second, saved[1], strict=True):
        param.data.copy_(value)
    take_steps(resumed, second, 5, 3)
    assert all(torch.equal(a, b) for a, b in zip(whole, second, strict=True))


@pytest.mark.parametrize("name", DENSE_OPTIMIZERS)
def test_dense_optimizer_equals_torch_default(name: str) -> None:
    plain = getattr(torch.optim, {"sgd": "SGD", "adagrad": "Adagrad", "adam": "Adam", "adamw": "AdamW"}[name])
    ours, theirs = parameters(), parameters()
    eps = {} if name == "sgd" else {"eps": 1e-6}
    take_steps(dense_optimizer(ours, DenseOptimizerConfig(name, 0.01, 0.1, 1e-6)), ours, 0, 5)
    take_steps(plain(theirs, lr=0.01, weight_decay=0.1, foreach=False, **eps), theirs, 0, 5)
    torch.testing.assert_close(list(ours), list(theirs))


def test_schedule_warms_up_then_holds() -> None:
    schedule = Schedule(ScheduleConfig(warmup_steps=4))
    assert [schedule.factor(step) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert Schedule(ScheduleConfig()).factor(0) == 1.0


@pytest.mark.parametrize(("decay", "half"), [("linear", 0.55), ("cosine", 0.55)])
def test_schedule_decays_to_final(decay: str, half: float) -> None:
    schedule = Schedule(ScheduleConfig(warmup_steps=2, decay=decay, decay_steps=12, final=0.1))
    assert schedule.factor(2) == 1.0
    assert schedule.factor(7) == pytest.approx(half)
    assert schedule.factor(12) == schedule.factor(10**6) == pytest.approx(0.1)


@given(
    st.integers(0, 50),
    st.integers(1, 100),
    st.sampled_from(["none", "linear", "cosine"]),
    st.floats(0, 1),
    st.integers(0, 300),
)
@settings(deadline=None)
def test_schedule_stays_in_bounds(warmup: int, length: int, decay: str, final: float, step: int) -> None:
    schedule = Schedule(ScheduleConfig(warmup, decay, warmup + length, final))
    assert 0.0 <= schedule.factor(step) <= 1.0
    if step >= warmup:
        assert schedule.factor(step + 1) <= schedule.factor(step) + 1e-12


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (lambda: row_optimizer(RowOptimizerConfig(name="adam")), "optimizer.rows.name='adam'"),
        (lambda: row_optimizer(RowOptimizerConfig(lr=0.0)), "optimizer.rows.lr=0.0"),
        (lambda: row_optimizer(RowOptimizerConfig(lr=math.nan)), "optimizer.rows.lr=nan"),
        (lambda: row_optimizer(RowOptimizerConfig(eps=-1.0)), "optimizer.rows.eps=-1.0"),
        (lambda: dense_optimizer(parameters(), DenseOptimizerConfig(name="lion")), "optimizer.dense.name='lion'"),
        (lambda: dense_optimizer(parameters(), DenseOptimizerConfig(lr=-1.0)), "optimizer.dense.lr=-1.0"),
        (lambda: Schedule(ScheduleConfig(decay="step")), "optimizer.schedule.decay='step'"),
        (lambda: Schedule(ScheduleConfig(decay="linear")), "optimizer.schedule.decay_steps=0"),
        (lambda: Schedule(ScheduleConfig(final=2.0)), "optimizer.schedule.final=2.0"),
        (lambda: Schedule(ScheduleConfig(warmup_steps=-1)), "optimizer.schedule.warmup_steps=-1"),
    ],
)
def test_misuse_names_the_key(make, key: str) -> None:
    with pytest.raises(ConfigError) as error:
        make()
    assert key in str(error.value)
    assert "set " in str(error.value)


@pytest.mark.parametrize("name", ROW_OPTIMIZERS)
def test_a_shipped_group_is_named_for_its_row_optimizer(name: str) -> None:
    group = yaml.safe_load((ROOT / "configs" / "optimizer" / f"{name}.yaml").read_text())
    assert row_optimizer(RowOptimizerConfig(**group["rows"])).name == name
    assert dense_optimizer(parameters(), DenseOptimizerConfig(**group["dense"]))
