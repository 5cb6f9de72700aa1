"""What training through the store must equal: a plain table, itself undisturbed, itself resumed."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from hetrain.errors import ConfigError
from hetrain.store.messages import Request
from hetrain.store.owner import Owner
from tests.store.loopback import CPU, Loopback, Setup

OPTIMIZERS = ["sgd", "adagrad", "rowwise_adagrad"]
ROWS = 60


def batches_of(setup, steps, seed=3):
    """By step and worker: skewed lookups, and the gradient each row takes in that step."""
    rng = np.random.default_rng(seed)
    weight = 1 / np.arange(1, setup.rows + 1)
    for _ in range(steps):
        lookups = [rng.choice(setup.rows, 12, p=weight / weight.sum()) for _ in range(setup.world)]
        yield lookups, [torch.from_numpy(rng.normal(size=(setup.rows, setup.dim)).astype(np.float32)) for _ in lookups]


def train(store, steps, between=lambda store: None):
    """`between` two steps, at the end too; where the store reads ahead, the next batch is read by then."""
    steps = list(steps)
    plans, _ = store.read(steps[0][0])
    for (_, gradients), following in zip(steps, [*steps[1:], None], strict=True):
        ahead = store.begin(following[0]) if following and store.setup.prefetch else None
        store.write(plans, [g[p.rows] for p, g in zip(plans, gradients, strict=True)])
        if ahead:
            store.arrive(ahead)
        between(store)
        if following:
            plans = ahead or store.read(following[0])[0]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("capacity", [0, 1, 10, ROWS])
@pytest.mark.parametrize("staleness", [0, 3, math.inf])
def test_one_worker_is_a_plain_optimizer(optimizer, capacity, staleness):
    setup = Setup(tables=(ROWS,), capacity=capacity, batch_rows=ROWS, staleness=staleness, optimizer=optimizer)
    store = Loopback(setup)
    table, state = store.table(), store.table("state")
    for lookups, gradients in batches_of(setup, 60):
        plans, _ = store.read([lookups[0]])
        torch.testing.assert_close(store.caches[0].copies.value[plans[0].unique_slots], table[plans[0].rows])
        rows = plans[0].rows
        store.write(plans, [gradients[0][rows]])
        value, sums = table[rows], state[rows]
        store.optimizer.step_(value, sums, gradients[0][rows], setup.lr)
        table[rows], state[rows] = value, sums
    store.flush()
    torch.testing.assert_close(store.table(), table, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(store.table("state"), state, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_empty_cache_is_one_optimizer_on_summed_gradients(optimizer):
    setup = Setup(world=3, tables=(ROWS,), capacity=0, batch_rows=ROWS, optimizer=optimizer)
    store = Loopback(setup)
    table, state = store.table(), store.table("state")
    for lookups, gradients in batches_of(setup, 30):
        train(store, [(lookups, gradients)])
        read = [torch.zeros(ROWS, 1).index_fill_(0, torch.tensor(rows), 1) for rows in lookups]
        total = sum(mask * gradient for mask, gradient in zip(read, gradients, strict=True))
        rows = torch.unique(torch.tensor(np.concatenate(lookups)))
        value, sums = table[rows], state[rows]
        store.optimizer.step_(value, sums, total[rows], setup.lr)
        table[rows], state[rows] = value, sums
    store.flush()
    torch.testing.assert_close(store.table(), table, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("optimizer", ["adagrad", "rowwise_adagrad"])
@pytest.mark.parametrize("share", [1.0, 0.4], ids=["in step", "some at a time"])
def test_held_back_adagrad_moves_as_far_as_a_plain_one(optimizer, share):
    """Eight workers that push rarely move a row about as far as one optimizer that takes their gradients in turn.

    Pushing plain differences moves 1.8 times too far here (all workers in step) and 2.1 times (some at a time, where
    copies are rebased with updates pending); rescaling pushes but not rebased copies still 1.9 times in the latter.
    """
    setup = Setup(world=8, tables=(1,), capacity=1, batch_rows=1, staleness=20, optimizer=optimizer, clock="sum")
    store = Loopback(setup)
    start, value, state = store.table(), store.table(), store.table("state")
    rng = np.random.default_rng(0)
    for _ in range(100):
        gradients = [torch.from_numpy(rng.normal(1, 0.3, size=(1, 3)).astype(np.float32)) for _ in range(8)]
        batches = [np.zeros(int(rng.random() < share), np.int64) for _ in range(8)]
        train(store, [(batches, gradients)])
        for batch, gradient in zip(batches, gradients, strict=True):
            if len(batch):
                store.optimizer.step_(value, state, gradient, setup.lr)
    store.flush()
    moved = (store.table() - start).norm() / (value - start).norm()
    assert 0.8 < moved < 1.4, moved
    assert share == 1 or sum(cache.counters.invalid for cache in store.caches) > 0
    torch.testing.assert_close(store.table("state"), state, rtol=1e-4, atol=1e-4)


def everything(store):
    owners = [t for o in store.owners for t in (o.value, o.state, *tensors_in(o.state_dict()))]
    held = [t for c in store.caches for t in tensors_in(c.state_dict())]
    return [t.clone() for t in owners + held]


def tensors_in(item):
    """Everything in nested containers as tensors, in order."""
    if isinstance(item, dict):
        item = list(item.values())
    if isinstance(item, list):
        return [t for part in item for t in tensors_in(part)]
    return [torch.as_tensor(item)]


def assert_same(left, right):
    for a, b in zip(left, right, strict=True):
        assert torch.equal(a, b)


def look(store):
    """What an evaluation does: a view of every owner, all pending pushes in it, then fetches."""
    views = [owner.view() for owner in store.owners]
    for view in views:
        view.__enter__()
    store.exchange([cache.pending() for cache in store.caches])
    rows = torch.arange(store.space.rows)
    replies, _ = store.exchange([Request.fetch(rows, store.setup.dim, c.copies.state.shape[1]) for c in store.caches])
    for view in views:
        view.__exit__(None, None, None)
    return store.caches[0].rows_of(rows, replies[0])


def assert_looking_sees_the_flush_and_changes_nothing(setup):
    store, undisturbed = Loopback(setup), Loopback(setup)

    def check(store):
        before, clipped = everything(store), store.traffic.clipped
        look(store)
        assert_same(everything(store), before)
        assert store.traffic.clipped == clipped

    train(store, batches_of(setup, 20), check)
    train(undisturbed, batches_of(setup, 20))
    assert_same(everything(store), everything(undisturbed))
    seen = look(store)
    store.flush()
    assert torch.equal(store.table(), seen)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    ("capacity", "directory", "prefetch"),
    [(0, False, False), (8, False, False), (8, True, False), (8, True, True), (ROWS, False, True), (ROWS, True, True)],
)
def test_view_sees_everything_and_changes_nothing(optimizer, capacity, directory, prefetch):
    """Not even who holds what: whoever looks does not become a holder, and who pushes in a view remains one."""
    setup = Setup(
        world=2, tables=(ROWS,), capacity=capacity, batch_rows=ROWS, staleness=3, optimizer=optimizer,
        directory=directory, prefetch=prefetch,
    )  # fmt: skip
    assert_looking_sees_the_flush_and_changes_nothing(setup)


def test_one_view_at_a_time():
    owner = Loopback(Setup()).owners[0]
    with owner.view(), pytest.raises(RuntimeError, match="open"), owner.view():
        pass


def test_view_undoes_several_rounds_on_one_row():
    store = Loopback(Setup(tables=(4,)))
    owner, before = store.owners[0], store.table()
    push = Request.empty(3, 0)
    push.push_rows, push.push_value = torch.tensor([2]), torch.ones(1, 3)
    push.push_clock = push.push_updates = torch.tensor([5])
    with owner.view():
        owner.serve([push])
        owner.serve([push])
        assert torch.equal(store.table()[2], before[2] + 2)
        assert owner.applied.tolist() == [0, 0, 10, 0]
        assert owner.state_dict()["bookkeeping"]["applied"].tolist() == [0, 0, 0, 0]
    assert torch.equal(store.table(), before)
    assert owner.clock.tolist() == owner.applied.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("policy", ["lru", "lfu", "light_lfu"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("capacity", [0, 8, ROWS])
def test_resume_is_bit_for_bit(policy, optimizer, capacity):
    setup = Setup(
        world=2, tables=(ROWS,), capacity=capacity, batch_rows=ROWS, staleness=3, optimizer=optimizer, policy=policy,
        directory=True,
    )  # fmt: skip
    steps = list(batches_of(setup, 30))
    store = Loopback(setup)
    train(store, steps[:17])
    views = [owner.view() for owner in store.owners]
    for view in views:
        view.__enter__()
    store.exchange([cache.pending() for cache in store.caches])
    saved = [(o.value.clone(), o.state.clone(), o.state_dict()) for o in store.owners]
    saved_caches = [cache.state_dict() for cache in store.caches]
    for view in views:
        view.__exit__(None, None, None)

    resumed = Loopback(setup)
    train(resumed, steps[20:22])  # whatever it held before must not matter
    for owner, (value, state, private) in zip(resumed.owners, saved, strict=True):
        owner.value.copy_(value)
        owner.state.copy_(state)
        owner.load_state_dict(private)
    for cache, private in zip(resumed.caches, saved_caches, strict=True):
        cache.load_state_dict(private)
    assert_same(everything(resumed), everything(store))
    train(store, steps[17:])
    train(resumed, steps[17:])
    assert_same(everything(resumed), everything(store))
    assert [o.observed_staleness_max for o in resumed.owners] == [o.observed_staleness_max for o in store.owners]


@pytest.mark.parametrize("directory", [False, True])
def test_audits_observe_what_no_check_tells(directory):
    """Without a bound nobody checks; with a directory, hits are silent."""
    setup = Setup(world=2, tables=(4,), capacity=4, batch_rows=4, staleness=math.inf, clock="sum", directory=directory)
    store = Loopback(setup)
    train(store, [([[1], []], [torch.ones(4, 3)] * 2)])
    store.exchange([store.caches[0].pending(), Request.empty(3, 0)])
    train(store, [([[], [1]], [torch.ones(4, 3)] * 2)] * 3)
    push = store.caches[1].pending()
    for _ in range(3):
        store.exchange([push, Request.empty(3, 0)])  # c_g = 1 + 3 * 3
    plans, sent = store.read([[1], []])
    assert all(part.check_rows.numel() == 0 for request in sent for part in request)
    assert max(owner.observed_staleness_max for owner in store.owners) == 0
    store.audit(plans)
    assert max(owner.observed_staleness_max for owner in store.owners) == 9


def test_too_large_a_batch_leaves_the_cache_usable():
    store = Loopback(Setup(tables=(20,), capacity=2, batch_rows=3))
    with pytest.raises(ValueError, match="20 new rows"):
        store.read([list(range(20))])
    plans, _ = store.read([[5, 6, 5]])
    assert len(plans[0].new_slots) == 2


def test_optimizer_that_does_not_add_up_is_refused_when_held_back():
    class Adam:
        name, lr, eps, additive = "adam", 0.1, 1e-8, False

        def state_width(self, dim):
            return 2 * dim

    store = Loopback(Setup())
    arguments = (store.space, store.placement, 0, Adam())
    Owner(*arguments, seed=1, device=CPU, held_back=False)
    with pytest.raises(ConfigError, match="rowwise_adagrad"):
        Owner(*arguments, seed=1, device=CPU, held_back=True)


def trained_table(steps, **fields):
    """All rows, their state and the counters after training on `steps`."""
    setup = Setup(world=3, tables=(ROWS,), batch_rows=ROWS, **fields)
    store = Loopback(setup)
    train(store, steps)
    store.flush()
    return store.table(), store.table("state"), [vars(cache.counters) for cache in store.caches]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_empty_cache_read_ahead_is_the_one_that_is_not(optimizer, blocks):
    steps = list(batches_of(Setup(world=3, tables=(ROWS,)), 25))
    value, state, counters = trained_table(steps, capacity=0, optimizer=optimizer)
    ahead = trained_table(steps, capacity=0, optimizer=optimizer, prefetch=True, blocks=blocks)
    assert torch.equal(ahead[0], value)
    assert torch.equal(ahead[1], state)
    assert ahead[2] == counters


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("blocks", [2, 3])
def test_blocks_change_nothing_without_staleness(optimizer, blocks):
    steps = list(batches_of(Setup(world=3, tables=(ROWS,)), 25))
    fields = {"capacity": 8, "staleness": 0, "optimizer": optimizer, "prefetch": True}
    value, state, counters = trained_table(steps, **fields)
    cut = trained_table(steps, **fields, blocks=blocks)
    assert torch.equal(cut[0], value)
    assert torch.equal(cut[1], state)
    assert cut[2] == counters


@pytest.mark.parametrize("capacity", [0, 8])
@pytest.mark.parametrize("parts", [2, 3])
def test_what_is_pending_may_go_in_parts(capacity, parts):
    """Staged rows and those held back: each once, in the part of its number, with its bits."""
    store = Loopback(Setup(world=2, tables=(ROWS,), capacity=capacity, batch_rows=ROWS, staleness=3, prefetch=True))
    train(store, batches_of(store.setup, 9))
    for cache in store.caches:
        whole, cut = cache.pending(), [cache.pending(part, parts) for part in range(parts)]
        assert cache._staged
        assert len(whole.push_rows) > parts
        for part, request in enumerate(cut):
            assert set((request.push_rows % parts).tolist()) == {part}
        rows = torch.cat([request.push_rows for request in cut])
        order = [torch.argsort(r) for r in (rows, whole.push_rows)]
        assert torch.equal(rows[order[0]], whole.push_rows[order[1]])
        values = torch.cat([request.push_value for request in cut])
        assert torch.equal(values[order[0]], whole.push_value[order[1]])


def observed(setup, steps, between):
    """The staleness that audits find when `between` comes before each of them."""
    store = Loopback(setup)
    plans, _ = store.read(steps[0][0])
    for (_, gradients), (following, _) in pairwise(steps):
        between(store)
        store.audit(plans)
        ahead = store.begin(following)
        store.write(plans, [g[p.rows] for p, g in zip(plans, gradients, strict=True)])
        store.arrive(ahead)
        plans = ahead
    return [owner.observed_staleness_max for owner in store.owners]


def test_looking_does_not_change_what_audits_observe():
    setup = Setup(
        world=3, tables=(ROWS,), capacity=20, batch_rows=ROWS, staleness=3, clock="sum", directory=True, prefetch=True
    )  # fmt: skip
    steps = list(batches_of(setup, 25))
    undisturbed = observed(setup, steps, lambda store: None)
    assert max(undisturbed) > 0
    assert observed(setup, steps, look) == undisturbed
