import pytest
import torch

from hetrain.store import initial
from hetrain.store.initial import InitialRows, fill_initial_rows, initial_rows
from hetrain.store.space import RowSpace
from hetrain.tables import Table
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


def test_value_depends_on_its_key_alone():
    ids = torch.arange(1000)
    rows = initial_rows(1, 0, ids, 8, 0.5)
    order = torch.randperm(1000)
    assert torch.equal(initial_rows(1, 0, order, 8, 0.5), rows[order])
    assert not torch.equal(initial_rows(2, 0, ids, 8, 0.5), rows)
    assert not torch.equal(initial_rows(1, 1, ids, 8, 0.5), rows)


def mixed_space():
    """Tables of two widths and different bounds, one of them enormous; the space holds those of width 5."""
    sizes = [(1, 5), (7, 3), (1 << 47, 5), (300, 5), (2, 3), (1000, 5), (50, 5)]
    tables = [Table(f"t{i}", n, dim, (f"f{i}",), 0.01 * 3**i) for i, (n, dim) in enumerate(sizes)]
    return tables, RowSpace(tables, 5)


def some_rows(space):
    """Global rows of all tables, unordered, with repeats, first and last rows among them."""
    generator = torch.Generator().manual_seed(3)
    parts = [
        torch.cat([torch.tensor([0, table.rows - 1]), torch.randint(table.rows, (40,), generator=generator)]) + offset
        for table, offset in zip(space.tables, space.offsets, strict=True)
    ]
    rows = torch.cat(parts)
    return rows[torch.randperm(len(rows), generator=generator)]


def test_rows_of_mixed_tables_are_those_of_each_table():
    tables, space = mixed_space()
    rows = some_rows(space)
    out = torch.empty(len(rows), 5)
    InitialRows(space, seed=11).fill(out, rows)
    for table_index, offset in zip(space.table_index, space.offsets, strict=True):
        table = tables[table_index]
        here = (rows >= offset) & (rows < offset + table.rows)
        assert here.any()
        expected = initial_rows(11, table_index, rows[here] - offset, 5, table.init_bound)
        assert torch.equal(out[here], expected)


@pytest.mark.parametrize("dim", [1, 5, 16, 100])
@pytest.mark.parametrize("seed", [0, 9, -4])
def test_torch_and_compiled_rows_have_equal_bits(monkeypatch, dim, seed):
    _, space = mixed_space()
    rows = some_rows(space)
    made = InitialRows(space, seed)
    compiled, other, strided = torch.empty(len(rows), dim), torch.empty(len(rows), dim), torch.empty(dim, len(rows)).T
    made.fill(compiled, rows)
    monkeypatch.setattr(initial, "CHUNK", 24)
    initial._fill_torch(other, rows, made._tables)
    made.fill(strided, rows)
    assert torch.equal(compiled.view(torch.int32), other.view(torch.int32))
    assert torch.equal(compiled, strided)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_makes_equal_bits():
    _, space = mixed_space()
    rows = some_rows(space)
    made = InitialRows(space, 9)
    here, there = torch.empty(len(rows), 16), torch.empty(len(rows), 16, device="cuda")
    made.fill(here, rows)
    made.fill(there, rows.cuda())
    assert torch.equal(here, there.cpu())


def test_a_row_too_many_is_refused():
    with pytest.raises(ValueError, match="4 rows to write"):
        fill_initial_rows(torch.empty(3, 2), 1, 0, torch.arange(4), 0.5)


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
