"""Batches: the right columns, every example once per epoch, exact resumption, threads that end."""

import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hetrain.data.reader import Reader
from hetrain.errors import CheckpointError, ConfigError, DataError
from tests.data.sets import write_set


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    made = {}

    def get(examples, multi_hot=False):
        key = (examples, multi_hot)
        if key not in made:
            made[key] = write_set(tmp_path_factory.mktemp("set") / "d", examples, multi_hot=multi_hot)
        return made[key]

    return get


def numbers(batch):
    return batch.dense[:, 0].long().tolist()


def check_columns(batch, multi_hot):
    """Every column of the batch belongs to the example that I1 names."""
    n = batch.dense[:, 0].long()
    b = len(n)
    assert batch.dense.dtype == batch.labels.dtype == torch.float32
    assert torch.equal(batch.dense[:, 1].long(), n * 2)
    assert torch.equal(batch.labels.long(), n % 2)
    assert batch.sparse.keys() == ["C1", "C2", "C3"]
    assert batch.sparse.stride() == b
    assert batch.sparse.values().dtype == torch.int64
    if not b:  # TorchRec's to_dict cannot split a stride of 0
        assert not len(batch.sparse.values())
        assert batch.sparse.offsets().tolist() == [0]
        return
    columns = batch.sparse.to_dict()
    assert torch.equal(columns["C1"].values(), n % 7)
    assert torch.equal(columns["C3"].values(), n % 11)
    lengths = n % 3 if multi_hot else torch.ones_like(n)
    assert torch.equal(columns["C2"].lengths().long(), lengths)
    assert torch.equal(columns["C2"].values(), torch.repeat_interleave(n % 5, lengths))
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), batch.sparse.lengths().long().cumsum(0)])
    assert torch.equal(batch.sparse.offsets().long(), offsets)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([1, 7, 100, 163]),
    st.integers(1, 4),
    st.integers(1, 40),
    st.integers(1, 50),
    st.booleans(),
    st.booleans(),
)
def test_every_example_once_per_epoch(sets, n, w, b, window, shuffle, multi_hot):
    path = sets(n, multi_hot)
    ranks = [
        list(Reader(path, "train", b, r, w, epochs=2, shuffle=shuffle, seed=5, shuffle_window=window)) for r in range(w)
    ]
    steps = Reader(path, "train", b, 0, w).steps_per_epoch
    assert {len(batches) for batches in ranks} == {2 * steps}
    epochs = []
    for epoch in range(2):
        epochs.append(
            [x for batches in ranks for batch in batches[epoch * steps : (epoch + 1) * steps] for x in numbers(batch)]
        )
        assert sorted(epochs[-1]) == list(range(n))
    for step in range(2 * steps):
        assert {batches[step].global_size for batches in ranks} == {sum(batches[step].size for batches in ranks)}
    for batches in ranks:
        for batch in batches:
            check_columns(batch, multi_hot)
    if not shuffle:
        assert epochs[0] == list(range(n))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 30), st.integers(0, 40), st.booleans())
def test_resume(sets, w, other, b, trained, shuffle):
    path = sets(163)
    options = {"epochs": 2, "shuffle": shuffle, "seed": 2, "shuffle_window": 40}
    readers = [Reader(path, "train", b, r, w, **options) for r in range(w)]
    whole = [[numbers(batch) for batch in reader] for reader in readers]
    total, per_epoch = readers[0].steps_left, readers[0].steps_per_epoch
    trained = min(trained, total)
    for reader in readers:
        reader.trained(trained)
    state = readers[0].state_dict()
    assert all(reader.state_dict() == state for reader in readers)
    for rank in range(w):
        again = Reader(path, "train", b, rank, w, state=state, **options)
        assert (again.steps_left, again.epoch) == (total - trained, trained // per_epoch)
        assert [numbers(batch) for batch in again] == whole[rank][trained:]
        assert [numbers(batch) for batch in readers[rank]] == whole[rank][trained:]
    moved = [Reader(path, "train", 9, r, other, state=state, **options) for r in range(other)]
    left = sorted(x for reader in moved for batch in reader for x in numbers(batch))
    assert left == sorted(x for lane in whole for batch in lane[trained:] for x in batch)
    for reader in moved:  # and once more from a position inside what was dealt again
        reader.trained(min(1, reader.steps_left))
    assert all(reader.state_dict() == moved[0].state_dict() for reader in moved)


@pytest.mark.parametrize("multi_hot", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_rank_without_data_keeps_step(sets, multi_hot, shuffle):
    options = {"epochs": 2, "shuffle": shuffle, "seed": 2, "shuffle_window": 40}
    path = sets(163, multi_hot)
    worker, server = (Reader(path, "train", 7, rank, 2, prefetch=p, **options) for rank, p in ((1, 4), (None, 0)))
    for _ in range(2):  # the second time from inside an epoch
        theirs, ours = list(worker), list(server)
        assert [batch.global_size for batch in ours] == [batch.global_size for batch in theirs]
        for batch in ours:
            assert batch.size == 0
            check_columns(batch, multi_hot)
        for reader in (worker, server):
            reader.trained(5)
        assert server.state_dict() == worker.state_dict()
        assert server.steps_left == worker.steps_left == len(theirs) - 5


@pytest.mark.parametrize("multi_hot", [False, True])
def test_reading_between_steps_gives_the_batches_of_threads(sets, multi_hot):
    options = {"epochs": 2, "shuffle": True, "seed": 3, "shuffle_window": 40}
    inline, ahead = (Reader(sets(163, multi_hot), "train", 7, 1, 2, prefetch=p, **options) for p in (0, 4))
    assert [numbers(batch) for batch in inline] == [numbers(batch) for batch in ahead]
    assert not readers_alive()
    assert inline.wait_s > 0


def test_shuffling_depends_on_seed_and_epoch(sets):
    orders = [
        [
            x
            for batch in Reader(sets(163), "train", 200, 0, 1, shuffle=True, seed=seed, epochs=2)
            for x in numbers(batch)
        ]
        for seed in (0, 0, 1)
    ]
    assert orders[0] == orders[1]
    assert orders[0] != orders[2]
    assert orders[0][:163] != orders[0][163:]


def test_one_rank_without_examples_yields_empty_batches(sets):
    batches = list(Reader(sets(1), "train", 4, 0, 3))
    assert [batch.size for batch in batches] == [0]
    assert batches[0].global_size == 1
    assert batches[0].sparse.keys() == ["C1", "C2", "C3"]
    check_columns(batches[0], False)


def readers_alive():
    return [thread for thread in threading.enumerate() if thread.name == "hetrain-reader"]


def test_threads_end_after_an_early_break(sets):
    for _ in Reader(sets(163), "train", 2, 0, 1, shuffle=True, epochs=50):
        break
    deadline = time.monotonic() + 5
    while readers_alive() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not readers_alive()


def test_an_id_out_of_range_is_named(tmp_path):
    path = write_set(tmp_path / "d", 100)
    text = (path / "schema.json").read_text().replace('"rows": 11', '"rows": 10')
    (path / "schema.json").write_text(text)
    with pytest.raises(DataError, match=r"part-00000\.parquet: row 10, column C3: 10, expected an id from 0 to 9"):
        list(Reader(path, "train", 8, 0, 1))
    assert not readers_alive()


def test_a_multi_hot_id_out_of_range_names_its_row(tmp_path):
    path = write_set(tmp_path / "d", 100, multi_hot=True)
    text = (path / "schema.json").read_text().replace('"rows": 5', '"rows": 4')
    (path / "schema.json").write_text(text)
    with pytest.raises(DataError, match=r"row 4, column C2: 4, expected"):
        list(Reader(path, "train", 8, 0, 1))


@pytest.mark.parametrize(("value", "shown"), [(float("nan"), "nan"), (float("inf"), "inf"), (None, "missing")])
def test_a_number_that_is_none_is_named(tmp_path, value, shown):
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = write_set(tmp_path / "d", 100, files=1)
    file = path / "train" / "part-00000.parquet"
    table = pq.read_table(file)
    column = [*map(float, range(100))]
    column[37] = value
    table = table.set_column(2, "I2", pa.array(column, pa.float32()))
    pq.write_table(table, file, row_group_size=16)
    with pytest.raises(DataError, match=f"row 37, column I2: {shown}"):
        list(Reader(path, "train", 8, 0, 1))


def test_mistakes_are_told(sets, tmp_path):
    with pytest.raises(DataError, match="hetrain prepare"):
        Reader(tmp_path / "nothing", "train", 8, 0, 1)
    with pytest.raises(ConfigError, match="batch_size=0"):
        Reader(sets(7), "train", 0, 0, 1)
    with pytest.raises(DataError, match="no rows"):
        Reader(sets(7), "validation", 8, 0, 1)
    state = Reader(sets(7), "train", 8, 0, 1).state_dict()
    with pytest.raises(CheckpointError, match="7 rows"):
        Reader(sets(100), "train", 8, 0, 1, state=state)


def test_waiting_is_measured(sets):
    reader = Reader(sets(163), "train", 2, 0, 1)
    list(reader)
    assert 0 < reader.wait_s < 5
    assert np.isfinite(reader.wait_s)
