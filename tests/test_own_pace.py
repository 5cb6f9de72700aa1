"""Whole small runs whose ranks step at their own pace: counts, meetings, stopping, resuming, servers, eval, predict."""

import json
import math
import os
import signal
import time
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from hetrain import build
from hetrain.data.sample import ensure_sample
from tests import small_run
from tests.ranks import run_ranks
from tests.small_run import config, train
from tests.test_servers import evaluate_run

NO_CACHE = {"consistency__cache__capacity": 0.0}
MODES = [("asp", NO_CACHE), ("ssp", {})]
NO_BOUND = {"consistency__staleness": math.inf}


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    ensure_sample(config(folder, "bsp").data)
    return folder / "sample"


@pytest.fixture
def cfg_of(sample, tmp_path):
    return lambda mode, **changes: config(tmp_path, mode, data__path=str(sample), **changes)


def lines_of(cfg, kind):
    folder = Path(cfg.runs) / str(cfg.name)
    return [x for x in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()) if x["kind"] == kind]


@pytest.mark.parametrize(("mode", "changes"), [*MODES, ("ssp", NO_BOUND), ("asp", NO_CACHE | NO_BOUND)])
@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad"])
def test_one_worker_is_bsp(cfg_of, mode, changes, optimizer):
    more = {"optimizer__rows__name": optimizer, "telemetry__log_every": 1, "train__eval_every": 7}
    bsp, own = cfg_of("bsp", **more), cfg_of(mode, **more, **changes)
    (expected, theirs), (found, ours) = train(0, 1, bsp), train(0, 1, own)
    for key in ("steps", "examples", "stop_reason", "best_step"):
        assert found[key] == expected[key], key
    assert found["auc"] == pytest.approx(expected["auc"], abs=1e-4)
    one, other = lines_of(own, "train"), lines_of(bsp, "train")
    assert [(x["step"], x["examples"]) for x in one] == [(x["step"], x["examples"]) for x in other]
    assert [x["loss"] for x in one] == pytest.approx([x["loss"] for x in other], rel=1e-4)
    assert [x["step"] for x in lines_of(own, "validation")] == [x["step"] for x in lines_of(bsp, "validation")]
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        np.testing.assert_allclose(ours[name], value, rtol=2e-3, atol=2e-5, err_msg=name)


def slowed(rank, world_size, cfg, slow, delay_s=0.02):
    """A run in which rank `slow` takes longer over every step; also its batches, and when it ended its last."""
    trainer = small_run.make(cfg, rank, world_size)
    step, taken = trainer.setup.engine.step, []

    def delayed(batches):
        if rank == slow:
            time.sleep(delay_s)
        out = step(batches)
        if out is not None:
            taken.append((time.perf_counter(), out.examples))
        return out

    with mock.patch.object(trainer.setup.engine, "step", delayed):
        return trainer.run(), taken, small_run.weights(trainer.setup.engine)


@pytest.mark.parametrize(("mode", "changes"), MODES)
@pytest.mark.parametrize("servers", [0, 1])
def test_ranks_end_at_their_own_pace_and_train_every_example_once(cfg_of, mode, changes, servers):
    cfg = cfg_of(mode, train__eval_every=6, cluster__servers=servers, **changes)
    ranks = run_ranks(2 + servers, slowed, cfg, 1)
    summary = ranks[0][0]
    assert all(s["examples"] == 6400 and s["stop_reason"] == "end of data" for s, _, _ in ranks)
    assert summary["steps"] == 20
    assert [sum(n for _, n in taken) for _, taken, _ in ranks] == [3200, 3200] + [0] * servers
    assert [x["step"] for x in lines_of(cfg, "validation")] == [6, 12, 18, 20]
    logloss = [x["logloss"] for x in lines_of(cfg, "validation")]
    assert logloss == sorted(logloss, reverse=True)
    assert 0 < summary["first_end"]["examples"] <= 6400
    if mode == "ssp":
        assert summary["lead_max"] == summary["observed_staleness_max"] == 5
    else:
        assert summary["first_end"]["examples"] < 6400
        assert summary["observed_staleness_max"] >= 1


@pytest.mark.parametrize(("mode", "changes"), MODES)
def test_max_steps_is_exact(cfg_of, mode, changes):
    cfg = cfg_of(mode, train__max_steps=7, **changes)
    ranks = run_ranks(2, slowed, cfg, 0)
    assert {(s["steps"], s["examples"], s["stop_reason"]) for s, _, _ in ranks} == {(7, 7 * 320, "max_steps")}
    assert sum(n for _, taken, _ in ranks for _, n in taken) == 7 * 320


def signalled(rank, world_size, cfg, at, which):
    """A run in which rank `which` gets SIGTERM before its step `at`, or while it has nothing to do (`at` 0)."""
    trainer = small_run.make(cfg, rank, world_size)
    step, count = trainer.setup.engine.step, 0

    def counted(batches):
        nonlocal count
        count += 1
        if rank == which and count == max(at, 1):
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01)
        return step(batches)

    with mock.patch.object(trainer.setup.engine, "step", counted):
        return trainer.run()


@pytest.mark.parametrize(("mode", "changes"), MODES)
@pytest.mark.parametrize(("servers", "which"), [(0, 0), (0, 1), (1, 2)])
def test_stopped_by_a_signal_and_resumed_trains_the_rest(cfg_of, mode, changes, servers, which):
    cfg = cfg_of(mode, cluster__servers=servers, **changes)
    stopped = run_ranks(2 + servers, signalled, cfg, 5 * (which < 2), which)
    assert {(s["interrupted"], s["stop_reason"]) for s in stopped} == {(True, "SIGTERM")}
    trained = stopped[0]["examples"]
    assert trained < 6400
    resumed = run_ranks(2 + servers, slowed, cfg, 1)
    assert all(s["examples"] == 6400 and not s["interrupted"] for s, _, _ in resumed)
    assert sum(n for _, taken, _ in resumed for _, n in taken) == 6400 - trained
    assert resumed[0][0]["steps"] == 20


@pytest.mark.parametrize(("before", "after"), [("asp", "bsp"), ("ssp", "het"), ("het", "asp"), ("bsp", "ssp")])
def test_a_checkpoint_fits_every_mode(cfg_of, before, after):
    """Weights and dense optimizer state are taken up exactly; ranks that were apart share out what is left."""
    changes = dict(MODES)
    first = cfg_of(before, name="first", train__max_steps=9, **changes.get(before, {}))
    trained = run_ranks(2, slowed, first, 1)
    more = {"checkpoint__resume": f"{first.runs}/first", "name": "second", "optimizer__schedule__warmup_steps": 5}
    second = cfg_of(after, **more, **changes.get(after, {}))
    taken = run_ranks(2, taken_up, second)
    whole = [{k: v for rank in ranks for k, v in rank.items()} for ranks in ([w for *_, w in trained], taken)]
    dense = [name for name in whole[0] if name.startswith("dense")]
    assert dense
    for name in dense:
        np.testing.assert_array_equal(whole[0][name], whole[1][name], err_msg=name)
    resumed = run_ranks(2, train, second)
    assert resumed[0][0]["examples"] == 6400


def taken_up(rank, world_size, cfg):
    trainer = small_run.make(cfg, rank, world_size)
    if trainer.setup.lock is not None:
        trainer.setup.lock.release()
    return small_run.weights(trainer.setup.engine)


@pytest.mark.parametrize("mode", ["asp", "ssp"])
@pytest.mark.parametrize("index", ["array", "hash"])
def test_eval_gives_the_numbers_training_gave(cfg_of, mode, index):
    cfg = cfg_of(mode, store__index=index, **dict(MODES)[mode])
    summary = run_ranks(2, train, cfg)[0][0]
    assert [metrics["auc"] for metrics in run_ranks(2, evaluate_run, cfg)] == [summary["test"]["auc"]] * 2
    alone = build_alone(cfg)
    assert alone["auc"] == pytest.approx(summary["auc"], abs=1e-6)
    served = cfg_of(mode, store__index=index, cluster__servers=1, **dict(MODES)[mode])
    elsewhere = run_ranks(3, evaluate_run, served)[0]
    assert elsewhere["auc"] == pytest.approx(summary["auc"], abs=1e-6)


def build_alone(cfg):
    import torch

    return build.evaluate_run(
        cfg, {"run": f"{cfg.runs}/{cfg.name}"}, small_run.ranks_of(), torch.device("cpu")
    ).as_dict()


def test_early_stopping(cfg_of):
    strong = {"optimizer__rows__lr": 0.5, "optimizer__dense__lr": 0.05}
    cfg = cfg_of("ssp", train__eval_every=2, train__patience=2, **strong)
    summaries = [s for s, _ in run_ranks(2, train, cfg)]
    assert summaries[0]["weights_step"] == summaries[1]["weights_step"] == summaries[0]["best_step"]
