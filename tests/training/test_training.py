import os
import signal

import pytest
import torch

from hetrain.engine import StepOutput
from hetrain.ranks import Ranks
from hetrain.training import summary
from hetrain.training.meter import AUC_EXAMPLES, Meter
from hetrain.training.stop_signal import StopSignal


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


def test_the_meter_goes_on_from_earlier_sittings():
    meter = Meter(Ranks(), examples_before=500)
    meter.add(output(100))
    values = meter.values(train_s=1.0, wait_data_s=0.0)
    assert (values["examples"], values["examples_per_s"], meter.examples) == (600, 100, 100)


@pytest.mark.parametrize(
    ("bound", "kept", "words"),
    [
        (None, 5, ""),
        (100, 0, ""),
        (100, 5, ", rows at most 97 updates behind of 100 allowed"),
        ("inf", 5, "(no bound)"),
    ],
)
def test_a_run_ends_with_the_staleness_observed(bound, kept, words):
    cache = {"hit_rate": 0.5, "capacity_rows": kept}
    numbers = {"steps": 1, "examples": 2, "examples_per_s": 3.0, "bytes": {"total": 4}, "cache": cache}
    line = summary.in_words({**numbers, "staleness": bound, "observed_staleness_max": 97})
    assert line.endswith(words or "from the cache")


def test_a_run_without_a_cache_says_nothing_of_its_hits():
    cache = {"hit_rate": 0.0, "capacity_rows": 0}
    numbers = {"steps": 1, "examples": 2, "examples_per_s": 3.0, "bytes": {"total": 4}, "staleness": None}
    assert summary.in_words({**numbers, "cache": cache}).endswith("MB sent")
    assert "0% of row reads" in summary.in_words({**numbers, "cache": {**cache, "capacity_rows": 5}})


def test_without_a_bound_it_is_said_whose_updates_were_counted():
    cache = {"hit_rate": 0.5, "capacity_rows": 5}
    numbers = {"steps": 1, "examples": 2, "examples_per_s": 3.0, "bytes": {"total": 4}, "cache": cache}
    about = {"staleness": "inf", "observed_staleness_max": 3, **numbers}
    assert summary.in_words(about).endswith(
        ", rows at most 3 of their worker's own updates behind, others' not counted (no bound)"
    )
    assert summary.in_words({**about, "missed_updates_max": 9}).endswith(", rows at most 3 updates behind (no bound)")
    steps = {**about, "staleness_unit": "steps"}
    assert summary.in_words(steps).endswith(", rows at most 3 steps behind (no bound)")


def test_worker_clocks_are_told_in_steps():
    cache = {"hit_rate": 0.5, "capacity_rows": 5}
    numbers = {"steps": 1, "examples": 2, "examples_per_s": 3.0, "bytes": {"total": 4}, "cache": cache}
    about = {"staleness": 4, "staleness_unit": "steps", "observed_staleness_max": 3}
    assert summary.in_words({**numbers, **about}).endswith(", rows at most 3 steps behind of 4 allowed")


def test_a_signal_is_caught_once_and_handlers_come_back():
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where tests run in the background
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with StopSignal(Ranks()) as stop:
        assert stop.agreed() is None
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.agreed() is signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
    signal.signal(signal.SIGINT, inherited)


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
