"""Rows kept all from the start or only once seen: the same rows either way, and what happens when memory ends."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hetrain.errors import ConfigError, TrainingError
from hetrain.store import row_memory
from hetrain.store.initial import InitialRows
from hetrain.store.row_memory import Column, HashMemory, available_bytes, make_row_memory
from hetrain.store.space import Placement, RowSpace
from hetrain.tables import Table
from tests.store.loopback import plan_of

CPU = torch.device("cpu")
COLUMNS = {
    "value": Column((3,), torch.float32),
    "state": Column((2,), torch.float32),
    "clock": Column((), torch.int64),
    "touched": Column((), torch.bool),
    "holder": Column((4,), torch.int32, fill=-1),
}
FILLS = {name: column.fill for name, column in COLUMNS.items() if name != "value"}


def make(kind, tables=(9, 4, 30), world=3, rank=1, seed=2, device=CPU):
    space = RowSpace([Table(f"t{i}", n, 3, (f"f{i}",), 0.5 + i) for i, n in enumerate(tables)], 3)
    placement = Placement(space, plan_of(tables, world, seed), world)
    initial = InitialRows(space, 5)
    return placement, initial, make_row_memory(kind, placement, rank, COLUMNS, initial, device)


def owned_rows(placement, rank=1):
    rows = torch.arange(placement.space.rows)
    return rows[placement.owner_of(rows) == rank]


def initial_values(initial, rows):
    values = torch.empty(len(rows), 3)
    initial.fill(values, rows)
    return values


def check_untouched(memory, initial):
    rows = memory.rows()
    assert len(rows) == memory.used
    assert torch.equal(memory["value"], initial_values(initial, rows))
    for name, fill in FILLS.items():
        assert memory[name].shape == (memory.used, *COLUMNS[name].shape)
        assert memory[name].dtype == COLUMNS[name].dtype
        assert (memory[name] == fill).all()


@pytest.mark.parametrize("seed", range(5))
def test_array_memory_holds_all_rows_from_the_start(monkeypatch, seed):
    monkeypatch.setattr(row_memory, "FILL_ROWS", 4)
    placement, initial, memory = make("array", seed=seed)
    rows = owned_rows(placement)
    assert memory.used == len(rows)
    assert torch.equal(memory.rows()[placement.local_of(rows)], rows)
    assert torch.equal(memory.locate(rows), placement.local_of(rows))
    assert torch.equal(memory.place(rows), placement.local_of(rows))
    check_untouched(memory, initial)
    for name in COLUMNS:
        memory[name].fill_(1)
    memory.reset()
    check_untouched(memory, initial)


@pytest.fixture(params=["reserved", "doubling", "refused"])
def growth(request, monkeypatch):
    """The ways a column grows; on the CPU address space is reserved unless that fails."""
    if request.param == "doubling":
        monkeypatch.setattr(row_memory, "_reservable", lambda rows, row_bytes: 0)
    if request.param == "refused":
        make_empty = row_memory._empty

        def limited(column, rows, device):
            if rows > 35:
                raise MemoryError
            return make_empty(column, rows, device)

        monkeypatch.setattr(row_memory, "_empty", limited)
    return request.param


def test_hash_memory_makes_rows_when_they_are_placed(growth):
    placement, initial, memory = make("hash", tables=(9, 4, 90), world=1, rank=0)
    rows = owned_rows(placement, 0)
    assert memory.used == 0
    check_untouched(memory, initial)
    asked = rows[[5, 2, 5, 7]]
    assert memory.locate(asked).tolist() == [-1] * 4
    assert memory.used == 0
    assert memory.place(asked).tolist() == [1, 0, 1, 2]
    assert memory.rows().tolist() == rows[[2, 5, 7]].tolist()
    check_untouched(memory, initial)
    memory["clock"][1] = 8
    memory["value"][1] = 4.0
    assert memory.place(rows[[7, 5, 1, 2]]).tolist() == [2, 1, 3, 0]
    assert memory.locate(rows[[0, 1, 2]]).tolist() == [-1, 3, 0]
    assert memory["clock"].tolist() == [0, 8, 0, 0]
    assert (memory["value"][1] == 4).all()
    memory.place(rows[:12])
    assert torch.equal(memory.rows()[memory.locate(rows[:12])], rows[:12])
    assert memory["clock"].sum() == 8
    memory.reset()
    assert memory.locate(asked).tolist() == [-1] * 4
    memory.place(rows[:9].repeat(3))
    assert memory.used == 9
    check_untouched(memory, initial)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_both_memories_hold_the_same_rows(data):
    world = data.draw(st.integers(1, 3))
    rank, seed = data.draw(st.integers(0, world - 1)), data.draw(st.integers(0, 99))
    placement, _, array = make("array", world=world, rank=rank, seed=seed)
    _, _, hashed = make("hash", world=world, rank=rank, seed=seed)
    rows = owned_rows(placement, rank)
    if len(rows) == 0:
        return
    written = set()
    for step in range(data.draw(st.integers(1, 8))):
        asked = rows[data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=12, unique=True))]
        written |= set(asked.tolist())
        for memory in (array, hashed):
            at = memory.place(asked)
            memory["value"][at] += step
            memory["clock"][at] += asked
            memory["holder"][at, step % 4] = step
    everywhere = hashed.rows()
    assert set(everywhere.tolist()) == written
    assert torch.equal(hashed.locate(everywhere), torch.arange(hashed.used))
    for name in COLUMNS:
        assert torch.equal(hashed[name], array[name][array.locate(everywhere)])


def test_ten_thousand_million_rows_start_at_once_and_cost_what_was_seen():
    before = resident_bytes()
    _, initial, memory = make("hash", tables=(10**10, 5 * 10**9), world=1, rank=0)
    rng = np.random.default_rng(0)
    rows = torch.from_numpy(rng.integers(0, 15 * 10**9, 200_000))
    for part in rows.split(3_328):
        at = memory.place(part)
        assert torch.equal(memory.rows()[at], part)
    assert memory.used == len(rows.unique())
    check_untouched(memory, initial)
    row_bytes = 8 + sum(column.row_bytes for column in COLUMNS.values())
    assert memory.nbytes_used <= memory.used * (row_bytes + row_memory.INDEX_BYTES)
    if before is not None:
        assert resident_bytes() - before < 150 << 20


def resident_bytes():
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * 4096 if statm.exists() else None


def test_a_row_starts_on_a_cache_line():
    _, _, memory = make("hash")
    assert all(tensor.data_ptr() % row_memory.LINE == 0 for tensor in memory._tensors.values())


MESSAGE = (
    r"store\.index=hash: rank 0 has seen 10 of its 1,000 rows of embedding dim 3, which take 0\.00 GiB, and {}\. Spread"
)


def full_memory(reason):
    placement, initial, memory = make("hash", tables=(1000,), world=1, rank=0)
    memory.place(torch.arange(10))
    with pytest.raises(TrainingError, match=MESSAGE.format(reason)):
        memory.place(torch.arange(5, 40))
    assert memory.used == 10
    assert memory.locate(torch.tensor([3, 12])).tolist() == [3, -1]
    check_untouched(memory, initial)
    assert isinstance(memory, HashMemory)
    return placement, memory


def test_the_reserved_rows_run_out(monkeypatch):
    monkeypatch.setattr(row_memory, "_reservable", lambda rows, row_bytes: 20)
    full_memory("more do not fit into this host's memory")


def test_the_host_runs_out(monkeypatch):
    left = iter([1 << 30, 2048])
    monkeypatch.setattr(row_memory, "available_bytes", lambda: next(left))
    monkeypatch.setattr(row_memory, "GRANT_BYTES", 0)
    full_memory(r"0\.00 GiB are left")


def test_the_device_runs_out(monkeypatch):
    monkeypatch.setattr(row_memory, "_reservable", lambda rows, row_bytes: 0)
    make_empty = row_memory._empty

    def limited(column, rows, device):
        if rows > 30 and column.dtype == torch.int64:
            raise torch.OutOfMemoryError
        return make_empty(column, rows, device)

    monkeypatch.setattr(row_memory, "_empty", limited)
    full_memory("there is no cpu memory for 40")


@pytest.mark.parametrize("free", [1000, None])
def test_an_array_that_does_not_fit_is_refused(monkeypatch, free):
    monkeypatch.setattr(row_memory, "available_bytes", lambda: free)

    def fails(*arguments):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(row_memory, "_empty", fails)
    with pytest.raises(ConfigError, match=r"store\.index=array: all 1,000 rows .* on rank 0 need .* store\.index=hash"):
        make("array", tables=(1000,), world=1, rank=0)


def test_an_unknown_kind_is_refused():
    with pytest.raises(ConfigError, match=r"store\.index=tree"):
        make("tree")


def test_available_memory_heeds_the_container(monkeypatch):
    files = {
        "/proc/meminfo": "MemTotal: 100 kB\nMemAvailable:  50 kB\nHugePages_Total: 0\n",
        "/sys/fs/cgroup/memory.max": "30000\n",
        "/sys/fs/cgroup/memory.current": "10000\n",
    }

    def path(name):
        return SimpleNamespace(exists=lambda: name in files, read_text=lambda: files[name])

    monkeypatch.setattr(row_memory, "Path", path)
    assert available_bytes() == 20_000
    files["/sys/fs/cgroup/memory.max"] = "max\n"
    assert available_bytes() == 50 * 1024
    del files["/proc/meminfo"]
    assert available_bytes() is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", ["array", "hash"])
def test_a_gpu_holds_the_same_rows(kind):
    placement, initial, memory = make(kind, device=torch.device("cuda"))
    rows = owned_rows(placement)
    for part in rows.flip(0).split(4):
        at = memory.place(part.cuda())
        assert torch.equal(memory["value"][at].cpu(), initial_values(initial, part))
    assert (memory["holder"] == -1).all()
