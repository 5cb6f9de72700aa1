"""JSON that people may have edited: only what is plain JSON, and said once."""

import json
from pathlib import Path
from typing import Any


def read_json(file: Path) -> Any:
    """What `file` holds.

    Raises OSError when it cannot be read, and ValueError for what is no JSON: also for NaN and Infinity, a key
    given twice (json keeps the last one without a word) and nesting beyond Python's stack. 1e999 is inf, as in json.
    """
    text = file.read_text(encoding="utf-8")
    try:
        return json.loads(text, parse_constant=_constant, object_pairs_hook=_once)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def whole_number(value: object) -> int:
    """`value`, if it is a whole number of JSON: int() also takes 50.7, true and "3". ValueError otherwise."""
    if type(value) is not int:
        raise ValueError(f"{value!r} is no whole number")
    return value


def _constant(text: str) -> float:
    raise ValueError(f"{text} is no number")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    held = dict(pairs)
    if len(held) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"key {next(key for key in keys if keys.count(key) > 1)!r} is given twice")
    return held
