"""Lists of tables: the same in every format, the shipped ones as published, and every mistake by its place."""

import json
from pathlib import Path

import pytest

from hetrain.config.compose import shipped_configs
from hetrain.errors import ConfigError
from hetrain.planner.request import STATE
from hetrain.planner.table_list import find, read
from hetrain.planner.workload import TableLoad

GOOD = [
    {"name": "one", "rows": 10, "dim": 8},
    {"name": "two", "rows": 1000, "dim": 16, "pooling": [1, 2.5], "count": 2, "dtype": "fp16"},
]
CSV = "name,rows,dim,pooling,count,dtype\none,10,8,,,\ntwo,1_000,16,1;2.5,2,fp16\n"
YAML = "tables:\n  - {name: one, rows: 10, dim: 8}\n"
YAML += "  - {name: two, rows: 1_000, dim: 16, pooling: [1, 2.5], count: 2, dtype: fp16}\n"


def written(folder: Path, name: str, text: str) -> list[TableLoad]:
    file = folder / name
    file.write_text(text)
    return read(find(str(file), []), STATE["adagrad"])


def test_every_format_gives_the_same_tables(tmp_path: Path) -> None:
    one, *two = written(tmp_path, "a.json", json.dumps(GOOD))
    assert (one.table.name, one.table.rows, one.table.dim, one.poolings, one.row_bytes) == ("one", 10, 8, (1.0,), 64)
    assert [load.table.name for load in two] == ["two_0", "two_1"]
    assert (two[0].table.rows, two[0].poolings, two[0].inputs, two[0].element_bytes) == (1000, (1.0, 2.5), 2, 2)
    assert two[0].row_bytes == 16 * 2 + 16 * 4
    assert written(tmp_path, "a.csv", CSV) == written(tmp_path, "a.yaml", YAML) == [one, *two]


# Tables, inputs, ids per example, GiB in fp32, as published.
MERLIN = {
    "tiny": (55, 58, 85, 4.2),
    "small": (107, 116, 377, 26.3),
    "medium": (311, 337, 1611, 206.2),
    "large": (612, 669, 6312, 773.8),
    "jumbo": (1022, 1097, 16_022, 3109.5),
    "colossal": (2002, 2153, 47_302, 22_327.4),
}


@pytest.mark.parametrize("name", MERLIN)
def test_merlins_models_have_their_published_size(name: str) -> None:
    loads = read(find(f"merlin_{name}", [shipped_configs()]), STATE["sgd"])
    size = sum(load.table.rows * load.row_bytes for load in loads) / 2**30
    ids = round(sum(load.pooling for load in loads))
    assert (len(loads), sum(load.inputs for load in loads), ids, round(size, 1)) == MERLIN[name]


def test_het_at_its_widest_has_a_trillion_parameters() -> None:
    assert sum(load.elements for load in read(find("het_trillion", [shipped_configs()]), STATE["sgd"])) == 10**12


A = '{"name": "a", "rows": 5, "dim": 8'
WRONG = {
    '[{"name": "a", "rows": -5, "dim": 8}]': r"entry 1, table a: rows=-5, expected a whole number from 1 to ",
    '[{"name": "a", "rows": 1.5, "dim": 8}]': "entry 1, table a: rows=1.5, expected a whole number",
    '[{"name": "a", "rows": 1e999, "dim": 8}]': "entry 1, table a: rows=inf, expected a whole number",
    '[{"name": "a", "rows": "many", "dim": 8}]': "table a: rows='many', expected a whole number",
    '[{"name": "a", "rows": true, "dim": 8}]': "table a: rows=True, expected a whole number",
    '[{"name": "a", "rows": 5, "dim": 6}]': "table a: dim=6, expected a multiple of 4",
    '[{"name": "a", "rows": 5}]': "entry 1: dim is missing. An entry is as in",
    '[{"name": "a.b", "rows": 5, "dim": 8}]': r"name='a\.b', expected text without '\.'",
    '[{"name": "a", "rows": 5, "dim": 8, "pooling": [1, 0]}]': "pooling=.1, 0., expected a mean bag length above 0",
    '[{"name": "a", "rows": 5, "dim": 8, "pooling": []}]': "expected a mean bag length above 0",
    '[{"name": "a", "rows": 5, "dim": 8, "dtype": "int8"}]': "dtype='int8', expected fp32 or fp16",
    '[{"name": "a", "rows": 5, "dim": 8, "poling": 2}]': "there is no key 'poling'. Did you mean 'pooling'",
    '[{"name": "a", "rows": 5, "dim": 8, "count": 0}]': "count=0, expected a whole number",
    f'[{A}, "count": 32768}}, {{"name": "b", "rows": 5, "dim": 8}}]': "more than 32,768 tables",
    f"[{A}}}, {A}}}]": "entry 2: name 'a' is taken by .*entry 1",
    '[["a", 5, 8]]': "entry 1: .*expected an entry as in",
    '{"a": 5}': "expected a list of tables",
    "[]": "holds no table",
    "[{": "is not JSON",
    "[" * 100_000: "is not JSON .nested too deeply",
    f'[{A}, "rows": 6}}]': "is not JSON .key 'rows' is given twice",
    '[{"name": "a", "rows": 1' + "0" * 400 + ', "dim": 8}]': "table a: rows=10+, expected a whole number",
    f'[{A}, "pooling": [1' + "0" * 400 + "]}]": "expected a mean bag length above 0",
    f'[{A}, "dtype": ["fp32"]}}]': "dtype=.'fp32'., expected fp32 or fp16",
}


@pytest.mark.parametrize(("text", "words"), WRONG.items())
def test_mistakes_are_named_by_file_and_entry(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=f"list.json.*{words}"):
        written(tmp_path, "list.json", text)


def test_mistakes_of_other_formats(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"a.csv, line 3, table b: rows='x', expected"):
        written(tmp_path, "a.csv", "name,rows,dim\na,5,8\nb,x,8\n")
    with pytest.raises(ConfigError, match=r"a.csv, line 2: more cells than the first line has names"):
        written(tmp_path, "a.csv", "name,rows,dim,pooling\na,5,8,1,10\n")
    with pytest.raises(
        ConfigError, match=r"a.csv, line 1: its cells are separated by ';', expected commas, as in name"
    ):
        written(tmp_path, "a.csv", "name;rows;dim\na;5;8\n")
    with pytest.raises(ConfigError, match=r"a.csv, line 1: column 'rows' is there twice"):
        written(tmp_path, "a.csv", "name,rows,dim, rows\na,5,8,6\n")
    with pytest.raises(ConfigError, match=r"a.csv, line \d: is not CSV \(field larger"):
        written(tmp_path, "a.csv", f"name,rows,dim\n{'a' * 200_000},5,8\n")
    for text in ("tables: [", "- {name: 2020-13-45, rows: 5, dim: 8}", f"- {{rows: 1{'0' * 5000}}}", "[" * 3000):
        with pytest.raises(ConfigError, match="is not YAML"):
            written(tmp_path, "a.yaml", text)
    with pytest.raises(ConfigError, match="there is no such file"):
        find(str(tmp_path / "none.csv"), [])
    with pytest.raises(
        ConfigError, match=r"Did you mean 'merlin_tiny'\?\n  Shipped lists: criteo_kaggle, het_trillion"
    ):
        find("merlin_tinny", [shipped_configs()])
