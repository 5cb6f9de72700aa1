"""JSON edited by hand: what is none, or says a key twice, is a ValueError; numbers are what they say."""

import json

import pytest

from hetrain.json_file import read_json, whole_number


def test_what_json_wrote_is_read(tmp_path):
    held = {"a": [1, 2.5, None, True], "ä": {"b": -(1 << 62)}}
    (tmp_path / "a.json").write_text(json.dumps(held, ensure_ascii=False), encoding="utf-8")
    assert read_json(tmp_path / "a.json") == held


@pytest.mark.parametrize(
    "text", ["", "{", "NaN", "[-Infinity]", '{"a": 1, "a": 1}', '[{"b": {"c": 1, "c": 2}}]', "[" * 99_999]
)
def test_the_rest_is_a_value_error(tmp_path, text):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ValueError, match=r"Expecting|is no number|is given twice|nested too deeply"):
        read_json(tmp_path / "a.json")


@pytest.mark.parametrize("value", [2.0, 50.7, True, "3", None, float("inf"), [1]])
def test_whole_numbers_are_those_alone(value):
    assert whole_number(-3) == -3
    with pytest.raises(ValueError, match="is no whole number"):
        whole_number(value)
