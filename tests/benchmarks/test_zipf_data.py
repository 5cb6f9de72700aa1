"""benchmarks/zipf_data.py: the law the ids follow, and that training reads what it writes."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hetrain.data.columns import Columns
from hetrain.data.schema import load_schema

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "zipf_data.py"
sys.path.insert(0, str(SCRIPT.parent))

import zipf_data  # noqa: E402
from zipf_data import KAGGLE, PRESETS, ZipfColumn, permuted, spread_by  # noqa: E402


def make(out: Path, *options: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(SCRIPT), "--out", str(out), *options]
    return subprocess.run(command, cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False)


def test_presets_have_the_rows_they_promise():
    assert sum(KAGGLE) == 33_762_577
    assert sum(PRESETS["prototype"]) == 610_000
    assert len(PRESETS["prototype"]) == 26
    assert min(PRESETS["prototype"]) == 3


@pytest.mark.parametrize("rows", [1, 2, 3, 10, 997, 1024, 30_030])
def test_the_permutation_meets_every_row_once(rows):
    ids = permuted(np.arange(rows), spread_by(rows), rows)
    assert sorted(ids) == list(range(rows))


@pytest.mark.parametrize("rows", [10**10, (1 << 40) - 1, 3 * 10**11 + 7])
def test_the_permutation_is_exact_for_huge_tables(rows):
    ranks = np.array([0, 1, 2, 12345, rows // 3, rows - 1])
    multiplier = spread_by(rows)
    assert permuted(ranks, multiplier, rows).tolist() == [int(r) * multiplier % rows for r in ranks]


@pytest.mark.parametrize(("rows", "exponent"), [(50, 1.2), (4000, 1.0), (4000, 1.2), (4000, 0.0)])
def test_ranks_follow_the_law(rows, exponent):
    n = 200_000
    ranks = ZipfColumn(rows, exponent).ranks(np.random.default_rng(3), n)
    law = np.arange(1, rows + 1.0) ** -exponent
    expected = n * law / law.sum()
    counts = np.bincount(ranks, minlength=rows)
    often = expected > 20
    assert len(counts) == rows
    assert np.abs((counts - expected) / np.sqrt(expected))[often].max() < 5


@pytest.mark.parametrize("exponent", [0.0, 0.8, 1.0, 1.2])
def test_head_and_tail_join(monkeypatch, exponent):
    rows, n = 4000, 100_000
    exact = ZipfColumn(rows, exponent).ranks(np.random.default_rng(3), n)
    monkeypatch.setattr(zipf_data, "HEAD", 200)
    joined = ZipfColumn(rows, exponent).ranks(np.random.default_rng(3), n)
    assert joined.max() < rows
    assert np.abs(joined - exact).max() <= 1


def test_huge_tables_are_drawn_over_their_whole_range():
    rows = 10**10
    column = ZipfColumn(rows, 0.5)
    ids = column.draw(np.random.default_rng(1), 100_000)
    assert ids.min() >= 0
    assert ids.max() < rows
    assert np.histogram(ids, bins=10, range=(0, rows))[0].min() > 8_000
    assert len(np.unique(ids)) > 90_000


def test_a_written_set_is_read_back(tmp_path):
    made = make(tmp_path / "z", "--cardinalities", "1e10,7,3000000000,500", "--rows", "20000", "--test-rows", "3000")
    assert made.returncode == 0, made.stderr
    schema = load_schema(tmp_path / "z")
    assert [column.rows for column in schema.sparse] == [10**10, 7, 3 * 10**9, 500]
    assert schema.splits == {"train": 20_000, "validation": 0, "test": 3_000}
    assert len(schema.dense) == 13
    columns = Columns(tmp_path / "z", "train", schema)
    labels = [columns.read(np.array([b]), 0, int(size), None).labels for b, size in enumerate(columns.block_sizes)]
    assert np.concatenate(labels).mean() == pytest.approx(0.25, abs=0.02)
    again = make(tmp_path / "z", "--rows", "10")
    assert again.returncode
    assert "exists" in again.stderr


def test_equal_settings_give_equal_rows_and_training_reads_them(tmp_path):
    for name in ("a", "b"):
        assert make(tmp_path / name, "--cardinalities", "300,20,5", "--rows", "1500").returncode == 0
    part = Path("train") / "part-00000.parquet"
    assert (tmp_path / "a" / part).read_bytes() == (tmp_path / "b" / part).read_bytes()
    command = [sys.executable, "-m", "hetrain", "train", "data=criteo", f"data.path={tmp_path / 'a'}", "launch.nproc=1"]
    command += [f"runs={tmp_path / 'runs'}", "name=z", "launch.device=cpu", "consistency=het", "model.hidden=[8]"]
    trained = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert trained.returncode == 0, trained.stderr
    assert (tmp_path / "runs" / "z" / "summary.json").exists()


@pytest.mark.parametrize("options", [["--rows", "0"], ["--exponent", "-1"], ["--cardinalities", "0,5"]])
def test_bad_options_are_named(tmp_path, options):
    refused = make(tmp_path / "z", *options)
    assert refused.returncode == 2
    assert options[0] in refused.stderr
