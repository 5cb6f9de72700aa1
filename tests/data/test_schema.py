"""schema.json written by hand or by another program: every fault is a DataError naming the file."""

import json

import pytest

from hetrain.data.schema import load_schema
from hetrain.errors import DataError

GOOD = {"format": 1, "dense": ["I1"], "sparse": [{"name": "C1", "rows": 3}], "splits": {"train": 5}}
FAULTS = [
    ({"sparse": [{"name": "C1", "rows": 0}]}, "column C1: rows=0, expected a whole number from 1"),
    ({"sparse": [{"name": "C1", "rows": "abc"}]}, "column C1: rows='abc', expected a whole number"),
    ({"sparse": [{"name": "C1", "rows": 1 << 62}]}, "expected a whole number from 1 to"),
    ({"sparse": [{"name": "C.1", "rows": 3}]}, "must hold no '.'"),
    ({"sparse": []}, "there are no sparse columns"),
    ({"sparse": [{"name": "I1", "rows": 3}]}, "the columns I1 are there twice"),
    ({"dense": ["label"]}, "the columns label are there twice"),
    ({"dense": [3]}, "a column's name is no text"),
    ({"splits": {"train": -1}}, "splits: train=-1"),
    ({"splits": []}, "damaged"),
    ({"splits": {"train": 5.5}}, "5.5 is no whole number"),
    ({"splits": {"train": float("inf")}}, "Infinity is no number"),
    ({"sparse": [{"name": "C1", "rows": [3]}]}, "rows=[3], expected a whole number"),
    ({"sparse": [3]}, "damaged"),
]


def test_a_good_one_is_read(tmp_path):
    (tmp_path / "schema.json").write_text(json.dumps(GOOD))
    assert load_schema(tmp_path).sparse[0].rows == 3


@pytest.mark.parametrize(("change", "message"), FAULTS, ids=[message for _, message in FAULTS])
def test_faults(tmp_path, change, message):
    (tmp_path / "schema.json").write_text(json.dumps({**GOOD, **change}))
    with pytest.raises(DataError, match=r"schema\.json") as error:
        load_schema(tmp_path)
    assert message in str(error.value)


@pytest.mark.parametrize("text", ["", "[]", "null", "{", "[" * 100_000])
def test_no_json_object(tmp_path, text):
    (tmp_path / "schema.json").write_text(text)
    with pytest.raises(DataError, match="damaged"):
        load_schema(tmp_path)
