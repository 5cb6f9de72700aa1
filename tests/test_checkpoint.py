import json
import resource
import shutil
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from hetrain import checkpoint
from hetrain.checkpoint import folder
from hetrain.errors import CheckpointError
from hetrain.ranks import Ranks
from tests.plain_engine import PlainEngine, batches
from tests.ranks import run_ranks

READER = {"epoch": 0, "lanes": [[(0, 10, 0, 3)]]}


def train(engine, n, seed):
    stream = iter(batches(n, 8, seed, 8 * engine.world_size))
    while engine.step(stream) is not None:
        pass
    return engine


def save(engine, path, ranks=None, **about):
    checkpoint.save(engine, path, ranks or Ranks(), reader=READER, about=about)


def same(one, other):
    return one.keys() == other.keys() and all(np.array_equal(one[k], other[k]) for k in one)


def test_resume_is_bit_for_bit(tmp_path):
    whole = train(train(PlainEngine(), 5, 1), 5, 2)
    save(train(PlainEngine(), 5, 1), tmp_path / "step_5")
    resumed = PlainEngine()
    torch.manual_seed(999)
    loaded = checkpoint.load(resumed, tmp_path / "step_5", Ranks())
    assert loaded.exact
    assert loaded.step == resumed.steps == 5
    assert loaded.reader == READER
    assert resumed.secret == 5
    # dropout draws from torch's generator: equal only because the checkpoint holds that too
    assert same(train(resumed, 5, 2).weights(), whole.weights())


def write_on_ranks(rank, world_size, path, cut):
    ranks = Ranks(rank, world_size, dist.group.WORLD)
    engine = train(PlainEngine(rank, world_size, cut), 3, rank)
    save(engine, path, ranks)
    return engine.weights()


def read_on_ranks(rank, world_size, path, cut):
    engine = PlainEngine(rank, world_size, cut, lr=0.01)
    loaded = checkpoint.load(engine, path, Ranks(rank, world_size, dist.group.WORLD))
    return engine.weights(), loaded.exact, float(engine.secret)


@pytest.mark.parametrize(("readers", "cut", "exact"), [(2, 17, True), (2, 30, False), (3, 5, False)])
def test_any_plan_and_world_size_reads_what_another_wrote(tmp_path, readers, cut, exact):
    written = run_ranks(2, write_on_ranks, tmp_path / "step_3", 17)
    for weights, was_exact, secret in run_ranks(readers, read_on_ranks, tmp_path / "step_3", cut):
        assert same(weights, written[0])
        assert was_exact == exact
        assert secret == (3 if exact else -1)
    alone = PlainEngine()
    assert not checkpoint.load(alone, tmp_path / "step_3", Ranks()).exact
    assert same(alone.weights(), written[0])


def test_keeps_the_newest_and_the_best(tmp_path):
    engine = PlainEngine()
    for step, auc in enumerate([0.5, 0.8, 0.6, None, 0.7]):
        save(engine, folder.step_folder(tmp_path, step), validation={"auc": auc})
        checkpoint.prune(tmp_path, 2, Ranks())
    assert [s for s, _ in folder.complete(tmp_path)] == [1, 3, 4]
    assert checkpoint.best(tmp_path).name == "step_1"
    assert checkpoint.newest(tmp_path).name == "step_4"


def test_an_interrupted_save_is_ignored_and_removed(tmp_path):
    save(PlainEngine(), tmp_path / "step_9")
    left = tmp_path / "step_10.tmp"
    shutil.copytree(tmp_path / "step_9", left)
    assert checkpoint.newest(tmp_path).name == "step_9"
    checkpoint.clean(tmp_path)
    assert not left.exists()
    assert checkpoint.newest(tmp_path / "none") is None


def test_saving_again_replaces(tmp_path):
    save(PlainEngine(), tmp_path / "step_1", note="old")
    save(PlainEngine(), tmp_path / "step_1", note="new")
    assert checkpoint.read_meta(tmp_path / "step_1")["note"] == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["step_1"]


def test_a_full_disk_leaves_the_previous_checkpoint(tmp_path):
    save(PlainEngine(), tmp_path / "step_1")
    full = OSError(28, "No space left on device")
    for target in ("hetrain.checkpoint._write", "torch.distributed.checkpoint.filesystem._write_item"):
        with mock.patch(target, side_effect=full), pytest.raises(CheckpointError, match=r"No space left.*keep"):
            save(PlainEngine(), tmp_path / "step_2")
        assert [p.name for p in tmp_path.iterdir()] == ["step_1"]
    checkpoint.load(PlainEngine(), tmp_path / "step_1", Ranks())


def test_what_the_system_says_of_a_write_is_told(tmp_path):
    """torch's writer meets it in a callback and raises an error of its own about positions in its file."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (512, limit[1]))  # Python ignores the signal that comes with it
    try:
        with pytest.raises(CheckpointError, match="File too large"):
            save(PlainEngine(), tmp_path / "step_1")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert list(tmp_path.iterdir()) == []


def full_on_rank_1(rank, world_size, path):
    ranks = Ranks(rank, world_size, dist.group.WORLD)
    target = "hetrain.checkpoint._write" if rank == 1 else "hetrain.checkpoint._never"
    with (
        mock.patch(target, side_effect=OSError(28, "No space left on device"), create=True),
        pytest.raises(CheckpointError, match="rank 1: OSError"),
    ):
        save(PlainEngine(rank, world_size), path, ranks)
    return True


def test_a_rank_that_cannot_write_stops_all(tmp_path):
    assert run_ranks(2, full_on_rank_1, tmp_path / "step_1") == [True, True]
    assert list(tmp_path.iterdir()) == []


def damage(name):
    def cut(path):
        file = next(path.rglob(name))
        file.write_bytes(file.read_bytes()[:-9])

    return cut


def other_bytes(name):
    def overwrite(path):
        file = next(path.rglob(name))
        file.write_bytes(b"\0" * file.stat().st_size)

    return overwrite


def one_bit(name):
    def flip(path):
        file = next(path.rglob(name))
        found = bytearray(file.read_bytes())
        found[len(found) // 2] ^= 1
        file.write_bytes(found)

    return flip


@pytest.mark.parametrize("name", ["dense.pt", "rank_0.pt", "__0_0.distcp", "meta.json", ".metadata"])
@pytest.mark.parametrize("how", [damage, other_bytes, one_bit])
def test_damage_is_named(tmp_path, name, how):
    path = tmp_path / "step_1"
    save(PlainEngine(), path)
    how(name)(path)
    with pytest.raises(CheckpointError, match=r"older checkpoint|older one"):
        checkpoint.load(PlainEngine(), path, Ranks())


def test_missing_and_foreign_formats_are_named(tmp_path):
    with pytest.raises(CheckpointError, match="no checkpoint at"):
        checkpoint.load(PlainEngine(), tmp_path, Ranks())
    (tmp_path / "meta.json").write_text(json.dumps({"format": 99}))
    with pytest.raises(CheckpointError, match="format 99"):
        checkpoint.load(PlainEngine(), tmp_path, Ranks())
    for foreign in ([], None, 3, {"format": folder.FORMAT}, {"format": folder.FORMAT, "step": 3}):
        (tmp_path / "meta.json").write_text(json.dumps(foreign))
        with pytest.raises(CheckpointError, match="is damaged"):
            checkpoint.load(PlainEngine(), tmp_path, Ranks())


def test_another_model_or_optimizer_is_refused_by_name(tmp_path):
    path = tmp_path / "step_1"
    save(PlainEngine(), path)
    other = PlainEngine()
    other.net.linear = torch.nn.Linear(2, 1)
    other.dense = dict(other.net.linear.named_parameters())
    with pytest.raises(CheckpointError, match=r"'weight' is \[1, 11\].*\[1, 2\]"):
        checkpoint.load(other, path, Ranks())
    full_adagrad = PlainEngine()
    full_adagrad.sums = {t: torch.zeros(50, 4) for t in "ab"}
    with pytest.raises(CheckpointError, match=r"table 'a'.*optimizer\.rows\.name"):
        checkpoint.load(full_adagrad, path, Ranks())
    sgd = PlainEngine()
    sgd.dense_optimizer = torch.optim.SGD(sgd.dense.values(), lr=0.1)
    with pytest.raises(CheckpointError, match=r"optimizer\.dense\.name"):
        checkpoint.load(sgd, path, Ranks())


def test_the_run_s_own_learning_rate_wins(tmp_path):
    save(train(PlainEngine(), 2, 1), tmp_path / "step_2")
    slower = PlainEngine(lr=0.001)
    checkpoint.load(slower, tmp_path / "step_2", Ranks())
    assert slower.dense_optimizer.param_groups[0]["lr"] == 0.001
