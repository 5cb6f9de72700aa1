import io
import json
import math

import pytest
from rich.console import Console

from hetrain.config.schema_keys import flatten
from hetrain.telemetry import CHANNELS, Traffic
from hetrain.telemetry.console import BarScreen, PlainScreen, screen
from hetrain.telemetry.run_log import RunLog

FIGURES = {"loss": 0.5, "auc": 0.7, "examples_per_s": 1234.5, "wait_data_share": 0.1, "wait_comm_share": 0.25}


def test_every_byte_is_on_one_channel_and_looking_is_set_aside():
    traffic = Traffic()
    traffic.add("ids", 3)
    with traffic.set_aside():
        traffic.add("ids", 5)
        with traffic.set_aside():
            traffic.add("rows_pull", 7)
        traffic.add("ids", 1)
    traffic.add("dense", 4)
    assert traffic.total == 7
    assert traffic.bytes == dict.fromkeys(CHANNELS, 0) | {"ids": 3, "dense": 4}
    assert traffic.aside["ids"] == 6
    with pytest.raises(KeyError):
        traffic.add("rows", 1)


def console(terminal):
    return Console(file=io.StringIO(), force_terminal=terminal, width=160)


def test_a_terminal_gets_a_bar_and_a_pipe_gets_lines():
    for terminal, kind in ((True, BarScreen), (False, PlainScreen)):
        out = console(terminal)
        shown = screen(200, out)
        assert isinstance(shown, kind)
        shown.train(50, FIGURES)
        shown.say("[bold]as it is[/bold]")
        shown.close()
        text = out.file.getvalue()
        for part in (
            "50/200",
            "1,23",
            "loss 0.5000",
            "AUC (newest 33k) 0.7000",
            "data 10%",
            "comm 25%",
            "[bold]as it is",
        ):
            assert part in text, part


def test_plain_lines_are_few():
    out = console(False)
    shown = screen(None, out)
    for step in range(100):
        shown.train(step, FIGURES)
    assert len(out.file.getvalue().splitlines()) == 1


def test_the_log_is_json_and_other_ranks_write_nothing(tmp_path):
    log = RunLog(tmp_path, screen(10, console(False)), first=True, tensorboard=True)
    log.open(0)
    log.train(5, FIGURES | {"auc": math.nan})
    log.evaluation(5, "test", {"auc": None, "logloss": 0.3, "examples": 7})
    log.hyperparameters(flatten({"a": {"b": 1, "c": [1, 2], "d": None}}), {"auc": 0.5})
    log.close()
    log.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["auc"] is None
    assert lines[1] == {"step": 5, "kind": "test", "auc": None, "logloss": 0.3, "examples": 7}
    assert list((tmp_path / "tb").rglob("events*"))
    other = tmp_path / "other"
    other.mkdir()
    silent = console(False)
    log = RunLog(other, screen(10, silent), first=False, tensorboard=True)
    log.open(0)
    log.train(5, FIGURES)
    log.say("x")
    log.close()
    assert not list(other.iterdir())
    assert silent.file.getvalue() == ""
