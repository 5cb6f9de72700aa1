"""Tables to plan for as a list in a file: JSON, CSV or YAML, with a name, rows, a width and the mean bag lengths.

An entry: `name`, `rows`, `dim`, `pooling` (a number, or one per input of a shared table; default 1), `count` (so many
alike, named NAME_0, NAME_1, ...; default 1) and `dtype` (fp32 or fp16; default fp32). In CSV several bag lengths are
written as 1;10.
"""

import csv
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from hetrain.errors import ConfigError
from hetrain.json_file import read_json
from hetrain.planner.workload import TableLoad
from hetrain.tables import MAX_ROWS, MAX_TABLES, Table

KEYS = ("name", "rows", "dim", "pooling", "count", "dtype")
NEEDED = KEYS[:3]
BYTES = {"fp32": 4, "fp16": 2}
FORMATS = (".json", ".csv", ".yaml", ".yml")
MOST_WIDE = 1 << 14  # columns
AS_IN = '{"name": "C1", "rows": 1000, "dim": 16, "pooling": [1]}'


def find(given: str, folders: Sequence[Path]) -> Path:
    """The file of `plan.tables`: itself, or NAME.yaml among the lists in `folders`, each with a folder `tables`."""
    file = Path(given)
    if file.suffix in FORMATS:
        if not file.is_file():
            what = "is a folder, not a file" if file.is_dir() else "there is no such file"
            raise ConfigError(f"plan.tables={given}: {what}.")
        return file
    shipped = {path.stem: path for folder in reversed(folders) for path in sorted((folder / "tables").glob("*.yaml"))}
    if given in shipped:
        return shipped[given]
    close = get_close_matches(given, shipped, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise ConfigError(
        f"plan.tables={given}: expected a file that ends in {', '.join(FORMATS[:3])}, or a shipped list.{hint}\n"
        f"  Shipped lists: {', '.join(sorted(shipped))}"
    )


def read(file: Path, state_bytes: Mapping[str, int], init_bound: float = 0.0) -> list[TableLoad]:
    """The tables of `file`.

    state_bytes: of the row optimizer's state: "row" bytes for every row, "element" bytes for every value of it.
    Raises ConfigError naming the file, the entry and what was expected.
    """
    found: list[TableLoad] = []
    seen: dict[str, str] = {}
    for where, entry in _entries(file):
        spec = _Entry(where, entry)
        name, rows, dim, count = spec.name(), spec.whole("rows", MAX_ROWS), spec.dim(), spec.whole("count", MAX_TABLES)
        poolings, bytes_ = spec.poolings(), spec.element_bytes()
        state = state_bytes["row"] + state_bytes["element"] * dim
        for number in range(count):
            full = name if count == 1 else f"{name}_{number}"
            if full in seen:
                raise ConfigError(
                    f"{where}: name {full!r} is taken by {seen[full]}. Every table needs a name of its own."
                )
            seen[full] = where
            inputs = (full,) if len(poolings) == 1 else tuple(f"{full}.{i}" for i in range(len(poolings)))
            found.append(TableLoad(Table(full, rows, dim, inputs, init_bound), poolings, bytes_, state))
        if len(found) > MAX_TABLES:
            raise ConfigError(f"{where}: more than {MAX_TABLES:,} tables. Leave some out or merge them.")
    if not found:
        raise ConfigError(f"{file}: holds no table. Each entry is as in {AS_IN}.")
    return found


class _Entry:
    """One entry of the list, its values checked as they are asked for."""

    def __init__(self, where: str, entry: object) -> None:
        if not isinstance(entry, Mapping):
            raise ConfigError(f"{where}: {entry!r}, expected an entry as in {AS_IN}.")
        self._where, self._entry = where, entry
        for key in entry:
            if key not in KEYS:
                close = get_close_matches(str(key), KEYS, n=1)
                hint = f" Did you mean {close[0]!r}?" if close else ""
                raise ConfigError(f"{where}: there is no key {key!r}.{hint}\n  Keys: {', '.join(KEYS)}")
        for key in NEEDED:
            if entry.get(key) in (None, ""):
                raise ConfigError(f"{where}: {key} is missing. An entry is as in {AS_IN}.")

    def _error(self, key: str, expected: str) -> ConfigError:
        name = self._entry["name"]
        return ConfigError(f"{self._where}, table {name}: {key}={self._entry[key]!r}, expected {expected}.")

    def name(self) -> str:
        """Text without dots, which PyTorch's module names cannot hold."""
        name = self._entry["name"]
        if not isinstance(name, str | int) or isinstance(name, bool) or "." in str(name):
            raise self._error("name", "text without '.'")
        return str(name)

    def whole(self, key: str, most: int) -> int:
        """A whole number from 1 to `most`."""
        value = self._number(self._entry.get(key, 1))
        if value is None or not 1 <= value <= most or not float(value).is_integer():
            raise self._error(key, f"a whole number from 1 to {most:,}")
        return int(value)

    def dim(self) -> int:
        """Columns."""
        dim = self.whole("dim", MOST_WIDE)
        if dim % 4:
            raise self._error("dim", "a multiple of 4, as FBGEMM's kernels read rows in groups of 4 floats")
        return dim

    def poolings(self) -> tuple[float, ...]:
        """Mean bag lengths, one per input."""
        given = self._entry.get("pooling")
        if given in (None, ""):
            return (1.0,)
        parts = given if isinstance(given, list | tuple) else str(given).split(";")
        numbers = [self._number(part) for part in parts]
        if not numbers or any(number is None or not 0 < number <= 1e6 for number in numbers):
            raise self._error("pooling", "a mean bag length above 0 (at most a million), or one for each input")
        return tuple(float(number) for number in numbers if number is not None)

    def element_bytes(self) -> int:
        """Bytes of a value."""
        dtype = self._entry.get("dtype") or "fp32"
        if not isinstance(dtype, str) or dtype not in BYTES:
            raise self._error("dtype", " or ".join(BYTES))
        return BYTES[dtype]

    def _number(self, value: object) -> int | float | None:
        """`value` as a number; None when it is none."""
        if isinstance(value, bool):
            return None
        if isinstance(value, int | float):
            return value
        text = str(value).strip().replace("_", "")
        try:
            return int(text)
        except ValueError:
            try:
                return float(text)
            except ValueError:
                return None


def _entries(file: Path) -> Iterator[tuple[str, object]]:
    """Where each entry stands, and the entry."""
    try:
        if file.suffix == ".csv":
            yield from _lines(file)
            return
        held = _parsed(file)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read ({error}).") from error
    tables = held.get("tables") if isinstance(held, Mapping) else held
    if not isinstance(tables, list):
        raise ConfigError(f"{file}: expected a list of tables (or a mapping with one as `tables`), each as in {AS_IN}.")
    for number, entry in enumerate(tables, 1):
        yield f"{file}, entry {number}", entry


def _lines(file: Path) -> Iterator[tuple[str, object]]:
    with file.open(newline="", encoding="utf-8-sig") as lines:
        reader = csv.DictReader(lines, skipinitialspace=True)
        try:
            names = [name.strip() for name in reader.fieldnames or ()]
            if len(names) == 1 and (other := next((mark for mark in ";\t|" if mark in names[0]), None)):
                raise ConfigError(
                    f"{file}, line 1: its cells are separated by {other!r}, expected commas, as in name,rows,dim."
                )
            twice = next((name for name in names if names.count(name) > 1), None)
            if twice is not None:
                raise ConfigError(f"{file}, line 1: column {twice!r} is there twice. Leave one out.")
            for row in reader:
                yield f"{file}, line {reader.line_num}", _cells(row, f"{file}, line {reader.line_num}")
        except csv.Error as error:
            raise ConfigError(f"{file}, line {reader.line_num}: is not CSV ({error}).") from error


def _cells(row: Mapping[str | None, Any], where: str) -> dict[str, Any]:
    """A line of a CSV file; empty cells are left out."""
    if None in row:
        raise ConfigError(f"{where}: more cells than the first line has names. Write several bag lengths as 1;10.")
    return {str(key).strip(): value for key, value in row.items() if value not in (None, "")}


def _parsed(file: Path) -> Any:
    if file.suffix == ".json":
        try:
            return read_json(file)
        except ValueError as error:
            raise ConfigError(f"{file}: is not JSON ({error}).") from error
    import yaml

    try:
        return yaml.safe_load(file.read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        raise
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # a month 13, a number of 5,000 digits
        raise ConfigError(f"{file}: is not YAML ({' '.join(str(error).split())}).") from error
