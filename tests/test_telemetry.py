import io
import json
import math
import os
import signal

import pytest
import torch
from rich.console import Console

from hetrain import summary
from hetrain.console import BarScreen, PlainScreen, screen
from hetrain.engine import StepOutput
from hetrain.meter import AUC_EXAMPLES, Meter
from hetrain.ranks import Ranks
from hetrain.signals import StopSignal
from hetrain.telemetry import CHANNELS, RunLog, Traffic, flatten

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
        for part in ("50/200", "1,23", "loss 0.5000", "AUC so far 0.7000", "data 10%", "comm 25%", "[bold]as it is"):
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


def output(n, loss=1.0):
    return StepOutput(torch.tensor(loss), torch.randn(n), (torch.arange(n) % 2).float(), n, n, 0.01)


def test_the_meter_counts_since_the_last_log_and_its_window_is_bounded():
    meter = Meter(Ranks())
    for _ in range(20):
        meter.add(output(4_000, loss=2_000.0))
    values = meter.values(train_s=2.0, wait_data_s=0.5)
    assert values["loss"] == 0.5
    assert values["examples_per_s"] == 40_000
    assert values["wait_data_share"] == 0.25
    assert values["wait_comm_share"] == pytest.approx(0.1)
    assert AUC_EXAMPLES <= meter._scored < AUC_EXAMPLES + 4_000
    meter.add(output(4_000, loss=8_000.0))
    assert meter.values(train_s=3.0, wait_data_s=0.5)["loss"] == 2.0
    meter.add(output(0))
    assert meter.values(train_s=4.0, wait_data_s=0.5)["examples_per_s"] == 0


def test_a_signal_is_caught_once_and_handlers_come_back():
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with StopSignal(Ranks()) as stop:
        assert stop.agreed() is None
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.agreed() is signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_reports_of_ranks_are_added_or_maximised():
    merged = summary.merge(
        [
            {"cache": {"hits": 2, "misses": 1}, "observed_staleness_max": 3, "missed_updates_max": None, "kind": "a"},
            {"cache": {"hits": 5, "misses": 0}, "observed_staleness_max": 1, "missed_updates_max": None, "kind": "a"},
        ]
    )
    assert merged == {
        "cache": {"hits": 7, "misses": 1},
        "observed_staleness_max": 3,
        "missed_updates_max": None,
        "kind": "a",
    }
