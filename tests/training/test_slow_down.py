"""Steps made slower on purpose. What is measured is the sleep asked for, not how long a busy machine took."""

import time
from typing import Any

import pytest
import torch

from hetrain.config import LaunchConfig, SlowRandomConfig
from hetrain.engine import StepOutput
from hetrain.ranks import Ranks
from hetrain.training.slow_down import SlowDown


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which only sleeping and the work itself move."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    return now


def slowed(rank: int = 1, servers: int = 0, seed: int = 1, **launch: Any) -> SlowDown:
    return SlowDown(LaunchConfig(**launch), seed, Ranks(rank, 3, None, servers))


def work(clock: list[float], takes: float, waits: float = 0.0) -> StepOutput:
    clock[0] += takes + waits
    nothing = torch.zeros(0)
    return StepOutput(torch.zeros(()), nothing, nothing, 0, 0, waits)


def test_a_step_takes_the_factor_longer(clock: list[float]) -> None:
    slow = slowed(slow_ranks={1: 3.0})
    out = slow.step(1, lambda: work(clock, 2.0))
    assert out is not None
    assert clock[0] == 6.0
    slowed(rank=0, slow_ranks={1: 3.0}).step(1, lambda: work(clock, 2.0))
    assert clock[0] == 8.0  # another rank's does not


def test_waiting_for_others_is_theirs(clock: list[float]) -> None:
    slowed(slow_ranks={1: 3.0}).step(1, lambda: work(clock, 2.0, waits=10.0))
    assert clock[0] == 16.0


def test_the_end_of_the_data_is_not_slow(clock: list[float]) -> None:
    assert slowed(slow_ranks={1: 3.0}).step(1, lambda: None) is None
    assert clock[0] == 0.0


def test_random_steps_are_a_share_of_every_rank_and_the_seeds() -> None:
    random = SlowRandomConfig(share=0.1, factor=5.0)
    steps = range(1, 20_001)
    chosen = {}
    for rank, seed in [(0, 1), (1, 1), (0, 2)]:
        slow = slowed(rank, seed=seed, slow_random=random)
        factors = [slow.factor(step) for step in steps]
        assert set(factors) == {1.0, 5.0}
        chosen[rank, seed] = {step for step, factor in zip(steps, factors, strict=True) if factor == 5.0}
        # five standard deviations of a binomial
        assert abs(len(chosen[rank, seed]) - 2_000) < 5 * (20_000 * 0.1 * 0.9) ** 0.5
    assert len(chosen[0, 1] & chosen[1, 1]) < 400  # 200 of two that choose apart
    assert len(chosen[0, 1] & chosen[0, 2]) < 400
    again = slowed(0, seed=1, slow_random=random)  # as after a restart: no state is carried along
    assert {step for step in range(1, 1001) if again.factor(step) == 5.0} == {s for s in chosen[0, 1] if s <= 1000}


def test_both_kinds_multiply_and_all_or_none_may_be_slow() -> None:
    both = slowed(slow_ranks={1: 3.0}, slow_random=SlowRandomConfig(share=1.0, factor=2.0))
    assert {both.factor(step) for step in range(100)} == {6.0}
    none = slowed(slow_random=SlowRandomConfig(share=0.0, factor=2.0))
    assert {none.factor(step) for step in range(100)} == {1.0}
    server = slowed(rank=2, servers=1, slow_random=SlowRandomConfig(share=1.0, factor=2.0))
    assert server.factor(1) == 1.0  # it has no steps of its own
