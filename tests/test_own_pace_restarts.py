"""Ranks that step at their own pace and are killed with -9: what is saved is kept, and every example is trained."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hetrain.config import RunConfig
from tests.small_run import newest
from tests.test_restarts import killed, summary_of

EXAMPLES, EPOCHS, STEPS, EVERY = 3_200, 2, 20, 4


@pytest.fixture
def run(cfg_of: Callable[..., RunConfig]) -> Callable[..., RunConfig]:
    common = {"checkpoint__every": EVERY, "train__eval_every": 1_000, "launch__threads": 1, "launch__nproc": 2}
    return lambda mode, **changes: cfg_of(mode, name="cut", **common, **changes)


def saved_examples(cfg: RunConfig) -> tuple[list[int], Counter[str]]:
    """The steps that the tries began at, and how often each example is in the weights that the last one left.

    Of a try that was cut that is what was trained before the checkpoint which the next try began at.
    """
    files = (Path(cfg.runs) / str(cfg.name)).glob(".trained_*")
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    starts = sorted({line["start"] for line in lines})
    until = dict(zip(starts, [*starts[1:], STEPS + 1], strict=True))
    kept = [line for line in lines if line["saved"] < until[line["start"]]]
    return starts, Counter(example for line in kept for example in line["examples"])


def check_whole(cfg: RunConfig, restarts: int, tries: int) -> None:
    """The run is at its end, and each example was trained once per epoch."""
    summary = summary_of(cfg)
    assert (summary["steps"], summary["examples"]) == (STEPS, EPOCHS * EXAMPLES)
    assert (summary["restarts"], summary["stop_reason"]) == (restarts, "end of data")
    assert newest(cfg).name == f"step_{STEPS}"
    starts, trained = saved_examples(cfg)
    assert len(starts) == tries
    assert len(trained) == EXAMPLES
    assert set(trained.values()) == {EPOCHS}


def test_a_killed_server_is_started_again(run: Any) -> None:
    """It holds all rows and half of what the workers ask of it is on its way."""
    cfg = run("asp", cluster__servers=1, launch__max_restarts=1, consistency__cache__capacity=0.0)
    code, shown = killed(cfg, "2@9")
    assert code == 0, shown
    start = "hetrain: server rank 2 was killed from outside; restart 1 of 1 goes on from step 8, the last checkpoint\n"
    assert shown == start
    check_whole(cfg, restarts=1, tries=2)


def test_without_a_restart_the_death_is_named_and_the_run_can_go_on(run: Any) -> None:
    """First a worker dies and that is all; then, under the same name, the rank that keeps the count: it is replaced."""
    code, shown = killed(run("ssp", launch__max_restarts=0), "1@7")
    assert code == 1
    first, *_, last = shown.splitlines()
    assert first.startswith("rank 1 was killed from outside, most often because memory ran out")
    assert last == "  Started again with name=cut, the run goes on from its last checkpoint."
    assert "Traceback" not in shown
    cfg = run("ssp", launch__max_restarts=1)
    code, shown = killed(cfg, "0@14")
    assert code == 0, shown
    assert shown.startswith("hetrain: rank 0 was killed from outside; restart 1 of 1 goes on from step ")
    assert len(shown.splitlines()) == 1
    check_whole(cfg, restarts=1, tries=3)
