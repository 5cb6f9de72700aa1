"""Capacities as written, the rows they keep, and what a run is said to need against what a cache takes."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hetrain.capacity import Capacity, parse_capacity
from hetrain.errors import ConfigError
from hetrain.optim import RowOptimizer
from hetrain.store.cache import Cache
from hetrain.store.capacity import POLICY_BYTES, capacity_rows, predicted_memory, slot_bytes
from hetrain.store.copies import Copies
from hetrain.store.index import HashIndex
from hetrain.store.policy import make_policy
from hetrain.store.slots import Slots
from hetrain.store.space import RowSpace
from hetrain.tables import Table


def spaces(*rows):
    return [SimpleNamespace(rows=n) for n in rows]


@pytest.mark.parametrize(
    ("text", "amount", "unit"),
    [
        (0, 0, "share"),
        (0.1, 0.1, "share"),
        (1, 1, "share"),
        (2, 2, "rows"),
        ("0.25", 0.25, "share"),
        ("300", 300, "rows"),
        ("512MiB", 512 << 20, "bytes"),
        ("2GiB", 2 << 30, "bytes"),
        ("500MB", 500_000_000, "bytes"),
        (" 1.5 gib ", 3 << 29, "bytes"),
        ("7kb", 7000, "bytes"),
        ("1TB", 10**12, "bytes"),
        ("900B", 900, "bytes"),
        ("0MB", 0, "bytes"),
    ],
)
def test_capacities_as_written(text, amount, unit):
    assert parse_capacity(text) == Capacity(amount, unit)


@pytest.mark.parametrize(
    "text", ["", "much", "5iB", "5M", "-1MB", "1..5GB", -0.1, 2.5, "2.5", "inf", np.nan, True, "5 5MB"]
)
def test_what_is_no_capacity_names_key_value_and_expectation(text):
    with pytest.raises(
        ConfigError, match=r"^consistency\.cache\.capacity=.*: expected a share .* \(512MiB, 2GB\)\. 0 "
    ):
        parse_capacity(text)


def test_shares_and_rows():
    tables = spaces(1000, 10, 3)
    costs = [100, 200, 300]
    assert capacity_rows(0, tables, costs) == [0, 0, 0]
    assert capacity_rows(0.1, tables, costs) == [100, 1, 1]
    assert capacity_rows(0.25, tables, costs) == [250, 2, 1]
    assert capacity_rows(1.0, tables, costs) == [1000, 10, 3]
    assert capacity_rows(507, tables, costs) == [500, 5, 2]
    assert capacity_rows(10**9, tables, costs) == [1000, 10, 3]
    assert capacity_rows("0MB", tables, costs) == [0, 0, 0]


@given(
    st.lists(st.tuples(st.integers(1, 10**12), st.integers(20, 5000)), min_size=1, max_size=4), st.integers(1, 10**15)
)
def test_bytes_are_used_but_never_exceeded(groups, budget):
    tables, costs = spaces(*(rows for rows, _ in groups)), [cost for _, cost in groups]
    if budget < sum(costs):
        with pytest.raises(ConfigError, match=rf"capacity={budget}B: expected at least {sum(costs)} bytes"):
            capacity_rows(f"{budget}B", tables, costs)
        return
    kept = capacity_rows(f"{budget}B", tables, costs)
    assert all(1 <= n <= space.rows for n, space in zip(kept, tables, strict=True))
    spent = sum(n * cost for n, cost in zip(kept, costs, strict=True))
    assert spent <= budget
    assert budget - spent < sum(costs) or kept == [space.rows for space in tables]


def taken_by(thing, slots):
    """Bytes of all arrays with an entry per slot in `thing` and in the parts of the store it is made of."""
    total = 0
    for item in vars(thing).values():
        if isinstance(item, np.ndarray | torch.Tensor) and len(item) == slots:
            total += item.nbytes
        elif isinstance(item, Slots | Copies):
            total += taken_by(item, slots)
    return total


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad"])
@pytest.mark.parametrize("audit", [False, True])
def test_a_slot_costs_what_the_cache_allocates(optimizer, audit):
    """But for policy and index, which follow."""
    row_optimizer, slots = RowOptimizer(optimizer, lr=0.1, eps=1e-8), 50_000
    space = RowSpace([Table("t", 60_000, 16, ("f",), 0.1)], 16)
    value, state = torch.empty(slots, 16), torch.empty(slots, row_optimizer.state_width(16))
    cache = Cache(space, 40_000, 10_000, value, state, "lru", 1, row_optimizer, seed=1, audit=audit)
    predicted = slot_bytes(16, state.shape[1], "lru", "array", audit=audit) - POLICY_BYTES["lru"]
    assert taken_by(cache, slots) == pytest.approx(slots * predicted, rel=0.1)


@pytest.mark.parametrize("name", ["lru", "lfu", "light_lfu"])
def test_a_policy_costs_what_is_said(name):
    slots = 100_000
    policy = make_policy(name, slots)
    taken = policy._links.nbytes + (0 if name == "lru" else policy._group.nbytes)
    said = slot_bytes(1, 0, name, "array") - slot_bytes(1, 0, "lru", "array") + 8
    assert taken == pytest.approx(slots * said, rel=0.01)


@pytest.mark.parametrize("rows", [1000, 43_690, 43_691, 60_000])
def test_the_hash_index_costs_no_more_than_is_said(rows):
    said = slot_bytes(1, 0, "lru", "hash") - slot_bytes(1, 0, "lru", "array")
    assert said / 2 * 0.99 < HashIndex(rows).nbytes / rows <= said * 1.05


def test_slots_of_other_settings():
    base = slot_bytes(16, 1, "lru", "array")
    assert base == 4 * 2 * 17 + 46 + 8
    assert slot_bytes(16, 1, "lru", "array", held_back=False) == base - 4 * 17
    assert slot_bytes(16, 1, "lru", "array", audit=True) == base + 8


def test_prediction_of_array_and_hash():
    tables = spaces(10**6, 10**5)
    arguments = (tables, [1000, 100], [200, 100], [5 * 10**5, 10**5], [80, 40])
    array = predicted_memory(*arguments, index="array")
    assert (array.cache, array.index) == (210_000, 4_400_000)
    assert array.rows_at_start == array.rows_at_most == 44_000_000
    assert array.row_seen == (80, 40)
    assert str(array) == "a worker's cache takes 4.4 MiB (4.2 MiB of it the index), an owner's rows 42.0 MiB"
    waits = predicted_memory(*arguments, index="array", residue=1 << 21)
    assert "(4.2 MiB of it the index) and what comms.rows=dct holds back up to 2.0 MiB, an owner's" in str(waits)
    none_kept = predicted_memory(*arguments, index="array", keeps=False)
    assert str(none_kept).startswith("a worker's rows of the batches in flight take 4.4 MiB (4.2 MiB of it the index),")
    hashed = predicted_memory(*arguments, index="hash")
    assert (hashed.cache, hashed.index, hashed.rows_at_start) == (210_000, 0, 0)
    assert hashed.rows_at_most == 5 * 10**5 * 136 + 10**5 * 96
    assert "136 or 96 bytes for each row seen" in str(hashed)
