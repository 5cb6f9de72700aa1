"""The bags over the store: pooling, key order, empty batches, rates, growth."""

import pytest
import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hetrain.embedding import StoreBags
from hetrain.optim import RowOptimizer
from hetrain.planner.plan import Piece, Plan
from hetrain.store.initial import initial_rows
from hetrain.store.owner import Owner
from hetrain.store.space import Placement, row_spaces
from hetrain.tables import Table
from hetrain.telemetry import Traffic
from hetrain.transport.collective import CollectiveTransport
from hetrain.width_group import CacheSettings, WidthGroup

TABLES = [Table("a", 20, 8, ("x",), 0.5), Table("b", 9, 4, ("y", "z"), 0.5), Table("c", 30, 8, ("w",), 0.5)]
CPU = torch.device("cpu")
SGD = RowOptimizer("sgd", 0.1, 1e-8)


def make_bags(capacity: int, batch_size: int = 4) -> StoreBags:
    plan = Plan("store", 1, tuple(Piece(t.name, 0, 0, t.rows, 0, t.dim) for t in TABLES), frozenset(), {})
    groups = []
    for space in row_spaces(TABLES):
        placement = Placement(space, plan, 1)
        owner = Owner(space, placement, 0, SGD, seed=3, device=CPU, held_back=capacity > 0)
        settings = CacheSettings("lru", 2, batch_size, seed=3)
        groups.append(WidthGroup(placement, owner, SGD, min(capacity, space.rows), settings, CPU))
    widths = [(g.space.dim, 0) for g in groups]
    return StoreBags(groups, CollectiveTransport([g.owner for g in groups], widths, Traffic(), timeout_s=5))


def sparse(keys: str, bags: list[list[int]]) -> KeyedJaggedTensor:
    """`bags`: key-major; lengths are int32, as the reader gives them."""
    return KeyedJaggedTensor(
        list(keys),
        torch.tensor([i for bag in bags for i in bag], dtype=torch.int64),
        lengths=torch.tensor([len(bag) for bag in bags], dtype=torch.int32),
        stride=len(bags) // len(keys),
    )


def row(table: int, index: int) -> Tensor:
    t = TABLES[table]
    return initial_rows(3, table, torch.tensor([index]), t.dim, t.init_bound)[0]


@pytest.mark.parametrize("capacity", [0, 3, 50])
@pytest.mark.parametrize("keys", ["wxyz", "zyxw"])
def test_pools_by_key_whatever_the_order(capacity: int, keys: str) -> None:
    bags = make_bags(capacity)
    by_key = {"w": [[29], [1, 1]], "x": [[], [0, 19]], "y": [[8], [2]], "z": [[2, 3, 4], []]}
    batch = sparse(keys, [bag for key in keys for bag in by_key[key]])
    bags.read(batch)
    trained = bags(batch)
    with bags.read_only(batch):
        looked_at = bags(batch)
    table = {"x": 0, "y": 1, "z": 1, "w": 2}
    for key, of_key in by_key.items():
        for b, ids in enumerate(of_key):
            want = sum((row(table[key], i) for i in ids), torch.zeros(TABLES[table[key]].dim))
            torch.testing.assert_close(trained[key][b], want)
            torch.testing.assert_close(looked_at[key][b], want)


@pytest.mark.parametrize("capacity", [0, 50])
def test_an_empty_batch_trains_nothing(capacity: int) -> None:
    bags = make_bags(capacity)
    batch = sparse("wxyz", [])
    bags.read(batch)
    values = bags(batch).values()
    assert values.shape == (0, 8 + 8 + 4 + 4)
    values.sum().backward()
    bags.commit()
    assert all(group.cache.pending().push_rows.numel() == 0 for group in bags.groups)
    with bags.read_only(batch):
        assert bags(batch).values().shape == (0, 24)


def test_gradients_of_shared_rows_are_merged() -> None:
    bags = make_bags(0)
    batch = sparse("wxyz", [[1], [1], [1], [3]])  # y and z share table b
    bags.read(batch)
    bags(batch)["y"].mul(2).sum().backward()
    bags.commit()
    (push,) = [p for g in bags.groups if (p := g.cache.pending()).push_value.shape[1] == 4]
    by_row = dict(zip(push.push_rows.tolist(), push.push_value.tolist(), strict=True))
    assert by_row == {1: [2.0] * 4, 3: [0.0] * 4}


def test_growth_keeps_rows_and_rate() -> None:
    bags = make_bags(50, batch_size=1)
    for group in bags.groups:
        group.set_learning_rate(0.5)
    small, large = sparse("wxyz", [[5], [5], [5], [5]]), sparse("wxyz", [[i] for i in range(8)] * 4)
    bags.read(small)
    bags(small).values().sum().backward()
    bags.commit()
    bags.read(large)
    pooled = bags(large)
    torch.testing.assert_close(pooled["w"][5], row(2, 5) - 0.5)
    torch.testing.assert_close(pooled["y"][5], row(1, 5) - 1.0)
    pooled.values().sum().backward()
    bags.commit()
    bags.read(small)
    torch.testing.assert_close(bags(small)["w"][0], row(2, 5) - 1.0)
