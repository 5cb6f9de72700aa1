"""`hetrain prepare` against an obvious per-row reference, on real and made-up rows; bad input; kills."""

import gzip
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hetrain.config import DataConfig, SplitConfig
from hetrain.data import criteo
from hetrain.data import prepare as prepare_module
from hetrain.data.criteo import raw_files
from hetrain.data.prepare import prepare
from hetrain.data.schema import is_prepared, load_schema, split_files
from hetrain.data.vocabulary import ValueCounts, keys_of, load_vocabulary, values_of
from hetrain.errors import ConfigError, DataError


def line(label="0", numbers=None, ids=None):
    return "\t".join([label, *(numbers or ["1"] * 13), *(ids or ["0a1b2c3d"] * 26)])


def made_up(rows, seed=0):
    rng = random.Random(seed)

    def number():
        return rng.choice(["", "0", "-3", "7", "12345678", "2.5", "1e3"])

    def value(column):
        if rng.random() < 0.2:
            return ""
        if column % 5 == 0:
            return rng.choice("abc")
        return f"{int(rng.paretovariate(0.6) * (column + 1)) & 0xFFFFFFFF:08x}"

    return [line(rng.choice("01"), [number() for _ in range(13)], [value(c) for c in range(26)]) for _ in range(rows)]


def config(tmp_path, raw, **changes):
    changes.setdefault("split", SplitConfig(0.8, 0.1, 0.1))
    return DataConfig(name="criteo", path=str(tmp_path / "out"), raw=str(raw), **changes)


def reference(lines, bounds, min_count):
    """Row by row: split -> (labels, dense, ids)."""
    rows = [text.split("\t") for text in lines]
    train = rows[slice(*bounds["train"])]
    ids = []
    for c in range(26):
        counts = Counter(row[14 + c] for row in train if row[14 + c])
        kept = sorted((value for value, n in counts.items() if n >= min_count), key=lambda v: (-counts[v], v))
        ids.append({value: at + 1 for at, value in enumerate(kept)})
    out = {}
    for name, (a, b) in bounds.items():
        part = rows[a:b]
        dense = [[math.log1p(max(float(v), 0.0)) if v else 0.0 for v in row[1:14]] for row in part]
        sparse = [[ids[c].get(row[14 + c], 0) for c in range(26)] for row in part]
        out[name] = ([float(row[0]) for row in part], dense, sparse)
    return out, [len(column) + 1 for column in ids]


def assert_equal_to_reference(path, lines, bounds, min_count):
    expected, rows = reference(lines, bounds, min_count)
    schema = load_schema(path)
    assert [column.rows for column in schema.sparse] == rows
    assert schema.splits == {name: b - a for name, (a, b) in bounds.items()}
    for name, (labels, dense, sparse) in expected.items():
        files = split_files(path, name)
        assert bool(files) == bool(labels)
        if not files:
            continue
        table = pa.concat_tables([pq.read_table(file) for file in files])
        np.testing.assert_array_equal(table["label"].to_numpy(), labels)
        got = np.stack([table[f"I{i}"].to_numpy() for i in range(1, 14)], 1)
        np.testing.assert_allclose(got, np.array(dense, np.float32), rtol=2e-7)
        assert np.stack([table[f"C{i}"].to_numpy() for i in range(1, 27)], 1).tolist() == sparse


@pytest.mark.real
@pytest.mark.parametrize("min_count", [1, 3])
def test_real_rows(criteo_rows, tmp_path, min_count):
    cfg = config(tmp_path, criteo_rows, split=SplitConfig(50_000, 0, 10_000), min_count=min_count)
    report = prepare(cfg)
    with gzip.open(criteo_rows, "rt") as file:
        lines = [text.rstrip("\n") for text in file]
    bounds = {"train": (0, 50_000), "validation": (50_000, 50_000), "test": (50_000, 60_000)}
    assert_equal_to_reference(tmp_path / "out", lines, bounds, min_count)
    assert report["positives"]["train"] == sum(text.startswith("1") for text in lines[:50_000])
    assert load_schema(cfg.path).used_split("validation") == "test"


@pytest.mark.parametrize("block", [1 << 24, 3000])
@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_made_up_rows_in_several_files(tmp_path, monkeypatch, block, ending):
    monkeypatch.setattr(criteo, "_BLOCK_BYTES", block)
    lines = made_up(1000)
    for name, part in [("day_0", lines[:300]), ("day_10", lines[650:]), ("day_2", lines[300:650])]:
        (tmp_path / name).write_bytes(ending.join(part).encode())  # no newline after the last line
    (tmp_path / "day_2").rename(tmp_path / "day_2.plain")
    (tmp_path / "day_2.gz").write_bytes(gzip.compress((tmp_path / "day_2.plain").read_bytes()))
    (tmp_path / "day_2.plain").unlink()
    report = prepare(config(tmp_path, tmp_path / "day_*", split=SplitConfig(0.7, 0.1, 0.2), min_count=2))
    bounds = {"train": (0, 700), "validation": (700, 800), "test": (800, 1000)}
    assert_equal_to_reference(tmp_path / "out", lines, bounds, 2)
    assert report["made"]
    assert report["bad_rows"] == 0
    assert report["rows_per_s"] > 0


def test_a_finished_set_is_kept_and_a_different_one_refused(tmp_path):
    raw = tmp_path / "raw.tsv"
    raw.write_text("\n".join(made_up(100)) + "\n")
    cfg = config(tmp_path, raw)
    first = prepare(cfg)
    changed = (tmp_path / "out" / "schema.json").stat().st_mtime_ns
    again = prepare(cfg)
    assert (first["made"], again["made"]) == (True, False)
    assert again["rows"] == first["rows"]
    assert (tmp_path / "out" / "schema.json").stat().st_mtime_ns == changed
    with pytest.raises(DataError, match=r"other settings \(min_count differ\).*choose another data\.path"):
        prepare(config(tmp_path, raw, min_count=5))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.txt").write_text("x")
    cfg.path = str(tmp_path / "other")
    with pytest.raises(DataError, match="is no data set"):
        prepare(cfg)
    assert (tmp_path / "other" / "mine.txt").exists()


GOOD = line()
BAD = {
    "2 columns, expected 40": "1\t2",
    "41 columns, expected 40": GOOD + "\tx",
    "column label: '2', expected the label 0 or 1": line(label="2"),
    "column label: missing": line(label=""),
    "column I3: 'x1', expected a finite number": line(numbers=["1", "2", "x1", *["1"] * 10]),
    "column I3: 'nan', expected a finite number": line(numbers=["1", "2", "nan", *["1"] * 10]),
    "column I13: '1e999', expected a finite number": line(numbers=[*["1"] * 12, "1e999"]),
    "column C2: '123456789', expected an id of at most 8 bytes": line(ids=["a", "123456789", *["a"] * 24]),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_rows(tmp_path, message):
    raw = tmp_path / "raw.tsv"
    raw.write_text("\n".join([*[GOOD] * 6, BAD[message], GOOD, BAD[message], GOOD]) + "\n")
    with pytest.raises(DataError, match="line 7") as caught:
        prepare(config(tmp_path, raw))
    assert message in str(caught.value)
    assert "raw.tsv" in str(caught.value)
    assert "on_bad_row=skip" in str(caught.value)
    assert not (tmp_path / "out").exists()
    report = prepare(config(tmp_path, raw, on_bad_row="skip"))
    assert report["bad_rows"] == 2
    assert message in report["first_bad_row"]
    assert report["rows"] == {"train": 7, "validation": 0, "test": 1}


def test_a_bad_row_after_the_last_one_used_does_not_matter(tmp_path):
    raw = tmp_path / "raw.tsv"
    raw.write_text("\n".join([*[GOOD] * 6, "1\t2"]) + "\n")
    report = prepare(config(tmp_path, raw, split=SplitConfig(4, 0, 2)))
    assert report["rows"] == {"train": 4, "validation": 0, "test": 2}


def test_a_bad_line_is_told_before_a_split_that_cannot_be(tmp_path):
    raw = tmp_path / "raw.tsv"
    raw.write_text("1\t2\t3\n")
    with pytest.raises(DataError, match="line 1: 3 columns, expected 40"):
        prepare(config(tmp_path, raw))
    with pytest.raises(DataError, match="of 1 rows none are left to test on"):
        prepare(config(tmp_path, raw, on_bad_row="skip"))


def test_mistakes_are_told(tmp_path):
    raw = tmp_path / "raw.tsv"
    raw.write_text("\n".join([GOOD] * 20) + "\n")
    with pytest.raises(ConfigError, match=r"data\.raw=null"):
        prepare(DataConfig(name="criteo", path=str(tmp_path / "out")))
    with pytest.raises(DataError, match="no such file"):
        prepare(config(tmp_path, tmp_path / "nothing*"))
    with pytest.raises(DataError, match="asks for 60 rows, the data has 20"):
        prepare(config(tmp_path, raw, split=SplitConfig(50, 0, 10)))
    for split, message in [
        (SplitConfig(0.9, 0.1, 0.1), "sum to 1.1"),
        (SplitConfig(50, 0, 0.1), "not both"),
        (SplitConfig(0, 0, 1), "above 0"),
        (SplitConfig(2.5, 0, 2), "whole numbers"),
    ]:
        with pytest.raises(ConfigError, match=message):
            prepare(config(tmp_path, raw, split=split))
    with pytest.raises(ConfigError, match="expected error or skip"):
        prepare(config(tmp_path, raw, on_bad_row="ignore"))
    cut = tmp_path / "cut.gz"
    cut.write_bytes(gzip.compress("\n".join(made_up(2000)).encode())[:-5000])
    with pytest.raises(DataError, match=r"cut\.gz: cannot be read to its end"):
        prepare(config(tmp_path, cut))


def test_a_folder_and_an_empty_file_are_told(tmp_path):
    with pytest.raises(DataError, match=r"is a folder\. Set data\.raw='.*/\*'"):
        raw_files(str(tmp_path))
    (tmp_path / "empty.txt").touch()
    with pytest.raises(DataError, match=r"empty\.txt is empty"):
        raw_files(str(tmp_path / "empty.txt"))


def test_files_are_read_in_natural_order(tmp_path):
    for day in (10, 2, 1):
        (tmp_path / f"day_{day}").write_text("x")
    assert [file.name for file in raw_files(str(tmp_path / "day_*"))] == ["day_1", "day_2", "day_10"]


def test_a_failed_run_goes_on_from_its_last_whole_file(tmp_path, monkeypatch):
    lines = made_up(900)
    for day in range(3):
        (tmp_path / f"day_{day}").write_text("\n".join(lines[300 * day : 300 * day + 300]) + "\n")
    cfg = config(tmp_path, tmp_path / "day_*")
    table, encoded = prepare_module._table, []

    def fail_on_second(rows, vocabularies):
        encoded.append(len(rows.lines))
        if len(encoded) == 2:
            raise KeyboardInterrupt
        return table(rows, vocabularies)

    monkeypatch.setattr(prepare_module, "_table", fail_on_second)
    with pytest.raises(KeyboardInterrupt):
        prepare(cfg)
    assert not is_prepared(cfg.path)
    monkeypatch.setattr(ValueCounts, "add", None)  # counting again would fail
    prepare(cfg)
    assert encoded[:2] == [300, 300]
    assert sum(encoded[2:]) == 600
    bounds = {"train": (0, 720), "validation": (720, 810), "test": (810, 900)}
    assert_equal_to_reference(Path(cfg.path), lines, bounds, 1)


@pytest.mark.parametrize("after_s", [0.3, 0.6, 1.0])
def test_killed_in_the_middle(tmp_path, after_s):
    lines = made_up(20_000)
    raw = tmp_path / "raw.tsv"
    raw.write_text("\n".join(lines) + "\n")
    cfg = config(tmp_path, raw, split=SplitConfig(18_000, 1000, 1000))
    code = (
        "import sys; from hetrain.config import *; from hetrain.data import criteo, prepare as p; "
        "criteo._BLOCK_BYTES = 100_000; "
        f"split = SplitConfig(18_000, 1000, 1000); "
        f"p.prepare(DataConfig(name='criteo', path={cfg.path!r}, raw={cfg.raw!r}, split=split))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(Path.cwd())})
    time.sleep(after_s)
    process.send_signal(signal.SIGKILL)
    killed = process.wait() == -signal.SIGKILL
    assert not (killed and is_prepared(cfg.path)) or load_schema(cfg.path).splits["train"] == 18_000
    prepare(cfg)
    bounds = {"train": (0, 18_000), "validation": (18_000, 19_000), "test": (19_000, 20_000)}
    assert_equal_to_reference(Path(cfg.path), lines, bounds, 1)


def test_vocabulary_keys_keep_values_and_their_order(tmp_path):
    values = [b"a", b"ab", b"b", b"00000001", b"ffffffff", b"zz"]
    array = pa.array([b"left out", *values], pa.binary()).slice(1)
    keys = keys_of(array)
    assert values_of(keys).to_pylist() == values
    assert [values[at] for at in np.argsort(keys)] == sorted(values)
    counts = ValueCounts()
    counts.add(pa.array([b"b", b"a", None, b"c", b"c"], pa.binary()))
    counts.add(pa.array([b"d"], pa.binary()))
    vocabulary = counts.vocabulary(1)
    vocabulary.save(tmp_path / "v.parquet")
    for one in (vocabulary, load_vocabulary(tmp_path / "v.parquet")):
        assert one.encode(pa.array([b"c", b"a", b"b", b"d", b"e", None], pa.binary())).tolist() == [1, 2, 3, 4, 0, 0]
    assert counts.vocabulary(3).encode(pa.array([b"c", None], pa.binary())).tolist() == [0, 0]
    assert ValueCounts().vocabulary(1).rows == 1
