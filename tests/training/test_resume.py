"""What a run folder and a checkpoint refuse, on whole small runs of one process."""

import json
import os
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from unittest import mock

import pyarrow.parquet as pq
import pytest

from hetrain import build
from hetrain.errors import CheckpointError, ConfigError
from hetrain.training.run_lock import RunLock
from tests import small_run
from tests.small_run import config, evaluate_run, train


@pytest.fixture
def cfg_of(cfg_of):
    return partial(cfg_of, "bsp", train__max_steps=4)


def folder_of(cfg):
    return Path(cfg.runs) / str(cfg.name)


def flip_a_label(path):
    """The same schema and row counts, another row."""
    file = next((path / "test").glob("*.parquet"))
    table = pq.read_table(file)
    labels = table["label"].to_numpy().copy()
    labels[7] = 1 - labels[7]
    pq.write_table(table.set_column(0, "label", [labels]), file)


def test_replaced_data_is_noticed(cfg_of, sample, tmp_path, caplog):
    own = shutil.copytree(sample, tmp_path / "own")
    cfg = cfg_of(data__path=str(own))
    summary, _ = train(0, 1, cfg)
    assert summary["data"].keys() == {"columns", "train", "validation", "test"}
    flip_a_label(own)
    with pytest.raises(CheckpointError, match=r"its test are not those.*replaced"):
        train(0, 1, cfg_of(data__path=str(own), train__max_steps=8))
    with pytest.raises(CheckpointError, match="its test are not those"):
        evaluate_run(0, 1, cfg)
    elsewhere = shutil.copytree(own, tmp_path / "elsewhere")
    evaluate_run(0, 1, cfg_of(data__path=str(elsewhere)))
    assert "other rows than those of the run" in caplog.text


def test_one_run_of_a_name_at_a_time(cfg_of):
    cfg = cfg_of()
    folder_of(cfg).mkdir(parents=True)
    code = "import sys, pathlib; from hetrain.training.run_lock import RunLock; "
    code += "lock = RunLock(pathlib.Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", code, str(folder_of(cfg))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(ConfigError, match=f"in use by process {other.pid} "):
            train(0, 1, cfg)
        os.kill(other.pid, signal.SIGKILL)
    train(0, 1, cfg)
    RunLock(folder_of(cfg)).release()  # a run that ended let go


def test_another_run_s_best_is_not_ours(cfg_of):
    first = cfg_of(name="first", train__eval_every=2, train__patience=3)
    train(0, 1, first)
    second = cfg_of(
        name="second",
        train__eval_every=2,
        train__patience=2,
        train__max_steps=8,
        checkpoint__resume=str(folder_of(first)),
    )
    scores = iter([0.1, 0.05, 0.04, 0.03, 0.02])
    real = build.evaluate

    def falling(engine, batches, ranks):
        return type(real(engine, batches, ranks))(next(scores), 0.5, 0.5, 0.5, 10)

    with mock.patch("hetrain.trainer.evaluate", falling):
        summary, _ = train(0, 1, second)
    assert summary["best_step"] == summary["weights_step"] == 6


def test_without_validation_rows_test_chooses_nothing(tmp_path, capsys):
    changes = {"train__max_steps": 4, "data__split__validation": 0.0, "data__split__train": 0.9}
    with pytest.raises(ConfigError, match=r"train\.patience=2.*no validation rows"):
        train(0, 1, config(tmp_path, "bsp", train__patience=2, **changes))
    cfg = config(tmp_path, "bsp", **changes)
    summary, _ = train(0, 1, cfg)
    assert summary["validation"] is None
    assert summary["best_step"] is None
    lines = [json.loads(line) for line in (folder_of(cfg) / "metrics.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["test"]
    assert capsys.readouterr().out.count("no validation rows") == 1
    often = config(tmp_path, "bsp", name="often", train__eval_every=2, **changes)
    train(0, 1, often)
    lines = [json.loads(line) for line in (folder_of(often) / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["kind"]) for line in lines] == [(2, "test"), (4, "test")]


@pytest.mark.parametrize("content", [b"", b"[]", b"3", b"a: [", b"\xff\xfe\x00", b"model: 3\n", b"foreign: 1\n"])
def test_a_config_that_is_none_is_named(cfg_of, content):
    cfg = cfg_of()
    folder_of(cfg).mkdir(parents=True)
    (folder_of(cfg) / "config.yaml").write_bytes(content)
    with pytest.raises(ConfigError, match=r"config\.yaml is damaged or is not .*--cfg job"):
        small_run.make(cfg)


def test_damaged_metrics_are_named_and_a_damaged_summary_is_none(cfg_of):
    cfg = cfg_of()
    train(0, 1, cfg)
    (folder_of(cfg) / "metrics.jsonl").write_bytes(b'{"step": 1}\n\xff\xff\n')
    with pytest.raises(ConfigError, match=r"metrics\.jsonl is damaged"):
        small_run.make(cfg_of(train__max_steps=6))
    (folder_of(cfg) / "metrics.jsonl").unlink()
    (folder_of(cfg) / "summary.json").write_text("[]")
    assert train(0, 1, cfg_of(train__max_steps=6))[0]["steps"] == 6


def test_what_a_killed_start_left_does_not_spend_the_name(cfg_of):
    cfg = cfg_of()
    folder_of(cfg).mkdir(parents=True)
    (folder_of(cfg) / ".config.yaml.tmp").touch()
    train(0, 1, cfg)


def test_nothing_left_to_train_is_an_error(cfg_of):
    cfg = cfg_of(train__max_steps=6)
    train(0, 1, cfg)
    before = (folder_of(cfg) / "config.yaml").read_text()
    with pytest.raises(ConfigError, match=r"train\.max_steps=5: .*already at step 6"):
        train(0, 1, cfg_of(train__max_steps=5))
    assert (folder_of(cfg) / "config.yaml").read_text() == before
    assert (folder_of(cfg) / "summary.json").exists()
    with pytest.raises(ConfigError, match="already at step 6"):
        train(0, 1, cfg_of(name="other", checkpoint__resume=str(folder_of(cfg))))


def test_what_is_not_as_it_was_is_said(cfg_of, capsys):
    first = cfg_of()
    train(0, 1, first)
    train(0, 1, cfg_of(train__max_steps=6))
    assert "bit for bit" in capsys.readouterr().out
    resume = str(folder_of(first))
    train(0, 1, cfg_of(name="other", train__max_steps=8, seed=5, optimizer__rows__lr=0.5, checkpoint__resume=resume))
    said = capsys.readouterr().out
    assert "bit for bit" not in said
    assert "seed: 1 there, 5 now; optimizer.rows.lr: 0.02 there, 0.5 now" in said
