"""Whole small runs with dedicated servers: the numbers of a run without, checkpoints that fit both, eval, predict."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetrain.config import RunConfig
from tests import small_run, summary_keys
from tests.engine.held import whole_tables
from tests.ranks import run_ranks
from tests.small_run import (
    QUALITY,
    check_predictions,
    evaluate_run,
    predict_run,
    same,
    taken_up,
    train,
    train_with_signal,
)

SERVERS = {"cluster__servers": 1}


@pytest.fixture
def cfg_of(cfg_of: Any) -> Any:
    return partial(cfg_of, "het")


def whole(ranks: list[tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, np.ndarray]:
    """Tables and dense part, from small_run.weights of all ranks: TABLE.FIRST_ROW[.STATE] and dense names."""

    def renamed(name: str) -> str:
        table, _, rest = name.partition(".")
        first, _, key = rest.partition(".")
        return f"{table}.{key or 'value'}@{first}" if first.isdigit() and table[0] == "C" else name

    return whole_tables([{renamed(name): value for name, value in weights.items()} for _, weights in ranks])


@pytest.mark.parametrize("capacity", [0.0, 0.3])
def test_a_run_with_servers_is_the_run_without(cfg_of: Any, capacity: float) -> None:
    changes = {"consistency__cache__capacity": capacity, "train__eval_every": 7, "telemetry__audit_every": 4}
    plain = run_ranks(2, train, cfg_of(name="plain", **changes))
    cfg = cfg_of(name="served", **changes, **SERVERS)
    served = run_ranks(3, train, cfg)
    same(whole(served), whole(plain))
    for summary, _ in served:
        assert all(summary[key] == plain[0][0][key] for key in (*QUALITY, "missed_updates_max"))
        assert (summary["world_size"], summary["servers"]) == (3, 1)
        summary_keys.check(json.loads(json.dumps(summary)), "het", servers=True)
    assert plain[0][0]["servers"] == 0
    folder = Path(cfg.runs) / "served"
    assert {piece["rank"] for piece in json.loads((folder / "plan.json").read_text())["pieces"]} == {2}
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert {"loss", "auc", "examples"} <= lines[0].keys()
    others = [json.loads(x) for x in (folder.parent / "plain" / "metrics.jsonl").read_text().splitlines()]
    for key in ("kind", "step", "auc", "examples"):
        assert [line.get(key) for line in lines] == [line.get(key) for line in others], key
    losses = [[line["loss"] for line in run if line["kind"] == "train"] for run in (lines, others)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


@pytest.mark.parametrize("signalled", [0, 2])
def test_resumed_after_sigterm_equals_uninterrupted(cfg_of: Any, signalled: int) -> None:
    uncut = run_ranks(3, train, cfg_of(name="whole", **SERVERS))
    cfg = cfg_of(name="cut", **SERVERS)
    stopped = run_ranks(3, train_with_signal, cfg, 7, signalled)
    assert {(s["interrupted"], s["stop_reason"]) for s in stopped} == {(True, "SIGTERM")}
    assert len({s["steps"] for s in stopped}) == 1
    resumed = run_ranks(3, train, cfg)
    for (summary, weights), (whole_summary, whole_weights) in zip(resumed, uncut, strict=True):
        same(weights, whole_weights)
        assert all(summary[key] == whole_summary[key] for key in (*QUALITY, "bytes"))


@pytest.mark.parametrize(("before", "after"), [(0, 1), (1, 0), (1, 2)])
def test_servers_may_come_and_go(cfg_of: Any, before: int, after: int) -> None:
    """With an empty cache nothing private matters, so that the numbers are those of the uncut run."""
    changes = {"consistency__cache__capacity": 0.0, "train__max_steps": 12}
    uncut = run_ranks(2, train, cfg_of(name="whole", **changes))
    first = cfg_of(name="first", cluster__servers=before, **{**changes, "train__max_steps": 5})
    run_ranks(2 + before, train, first)
    start = f"{first.runs}/first"
    second = cfg_of(name="second", cluster__servers=after, checkpoint__resume=start, **changes)
    resumed = run_ranks(2 + after, train, second)
    same(whole(resumed), whole(uncut))
    assert resumed[0][0]["examples"] == uncut[0][0]["examples"] == 12 * 320


def test_a_cache_with_updates_held_back_is_folded_in(cfg_of: Any) -> None:
    first = cfg_of(name="first", train__max_steps=5, **SERVERS)
    trained = run_ranks(3, train, first)
    second = cfg_of(name="second", train__max_steps=6, checkpoint__resume=f"{first.runs}/first", train__eval_every=1)
    weights = run_ranks(2, _taken_up, second)
    same(whole([(None, w) for w in weights]), whole(trained))


def _taken_up(rank: int, world_size: int, cfg: RunConfig) -> dict[str, Any]:
    return small_run.weights(taken_up(rank, world_size, cfg))


def test_eval_and_predict(cfg_of: Any, tmp_path: Path) -> None:
    cfg = cfg_of(**SERVERS)
    summary, _ = run_ranks(3, train, cfg)[0]
    for metrics in run_ranks(3, evaluate_run, cfg):
        assert metrics == summary["test"]
    cfg.cluster.servers = 2
    assert run_ranks(4, evaluate_run, cfg)[3] == summary["test"]
    cfg.cluster.servers = 0
    assert evaluate_run(0, 1, cfg)["auc"] == pytest.approx(summary["auc"], abs=1e-6)
    cfg.cluster.servers = 1
    out = tmp_path / "scores.parquet"
    run_ranks(3, predict_run, cfg, str(out))
    check_predictions(out, cfg, summary)


def test_early_stopping_takes_the_best_weights(cfg_of: Any) -> None:
    cfg = cfg_of(train__eval_every=2, train__patience=2, optimizer__rows__lr=0.5, optimizer__dense__lr=0.05, **SERVERS)
    summaries = [summary for summary, _ in run_ranks(3, train, cfg)]
    assert summaries[0]["weights_step"] == summaries[2]["weights_step"] == summaries[0]["best_step"]
