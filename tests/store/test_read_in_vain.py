"""A batch that was read ahead and does not come: after a resume, another may be the next."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hetrain.store import policy
from tests.store.loopback import Loopback, Setup, held
from tests.store.test_against_reference import LATE, POLICIES, Both, traces


@pytest.fixture(autouse=True)
def _small_constants(monkeypatch):
    monkeypatch.setattr(policy, "HOT", 3)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.one_of(traces(prefetch=True), LATE), st.sets(st.integers(0, 12), min_size=1))
def test_a_batch_read_ahead_that_does_not_come(trace, lost):
    """Then another is read, as ever: nothing is lost, and the promises hold."""
    setup, steps = trace
    both = Both(setup)
    both.run(steps, lost)
    both.end()


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_copy_that_its_batch_did_not_update_is_doubted(staleness):
    """Worker 0 reads row 0 ahead in vain, while the owner counts on an update; then worker 1 pushes it."""
    setup = Setup(
        world=2, tables=(2,), capacity=1, batch_rows=2, staleness=staleness, clock="sum", directory=True, prefetch=True
    )  # fmt: skip
    both = Both(setup)
    both.run([([0], []), ([1], []), ([], []), *[([], [0])] * 4, ([0], [])], lost={2})
    both.end()
    assert both.reference.workers[0].counters["invalid"] == 1


@pytest.mark.parametrize("policy_name", POLICIES)
def test_rows_read_ahead_in_vain_leave_the_cache(policy_name):
    """They were never used; no slot more is needed than without them."""
    setup = Setup(world=1, tables=(9,), capacity=2, batch_rows=2, policy=policy_name, prefetch=True)
    both = Both(setup)
    both.run([([0, 1],), ([2, 3],), ([4, 5],), ([6, 7],), ([8, 0],), ([1, 2],)], lost={1, 3})
    assert len(held(both.store.caches[0])) == setup.capacity
    both.end()


def test_a_copy_known_to_be_invalid_is_not_asked_about():
    """The round of a batch read in vain told of pushes that leave its copies behind: they are fetched unasked."""
    setup = Setup(
        world=3, tables=(2,), capacity=2, batch_rows=2, staleness=1, clock="sum", directory=True, prefetch=True
    )  # fmt: skip
    both = Both(setup)
    both.run([([1], [1], [1]), ([], [1], []), ([1], [0], []), ([0], [1], [1]), ([0], [], [0])], lost={2})
    both.end()
    assert sum(worker.seen["noticed"] for worker in both.reference.workers) > 0


@pytest.mark.parametrize("capacity", [0, 4])
def test_the_batch_read_ahead_is_known_again(capacity):
    store = Loopback(Setup(capacity=capacity, prefetch=True))
    (plan,), _ = store.read([[7, 3, 7]])
    ahead = store.begin([[3, 5, 9]])
    store.write([plan], [torch.ones(2, store.setup.dim)])
    store.arrive(ahead)
    cache = store.caches[0]
    assert cache.was_read(torch.tensor([9, 5, 3, 3]))
    for other in ([3, 5], [3, 5, 9, 7], [3, 5, 8], []):
        assert not cache.was_read(torch.tensor(other, dtype=torch.int64))


@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize("capacity", [0, 8])
def test_long_traces_with_batches_that_do_not_come(capacity, staleness):
    setup = Setup(
        world=3, servers=2, tables=(9, 30), capacity=capacity, batch_rows=10, optimizer="adagrad", directory=True,
        prefetch=True, staleness=staleness, clock="sum", blocks=2, index="hash",
    )  # fmt: skip
    rng = np.random.default_rng(5)
    steps = [[np.minimum(rng.zipf(1.3, 10) - 1, 38).tolist() for _ in range(3)] for _ in range(40)]
    both = Both(setup)
    both.run(steps, lost=range(1, 40, 4))
    both.end()


@pytest.mark.parametrize("blocks", [1, 2])
def test_a_push_in_the_early_leg_is_not_missed_by_a_read_of_the_same_round(blocks):
    """Worker 0 finds row 0, read once in vain, valid; that worker 1 pushes it then is the next round's business."""
    setup = Setup(
        world=2, tables=(3,), capacity=1, batch_rows=2, staleness=0, clock="sum", prefetch=True, blocks=blocks
    )  # fmt: skip
    both = Both(setup)
    both.run([([0], []), ([1], []), ([], []), ([], [0]), ([], [1]), ([], []), ([0], []), ([], [])], lost={2})
    assert both.missed == 1
    assert both.reference.workers[0].counters["hits"] == 1
    both.end()
