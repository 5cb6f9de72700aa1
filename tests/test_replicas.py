"""Runs of `het` whose small tables every worker holds whole: given back as a plan, evaluated, and as runs without."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hetrain.config import RunConfig
from tests import small_run
from tests.ranks import run_ranks
from tests.small_run import QUALITY, check_predictions, evaluate_run, predict_run, same

SMALL = {"planner__name": "hierarchical", "planner__data_parallel_threshold": 8 * 60}
PLAIN = {"consistency__cache__capacity": 0.0, "optimizer__rows__name": "sgd", "train__epochs": 1}


@pytest.fixture
def cfg_of(cfg_of: Any) -> Any:
    return partial(cfg_of, "het")


def train_by_its_plan(rank: int, world_size: int, cfgs: list[RunConfig]) -> list[Any]:
    """Summary and weights of the first run, of one given the plan that it left, and of the others."""
    first, second, *_ = cfgs
    found = []
    for cfg in cfgs:
        if cfg is second:
            cfg.planner.plan = str(Path(first.runs) / str(first.name) / "plan.json")
        found.append(small_run.train(rank, world_size, cfg))
    return found


def test_a_run_with_replicas(cfg_of: Any, tmp_path: Path) -> None:
    cfg = cfg_of(name="whole", **SMALL, **PLAIN)
    ranks = run_ranks(2, train_by_its_plan, [cfg, cfg_of(name="given", **PLAIN), cfg_of(name="owned", **PLAIN)])
    plan = json.loads((Path(cfg.runs) / "whole" / "plan.json").read_text())
    assert len(plan["replicated"]) == 3
    assert not {piece["table"] for piece in plan["pieces"]} & set(plan["replicated"])
    assert len(plan["predicted"]["ranks"]) == 2
    for (summary, weights), (other, again), _ in ranks:
        same(weights, again)
        for key in (*QUALITY, "bytes"):
            assert summary[key] == other[key], key
    summary, owned = ranks[0][0][0], ranks[0][2][0]
    for key in ("auc", "logloss"):
        assert summary[key] == pytest.approx(owned[key], abs=1e-6)
    assert summary["bytes"]["rows_push"] < owned["bytes"]["rows_push"]
    elements = 8 * sum(len(ranks[0][0][1][f"{name}.0"]) for name in plan["replicated"])
    assert summary["bytes"]["dense"] - owned["bytes"]["dense"] == 2 * 4 * elements * summary["steps"]
    predicted = summary["memory"]["predicted"]
    assert predicted["replicas_max"] == 3 * 4 * elements
    assert "a worker's replicated tables" in predicted["words"]
    alone = evaluate_run(0, 1, cfg)
    assert alone["auc"] == pytest.approx(summary["auc"], abs=1e-6)
    out = tmp_path / "scores.parquet"
    run_ranks(2, predict_run, cfg, str(out))
    check_predictions(out, cfg, summary)
