import json
import shutil
from pathlib import Path
from unittest import mock

import pytest

from hetrain import build, checkpoint
from hetrain.errors import ConfigError, TrainingError
from tests import small_run
from tests.ranks import run_ranks
from tests.small_run import check_predictions, config, evaluate_run, predict_run, same, train, train_with_signal

MODES = ["bsp", "het"]
CELLS = [(mode, world_size) for mode in MODES for world_size in (1, 2)]


def robbed(cfg, replaced=False):
    """A run of one rank whose folder is removed before its sixth step, and may be another run's before the seventh."""
    trainer, taken = small_run.make(cfg), 0
    step, folder = trainer.setup.engine.step, Path(cfg.runs) / cfg.name

    def counted(batches):
        nonlocal taken
        taken += 1
        if taken == 6:
            shutil.rmtree(folder)
            if replaced:
                folder.mkdir()
                (folder / "config.yaml").touch()
        return step(batches)

    with mock.patch.object(trainer.setup.engine, "step", counted):
        return trainer.run()


@pytest.mark.parametrize("mode", [*MODES, "ssp"])
def test_a_folder_removed_meanwhile_is_made_anew(cfg_of, mode):
    cfg = cfg_of(mode, checkpoint__every=4, telemetry__log_every=1)
    summary = robbed(cfg)
    assert evaluate_run(0, 1, cfg)["auc"] == summary["auc"]
    lines = (Path(cfg.runs) / cfg.name / "metrics.jsonl").read_text().splitlines()
    assert min(json.loads(line)["step"] for line in lines) == 9
    with pytest.raises(ConfigError, match="is finished"):
        small_run.make(cfg)


def test_a_folder_that_is_another_runs_meanwhile_is_left_alone(cfg_of):
    cfg = cfg_of("bsp", checkpoint__every=4)
    with pytest.raises(ConfigError, match="was removed while this run went on, and another run has taken its place"):
        robbed(cfg, replaced=True)
    assert sorted(path.name for path in (Path(cfg.runs) / cfg.name).iterdir()) == [".lock", "config.yaml"]


def on_ranks(world_size, fn, *args):
    return [fn(0, 1, *args)] if world_size == 1 else run_ranks(world_size, fn, *args)


@pytest.mark.parametrize(("mode", "world_size"), CELLS)
def test_resumed_after_sigterm_equals_uninterrupted(cfg_of, mode, world_size):
    whole = on_ranks(world_size, train, cfg_of(mode, name="whole"))
    cut = cfg_of(mode, name="cut")
    stopped = on_ranks(world_size, train_with_signal, cut, 7, world_size - 1)
    assert all(s["interrupted"] and s["stop_reason"] == "SIGTERM" for s in stopped)
    assert len({s["steps"] for s in stopped}) == 1
    assert 7 <= stopped[0]["steps"] <= 8
    resumed = on_ranks(world_size, train, cut)
    for (summary, weights), (whole_summary, whole_weights) in zip(resumed, whole, strict=True):
        same(weights, whole_weights)
        assert not summary["interrupted"]
        for key in ("steps", "examples", "auc", "logloss", "validation", "cache", "observed_staleness_max"):
            assert summary[key] == whole_summary[key], key
        # not `ids`: bsp had sent those of the batch after already
        for channel in ("rows_pull", "rows_push", "clocks", "pooled_fwd", "pooled_bwd", "dense"):
            assert summary["bytes"][channel] == whole_summary["bytes"][channel], channel


@pytest.mark.parametrize(("mode", "world_size"), CELLS)
def test_looking_and_saving_do_not_disturb(cfg_of, mode, world_size):
    often = cfg_of(mode, name="often", train__eval_every=3, checkpoint__every=2)
    never = cfg_of(mode, name="never", train__eval_every=10_000, checkpoint__every=10_000)
    for (s, w), (s2, w2) in zip(on_ranks(world_size, train, often), on_ranks(world_size, train, never), strict=True):
        same(w, w2)
        assert (s["auc"], s["bytes"], s["cache"]) == (s2["auc"], s2["bytes"], s2["cache"])


@pytest.mark.parametrize("mode", MODES)
def test_eval_and_predict_give_the_numbers_training_gave(cfg_of, mode, tmp_path, capsys):
    cfg = cfg_of(mode)
    (summary, _), _ = run_ranks(2, train, cfg)
    again = run_ranks(2, evaluate_run, cfg)
    assert again[0] == again[1]
    assert {k: again[0][k] for k in ("auc", "logloss", "examples")} == {
        k: summary["test"][k] for k in ("auc", "logloss", "examples")
    }
    alone = evaluate_run(0, 1, cfg)
    assert alone["auc"] == pytest.approx(summary["auc"], abs=1e-6)
    assert json.loads(capsys.readouterr().out)["auc"] == alone["auc"]
    out = tmp_path / "scores.parquet"
    run_ranks(2, predict_run, cfg, str(out))
    check_predictions(out, cfg, summary)


@pytest.mark.parametrize("mode", MODES)
def test_a_run_leaves_what_it_promises(cfg_of, mode):
    cfg = cfg_of(mode, telemetry__tensorboard=True)
    summary, _ = train(0, 1, cfg)
    folder = Path(cfg.runs) / mode
    assert json.loads((folder / "summary.json").read_text()) == summary
    promised = """model mode staleness world_size steps examples examples_per_s seconds auc logloss normalized_entropy
        base_rate bytes cache observed_staleness_max missed_updates_max wait_data_share wait_comm_share versions"""
    assert set(promised.split()) <= summary.keys()
    assert summary["steps"] == 40
    assert summary["examples"] == 6400
    assert (folder / "config.yaml").exists()
    assert json.loads((folder / "plan.json").read_text())["world_size"] == 1
    assert list((folder / "tb").glob("events*"))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "train"] == list(range(5, 41, 5))
    assert [line["step"] for line in lines if line["kind"] == "validation"] == [20, 40]
    assert [p.name for p in checkpoint.newest(folder / "checkpoints").parent.iterdir()]


def test_metrics_of_steps_that_were_not_saved_are_dropped(cfg_of):
    cfg = cfg_of("het", train__max_steps=10, checkpoint__every=5)
    train(0, 1, cfg)
    file = Path(cfg.runs) / "het" / "metrics.jsonl"
    with file.open("a") as f:
        f.write('{"step": 15, "kind": "train"}\n{"step": 20, "ki')
    train(0, 1, cfg_of("het", train__max_steps=20, checkpoint__every=5))
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    steps = [line["step"] for line in lines]
    assert steps == sorted(steps)
    assert steps.count(15) == 1
    assert all(line["examples"] == 160 * line["step"] for line in lines if line["kind"] == "train")  # of all sittings


@pytest.mark.parametrize("mode", MODES)
def test_a_longer_run_goes_on_from_a_finished_one_bit_for_bit(cfg_of, mode):
    _, whole = train(0, 1, cfg_of(mode, name="whole", train__max_steps=30))
    train(0, 1, cfg_of(mode, name="cut", train__max_steps=15))
    _, resumed = train(0, 1, cfg_of(mode, name="cut", train__max_steps=30))
    same(resumed, whole)


def test_world_size_and_mode_may_change(cfg_of):
    first = cfg_of("bsp", name="two", train__max_steps=4)
    run_ranks(2, train, first)
    second = cfg_of("het", name="one", train__max_steps=12, checkpoint__resume=f"{first.runs}/two")
    summary, _ = train(0, 1, second)
    assert summary["steps"] == 12
    assert summary["examples"] == 4 * 2 * 160 + 8 * 160


def test_a_run_is_never_written_over(cfg_of):
    train(0, 1, cfg_of("bsp", train__max_steps=3))
    with pytest.raises(ConfigError, match="is finished"):
        train(0, 1, cfg_of("bsp", train__max_steps=3))
    with pytest.raises(ConfigError, match=r"checkpoint\.resume=never"):
        train(0, 1, cfg_of("bsp", train__max_steps=5, checkpoint__resume="never"))
    with pytest.raises(ConfigError, match=r"other settings.*seed: 1 there, 2 now"):
        train(0, 1, cfg_of("bsp", train__max_steps=5, seed=2))
    runs = Path(cfg_of("bsp").runs)
    (runs / "mine").mkdir()
    (runs / "mine" / "notes.txt").touch()
    with pytest.raises(ConfigError, match="holds no run"):
        train(0, 1, cfg_of("bsp", name="mine"))


def test_keeps_the_last_checkpoints_and_stops_early_at_the_best(cfg_of):
    cfg = cfg_of("het", train__eval_every=2, train__patience=3, optimizer__rows__lr=0.5, checkpoint__keep=2)
    scores = iter([0.6, 0.7, 0.65, 0.64, 0.63, 0.1])
    real = build.evaluate

    def scripted(engine, batches, ranks):
        found = real(engine, batches, ranks)
        return type(found)(next(scores), *list(vars(found).values())[1:])

    with mock.patch("hetrain.trainer.evaluate", scripted):
        summary, _ = train(0, 1, cfg)
    assert summary["stop_reason"] == "early stopping"
    assert (summary["steps"], summary["best_step"], summary["weights_step"]) == (10, 4, 4)
    folder = Path(cfg.runs) / "het"
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == ["step_10", "step_4", "step_8"]
    again = evaluate_run(0, 1, cfg)
    assert again["logloss"] == summary["test"]["logloss"]


@pytest.mark.parametrize("mode", MODES)
def test_ranks_without_examples_keep_step(tmp_path, mode):
    """61 examples on three ranks, 20, 20 and 21: the second step has one example. Two of three ranks can validate."""
    cfg = config(tmp_path, mode, train__batch_size=20, train__epochs=1, telemetry__log_every=1)
    cfg.data.sample.rows = 65
    cfg.data.split.train, cfg.data.split.validation, cfg.data.split.test = 61, 2, 2
    for summary, _ in run_ranks(3, train, cfg):
        assert summary["examples"] == 61
        assert summary["steps"] == 2
        assert summary["test"]["examples"] == 2
        assert summary["logloss"] > 0


def test_a_crash_while_a_finished_run_is_trained_further(cfg_of):
    train(0, 1, cfg_of("bsp", train__max_steps=3))
    longer = cfg_of("bsp", train__max_steps=6)
    small_run.make(longer)  # and dies
    summary, _ = train(0, 1, longer)
    assert summary["steps"] == 6


@pytest.mark.parametrize("mode", MODES)
def test_a_loss_that_is_not_finite_names_the_column(cfg_of, mode):
    trainer = small_run.make(cfg_of(mode))
    batches = trainer.setup.reader.__iter__

    def spoiled():
        for n, batch in enumerate(batches(), 1):
            if n == 6:
                batch.dense[3, 2] = float("nan")
            yield batch

    class Spoiled:
        def __getattr__(self, name):
            return getattr(trainer_reader, name)

        def __iter__(self):
            return spoiled()

    trainer_reader = trainer.setup.reader
    name = trainer_reader.schema.dense[2]
    trainer.setup.reader = Spoiled()
    with pytest.raises(TrainingError, match=rf"step 6 on rank 0 is not finite: dense column '{name}' has NaN"):
        trainer.run()


def test_diverging_weights_are_named(cfg_of):
    with pytest.raises(TrainingError, match=r"optimizer\.dense\.lr"):
        train(0, 1, cfg_of("het", optimizer__dense__lr=1e30, optimizer__dense__name="sgd"))
