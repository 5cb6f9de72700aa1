import torch

from hetrain.store import initial
from hetrain.store.initial import initial_rows
from tests.store.loopback import Loopback, Setup


def slow_value(seed, table, row, column, bound):
    """The same number from unbounded Python integers."""
    mask, golden = (1 << 64) - 1, 0x9E3779B97F4A7C15

    def mix(x):
        x &= mask
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    stream = mix(mix(seed * golden) + table + 1)
    bits = mix(mix((row + 1) * golden + stream) + (column + 1) * golden) >> 40
    return torch.tensor(bits * 2.0**-23 - 1.0).float() * bound


def test_against_python_integers():
    ids = torch.tensor([0, 1, 7, 12_345, (1 << 48) - 1])
    rows = initial_rows(3, 2, ids, 5, 0.25)
    expected = torch.tensor([[slow_value(3, 2, i, c, 0.25) for c in range(5)] for i in ids.tolist()])
    assert torch.equal(rows, expected)


def test_value_depends_on_its_key_alone(monkeypatch):
    ids = torch.arange(1000)
    rows = initial_rows(1, 0, ids, 8, 0.5)
    order = torch.randperm(1000)
    assert torch.equal(initial_rows(1, 0, order, 8, 0.5), rows[order])
    monkeypatch.setattr(initial, "CHUNK", 24)
    assert torch.equal(initial_rows(1, 0, ids, 8, 0.5), rows)
    assert not torch.equal(initial_rows(2, 0, ids, 8, 0.5), rows)
    assert not torch.equal(initial_rows(1, 1, ids, 8, 0.5), rows)


def test_uniform_and_uncorrelated():
    rows = initial_rows(1, 0, torch.arange(250_000), 8, 0.5)
    assert rows.min() >= -0.5
    assert rows.max() < 0.5
    assert abs(rows.mean()) < 1.5e-3
    assert abs(rows.var() - 1 / 12) < 1e-3
    noise = 4.5 / 250_000**0.5
    columns = torch.corrcoef(rows.T) - torch.eye(8)
    assert columns.abs().max() < noise
    neighbours = torch.corrcoef(torch.stack([rows[:-1, 0], rows[1:, 0]]))[0, 1]
    assert abs(neighbours) < noise
    counts = torch.histc(rows, 64, -0.5, 0.5)
    assert (counts - counts.mean()).abs().max() < 5 * counts.mean().sqrt()


def test_owners_start_equal_whatever_the_plan():
    alone = Loopback(Setup(world=1, tables=(9, 4), seed=5)).table()
    for world in (2, 3):
        assert torch.equal(Loopback(Setup(world=world, tables=(9, 4), seed=5)).table(), alone)
    expected = torch.cat([initial_rows(5, t, torch.arange(n), 3, 0.5) for t, n in enumerate((9, 4))])
    assert torch.equal(alone, expected)
