"""The stats of a data set against counting its rows one by one; what is saved, and what is refused."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from hetrain.config import DataConfig, SampleConfig
from hetrain.data.sample import ensure_sample
from hetrain.data.schema import load_schema
from hetrain.errors import DataError
from hetrain.stats.measure import QUANTILES, load, measure, save, stats_file
from tests.data.sets import write_set


def lookups(path: Path, column: str) -> list[int]:
    """Every id of the column in the training rows, read without our reader."""
    found: list[int] = []
    for file in sorted((path / "train").glob("*.parquet")):
        for value in pq.read_table(file)[column].to_pylist():
            found += value if isinstance(value, list) else [value]
    return found


@pytest.mark.parametrize("multi_hot", [False, True])
def test_columns_are_counted_as_they_are(tmp_path: Path, multi_hot: bool) -> None:
    path = write_set(tmp_path / "set", 101, multi_hot=multi_hot)
    stats = measure(path)
    assert stats["examples"] == 101
    for column in stats["columns"]:
        ids = lookups(path, column["name"])
        counts = Counter(ids)
        assert column["lookups"] == len(ids)
        assert column["pooling"] == pytest.approx(len(ids) / 101)
        assert column["distinct"] == len(counts)
        assert column["missing"] == counts[0]
        assert column["empty_bags"] == (34 if multi_hot and column["name"] == "C2" else 0)
        assert column["top"]["0.1"] == pytest.approx(max(counts.values()) / len(ids))
        draws = 128 * len(ids) / 101
        expected = sum(1 - (1 - count / len(ids)) ** draws for count in counts.values())
        assert column["unique"]["128"] == pytest.approx(expected)
        half = sum(count for _, count in counts.most_common(round(column["rows"] / 2)))
        assert column["cache"]["share"]["0.5"] == pytest.approx(half / len(ids))
        assert sorted(column["spectrum"]) == sorted([n, float(c)] for c, n in Counter(counts.values()).items())
    assert stats["all"]["lookups"] == sum(column["lookups"] for column in stats["columns"])
    assert stats["all"]["unique"]["512"] == pytest.approx(sum(c["unique"]["512"] for c in stats["columns"]))


def test_row_quantiles_cut_the_lookups_evenly(sample: Path) -> None:
    for column in measure(sample)["columns"]:
        ids = np.array(lookups(sample, column["name"]))
        rows = column["row_quantiles"]
        assert (len(rows), rows[0], rows[-1]) == (QUANTILES + 1, 0, column["rows"])
        for k in range(1, QUANTILES):
            assert (ids < rows[k]).mean() >= k / QUANTILES > (ids < rows[k] - 1).mean()


def test_saved_stats_are_read_again_and_only_with_their_data(tmp_path: Path) -> None:
    path = write_set(tmp_path / "set", 60)
    schema = load_schema(path)
    assert load(path, schema) is None
    stats = measure(path)
    file = save(path, stats)
    assert load(path, schema) == json.loads(file.read_text()) == stats
    other = write_set(tmp_path / "other", 61)
    (other / "stats.json").write_text(file.read_text())
    with pytest.raises(DataError, match=r"was measured on other data .*\(train\).*hetrain stats data.path="):
        load(other, load_schema(other))
    first, *others = stats["columns"]
    edits = ({"spectrum": [[-1, 2.0]]}, {"spectrum": [[1, 1e999]]}, {"row_quantiles": []}, {"row_quantiles": [0, 5]})
    edited = [json.dumps({**stats, "columns": [{**first, **edit}, *others]}) for edit in (*edits, {"rows": 3})]
    lacking = json.dumps({**stats, "columns": others})
    none = ("{", "[]", '{"format": 1}', json.dumps({**stats, "columns": [{"name": "C1"}]}), "[" * 100_000)
    for text in (*none, *edited, lacking):
        file.write_text(text)
        with pytest.raises(DataError, match="damaged"):
            load(path, schema)
    file.write_text('{"format": 0}')
    with pytest.raises(DataError, match="format 0, this version reads 1"):
        load(path, schema)


def test_stats_go_with_a_sample_that_is_made_anew(tmp_path: Path) -> None:
    cfg = DataConfig(path=str(tmp_path / "sample"), sample=SampleConfig(rows=200, cardinalities=[9]))
    ensure_sample(cfg)
    for file in (save(cfg.path, measure(cfg.path)), tmp_path / "sample" / "stats.html"):
        file.touch()
    assert not ensure_sample(cfg)
    assert ensure_sample(replace(cfg, sample=SampleConfig(rows=300, cardinalities=[9])))
    assert not stats_file(cfg.path).exists()
