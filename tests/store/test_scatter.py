"""Rows written and added are, to the bit, what torch makes of them."""

import pytest
import torch

from hetrain.store.scatter import add_rows, put_rows


def table(layout):
    torch.manual_seed(1)
    made = {
        "plain": torch.randn(50, 8),
        "no columns": torch.randn(50, 0),
        "a view": torch.randn(50, 16)[:, ::2],
        "double": torch.randn(50, 8, dtype=torch.float64),
    }
    return made[layout]


@pytest.mark.parametrize("layout", ["plain", "no columns", "a view", "double"])
@pytest.mark.parametrize("count", [0, 1, 200])
def test_equals_torch(layout, count):
    before = table(layout)
    rows = torch.randint(0, 50, (count,))
    values = torch.randn(count, before.shape[1], dtype=before.dtype)
    added = add_rows(before.clone(), rows, values)
    assert torch.equal(added, before.clone().index_add_(0, rows, values))
    distinct = torch.randperm(50)[:count]
    put = put_rows(before.clone(), distinct, values[: len(distinct)])
    assert torch.equal(put, before.clone().index_copy_(0, distinct, values[: len(distinct)]))


def test_the_table_itself_changes_and_wants_no_gradient():
    weight = torch.nn.Parameter(torch.zeros(4, 2))
    given = put_rows(weight, torch.tensor([2]), torch.ones(1, 2))
    assert given is weight
    assert weight[2].tolist() == [1, 1]
