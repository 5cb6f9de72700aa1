"""docs/summary.md read back: which keys summary.json has in which mode."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parent.parent / "docs" / "summary.md"
ROW = re.compile(r"\| `([\w.*]+)` \| ([^|]+?)((?: with \w+)?) \|")
MODES = ("bsp", "het", "ssp", "asp")


def documented(mode: str, *, dct: bool, servers: bool) -> list[str]:
    """The keys of the table that a run of `mode` has; NAME.* stands for any below NAME."""
    has = {"": True, " with dct": dct, " with servers": servers}
    rows = ROW.findall(PAGE.read_text())
    return [key for key, modes, only in rows if has[only] and mode in (MODES if modes == "all" else modes.split(", "))]


def flat(summary: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted keys and their values; what is empty or null stands for all below it."""
    found: dict[str, Any] = {}
    for key, value in summary.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) and value else {prefix + key: value}
    return found


def check(summary: Mapping[str, Any], mode: str, *, dct: bool = False, servers: bool = False) -> None:
    """Every key that was written is in the table, and every key of the table was written, or stands below a null."""
    written, table = flat(summary), documented(mode, dct=dct, servers=servers)
    places = {key: [name for name in table if _is(name, key)] for key in written}
    strange = [key for key, names in places.items() if not names]
    everywhere = [key for key, *_ in ROW.findall(PAGE.read_text())]
    strange = [k for k in strange if written[k] is not None or not any(name.startswith(f"{k}.") for name in everywhere)]
    assert strange == [], "written and not in docs/summary.md"
    nulls = tuple(f"{key}." for key, value in written.items() if value is None)
    met = {name for names in places.values() for name in names}
    assert [name for name in table if name not in met and not name.startswith(nulls)] == [], "only in docs/summary.md"


def _is(name: str, key: str) -> bool:
    return key.startswith(name[:-1]) if name.endswith(".*") else key == name
