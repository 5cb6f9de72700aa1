"""Runs by plans they are given: uneven rows over the store, columns under TorchRec, as other plans train."""

import json

import numpy as np
import pytest

from hetrain.data.sample import sample_columns
from hetrain.errors import ConfigError
from hetrain.planner.piece import Piece
from hetrain.planner.plan import Plan
from hetrain.planner.request import tables_of
from tests import small_run
from tests.ranks import run_ranks


def uneven(tables):
    """Two pieces of the first table on rank 1 with one of rank 0 between them; the rest whole, here and there."""
    first = tables[0]
    cuts = [(1, 0, 20), (0, 20, 401), (1, 421, first.rows - 421)]
    pieces = [Piece(first.name, rank, row, rows, 0, first.dim) for rank, row, rows in cuts]
    pieces += [Piece(t.name, n % 2, 0, t.rows, 0, t.dim) for n, t in enumerate(tables[1:])]
    return Plan("store", 2, tuple(pieces), frozenset(), {t.name: "row_wise" for t in tables})


def columns(tables):
    """Every table in two strips of columns."""
    half = tables[0].dim // 2
    pieces = [Piece(t.name, (n + k) % 2, 0, t.rows, k * half, half) for n, t in enumerate(tables) for k in range(2)]
    return Plan("torchrec", 2, tuple(pieces), frozenset(), {t.name: "column_wise" for t in tables})


def given(folder, mode, plan, **changes):
    cfg = small_run.config(folder, mode, train__epochs=1, **changes)
    made = plan(tables_of(cfg, sample_columns(cfg.data.sample)))
    file = folder / f"{mode}.json"
    file.write_text(json.dumps(made.to_json()))
    changes |= {"planner__plan": str(file), "name": f"{mode}_given", "train__epochs": 1}
    return [cfg, small_run.config(folder, mode, **changes)], made


def train_all(rank, world_size, configs):
    results = []
    for cfg in configs:
        trainer = small_run.make(cfg, rank, world_size)
        summary = trainer.run()
        with trainer.setup.engine.snapshot() as state:
            tables = {
                name: [(p.first_row, p.first_column, p.value.clone().numpy()) for p in pieces]
                for name, pieces in state.tables.items()
            }
        results.append((summary, tables, trainer.setup.folder))
    return results


def whole(ranks, number):
    """Tables after run `number`, from the pieces of all ranks."""
    tables = {}
    for results in ranks:
        for name, pieces in results[number][1].items():
            tables.setdefault(name, []).extend(pieces)
    result = {}
    for name, pieces in tables.items():
        rows, dim = (max(p[k] + p[2].shape[k] for p in pieces) for k in range(2))
        result[name] = np.full((rows, dim), np.nan, np.float32)
        for row, column, value in pieces:
            result[name][row : row + value.shape[0], column : column + value.shape[1]] = value
    return result


def test_a_given_plan_is_trained_and_changes_no_result(tmp_path):
    store, rows = given(tmp_path, "het", uneven)
    bsp, strips = given(tmp_path, "bsp", columns, optimizer__rows__name="adagrad")
    ours = small_run.config(tmp_path, "het", train__epochs=1, planner__name="hierarchical", name="het_ours")
    ranks = run_ranks(2, train_all, [*store, *bsp, ours])
    made = json.loads((ranks[0][4][2] / "plan.json").read_text())
    assert made["engine"] == "store"
    assert made["predicted"]["ranks"][1]["rank"] == 1
    for key in ("auc", "logloss"):
        assert ranks[0][4][0][key] == pytest.approx(ranks[0][0][0][key], abs=1e-6)
    for number, made in ((1, rows), (3, strips)):
        summary, expected = ranks[0][number][0], ranks[0][number - 1][0]
        for key in ("steps", "examples", "auc", "logloss"):
            assert summary[key] == pytest.approx(expected[key], abs=1e-6), key
        assert json.loads((ranks[0][number][2] / "plan.json").read_text()) == made.to_json()
        before, after = whole(ranks, number - 1), whole(ranks, number)
        for name, value in before.items():
            assert after[name] == pytest.approx(value, abs=1e-5), name
        held = {
            (name, row, column) for results in ranks for name, ps in results[number][1].items() for row, column, _ in ps
        }
        assert held == {(p.table, p.first_row, p.first_column) for p in made.pieces}
    alone = small_run.evaluate_run(0, 1, bsp[1])  # on one rank, for which the plan is not
    assert alone["auc"] == pytest.approx(ranks[0][3][0]["auc"], abs=1e-6)


def test_plans_of_other_ranks_are_refused(tmp_path):
    (_, cfg), _ = given(tmp_path, "bsp", columns, optimizer__rows__name="adagrad")
    with pytest.raises(ConfigError, match=r"is for 2 ranks, and this run has 1\. Start 2, as with launch\.nproc=2"):
        small_run.make(cfg)
