"""The generated data set: reproducible, of known quality, safe to ask for from several processes."""

import multiprocessing
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hetrain.config import DataConfig, SampleConfig, SplitConfig
from hetrain.data.hidden import HiddenModel, random_stream
from hetrain.data.prepare import prepare
from hetrain.data.sample import _Auc, check_sample, ensure_sample
from hetrain.data.schema import load_schema, split_files
from hetrain.errors import ConfigError, DataError


def config(path, **changes):
    return DataConfig(path=str(path), sample=SampleConfig(**{"rows": 20_000, **changes}))


def table(path, split):
    return pa.concat_tables([pq.read_table(file) for file in split_files(path, split)])


def test_shape_and_base_rate(tmp_path):
    assert ensure_sample(config(tmp_path / "s"))
    schema = load_schema(tmp_path / "s")
    assert (len(schema.dense), len(schema.sparse)) == (13, 26)
    assert schema.splits == {"train": 16_000, "validation": 2000, "test": 2000}
    rows = table(tmp_path / "s", "train")
    assert abs(rows["label"].to_numpy().mean() - 0.25) < 0.02
    assert abs(schema.best_auc["train"] - 0.80) < 0.015
    for column in schema.sparse:
        ids = rows[column.name].to_numpy()
        assert ids.min() >= 0
        assert ids.max() < column.rows
    assert 50_000 < sum(column.rows for column in schema.sparse) < 100_000


def test_equal_settings_give_equal_rows_and_others_do_not(tmp_path):
    for name, seed in [("a", 1), ("b", 1), ("c", 2)]:
        ensure_sample(config(tmp_path / name, seed=seed))
    assert table(tmp_path / "a", "test").equals(table(tmp_path / "b", "test"))
    assert not table(tmp_path / "a", "test").equals(table(tmp_path / "c", "test"))


def test_what_is_made_is_said_before_it_is(tmp_path):
    said = []
    ensure_sample(config(tmp_path / "s", rows=2000), say=said.append)
    ensure_sample(config(tmp_path / "s", rows=2000), say=said.append)
    ids = len(load_schema(tmp_path / "s").sparse)
    dense = len(load_schema(tmp_path / "s").dense)
    what = f"a sample data set of 2,000 rows with {dense} dense and {ids} sparse columns, about "
    assert len(said) == 1
    assert said[0].startswith(f"data.path={tmp_path / 's'}: making {what}")
    assert said[0].endswith(" MB and 1 s")


def test_made_once_and_made_anew_for_other_settings(tmp_path, caplog):
    path = tmp_path / "s"
    assert ensure_sample(config(path))
    assert not ensure_sample(config(path))
    assert not caplog.records
    assert ensure_sample(config(path, rows=1000))
    assert "made anew" in caplog.text
    assert "Runs trained on the old one cannot be evaluated on it" in caplog.text
    assert sum(load_schema(path).splits.values()) == 1000
    assert prepare(config(path, rows=1000))["made"] is False


def test_a_sample_in_use_is_not_replaced(tmp_path):
    path = tmp_path / "s"
    ensure_sample(config(path))
    code = (
        "import sys; from pathlib import Path; from hetrain.data.hold import hold;"
        f"hold(Path({str(path)!r})); print('held', flush=True); sys.stdin.read()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parents[2], **pipes) as reader:
        assert reader.stdout.readline() == "held\n"
        assert not ensure_sample(config(path))
        with pytest.raises(DataError, match=r"sample\.rows: 20000 there, 1000 asked for.*a running command reads it"):
            ensure_sample(config(path, rows=1000))
        reader.communicate()
    assert ensure_sample(config(path, rows=1000))


def test_a_sample_with_added_files_is_not_replaced(tmp_path):
    ensure_sample(config(tmp_path / "s", rows=1000))
    (tmp_path / "s" / "notes.txt").touch()
    with pytest.raises(DataError, match=r"other files were added to it \(notes\.txt\)"):
        ensure_sample(config(tmp_path / "s", rows=2000))


def test_checking_makes_and_replaces_nothing(tmp_path):
    with pytest.raises(DataError, match="no data set there"):
        check_sample(config(tmp_path / "s"))
    assert not list(tmp_path.iterdir())
    ensure_sample(config(tmp_path / "s", rows=1000))
    check_sample(config(tmp_path / "s", rows=1000))
    with pytest.raises(DataError, match=r"other settings than the run's \(sample\.rows: 1000 there, 20000 asked for"):
        check_sample(config(tmp_path / "s"))


def test_another_data_set_is_left_alone(tmp_path):
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "mine").touch()
    with pytest.raises(DataError, match="is no data set"):
        ensure_sample(config(tmp_path / "s"))
    (tmp_path / "s" / "schema.json").write_text(
        '{"format": 1, "dense": [], "sparse": [{"name": "C1", "rows": 3}], "splits": {},'
        ' "made_from": {"kind": "criteo"}}'
    )
    with pytest.raises(DataError, match="not a sample"):
        ensure_sample(config(tmp_path / "s"))
    assert (tmp_path / "s" / "mine").exists()


def test_several_processes_may_ask_at_once(tmp_path):
    context = multiprocessing.get_context("spawn")
    with context.Pool(3) as pool:
        made = pool.map(ensure_sample, [config(tmp_path / "s")] * 3)
    assert sorted(made) == [False, False, True]
    assert sum(load_schema(tmp_path / "s").splits.values()) == 20_000


def test_settings_are_checked(tmp_path):
    with pytest.raises(ConfigError, match=r"data\.sample\.base_rate=1\.5"):
        ensure_sample(config(tmp_path / "s", base_rate=1.5))
    with pytest.raises(ConfigError, match=r"data\.sample\.cardinalities"):
        ensure_sample(config(tmp_path / "s", cardinalities=[1]))


def test_small_shapes_and_counts(tmp_path):
    cfg = config(tmp_path / "s", dense=2, cardinalities=[3, 50], zipf=0.0, base_rate=0.5)
    cfg.split = SplitConfig(70_000, 0, 1000)
    cfg.sample.rows = 80_000
    ensure_sample(cfg)
    schema = load_schema(cfg.path)
    assert schema.splits == {"train": 70_000, "validation": 0, "test": 1000}
    assert schema.best_auc is not None
    assert set(schema.best_auc) == {"train", "test"}


def test_best_auc_is_the_auc_of_the_true_probabilities():
    model = HiddenModel(SampleConfig(rows=1000))
    rng = random_stream(1, 2)
    _, _, probability = model.draw(rng, 2000)
    labels = (rng.random(2000) < probability).astype(np.float32)
    auc = _Auc()
    auc.add(probability[:500], labels[:500])
    auc.add(probability[500:], labels[500:])
    positive, negative = probability[labels == 1], probability[labels == 0]
    exact = (positive[:, None] > negative[None, :]).mean()
    assert abs(auc.value() - exact) < 1e-6


def test_preparing_needs_no_torch():
    code = (
        "import sys, hetrain.data.prepare, hetrain.data.sample, hetrain.data.schema; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2]).returncode == 0
