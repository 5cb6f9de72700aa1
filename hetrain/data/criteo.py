"""Raw Criteo logs: header-less TSV of a label, 13 numbers and 26 ids of 8 hex digits; empty = missing.

The Kaggle file and the Terabyte day files have this shape. Files are read as blocks of whole lines,
each parsed column by column. A block with a bad row is parsed a second time, more slowly, to say which.
"""

import re
from collections.abc import Generator
from dataclasses import dataclass
from glob import glob
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as csv
from numpy.typing import NDArray

from hetrain.data.schema import LABEL
from hetrain.errors import ConfigError, DataError

DENSE = tuple(f"I{i}" for i in range(1, 14))
SPARSE = tuple(f"C{i}" for i in range(1, 27))
NUMBERS = (LABEL, *DENSE)
COLUMNS = (*NUMBERS, *SPARSE)
MAX_ID_BYTES = 8  # an id is kept as a 64-bit key, so that no two ids are ever confused

_NUMBER = r"^-?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?$"  # what pyarrow reads as a number, nan and inf excepted
_BLOCK_BYTES = 1 << 24
_REMEDY = "Mend the line, or set data.on_bad_row=skip to leave such rows out and have them counted."


@dataclass(frozen=True)
class RawBlock:
    """Whole lines of a raw file."""

    file: Path
    first_line: int  # 0-based
    lines: int
    data: bytes


@dataclass(frozen=True)
class Rows:
    """The good rows of a block, and what is wrong with the others."""

    lines: NDArray[np.int64]  # [n] 0-based line of each row in its file
    labels: NDArray[np.float64]  # [n] 0 or 1
    dense: list[NDArray[np.float64]]  # 13 x [n], missing 0
    sparse: list["pa.Array"]  # 26 x [n] binary, missing null
    bad_lines: NDArray[np.int64]  # 0-based lines of rows left out
    first_bad: str | None  # message of the first of them

    def cut(self, first: int, last: int) -> "Rows":
        """The rows of the lines first .. last of the file."""
        a, b = (int(at) for at in np.searchsorted(self.lines, [first, last]))
        bad = self.bad_lines[(self.bad_lines >= first) & (self.bad_lines < last)]
        return Rows(
            self.lines[a:b],
            self.labels[a:b],
            [column[a:b] for column in self.dense],
            [column.slice(a, b - a) for column in self.sparse],
            bad,
            self.first_bad if len(bad) else None,
        )


def raw_files(pattern: str | None) -> list[Path]:
    """The raw files that `data.raw` names, day_2 before day_10."""
    if not pattern:
        raise ConfigError("data.raw=null: expected the raw log, or a glob of raw logs. Set data.raw=FILE_OR_GLOB.")
    found = [Path(name) for name in glob(pattern, recursive=True) if Path(name).is_file()]  # noqa: PTH207 - absolute globs
    if not found and any(Path(name).is_dir() for name in glob(pattern)):  # noqa: PTH207
        raise DataError(
            f"data.raw={pattern}: is a folder. Set data.raw='{pattern.rstrip('/')}/*' to read all files in it."
        )
    if not found:
        raise DataError(
            f"data.raw={pattern}: no such file. Give a file or a quoted glob of raw Criteo logs (.gz or plain)."
        )

    if not any(file.stat().st_size for file in found):
        raise DataError(f"data.raw={pattern}: {found[0]} is empty. Is its download complete?")

    def natural(file: Path) -> list[tuple[int, str]]:
        return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", str(file))]

    return sorted(found, key=natural)


def blocks(file: Path, stop: int | None = None) -> Generator[RawBlock]:
    """The lines of a raw file up to line `stop`; gzip is told by the name (.gz)."""
    try:
        with pa.input_stream(str(file), compression="gzip" if file.suffix == ".gz" else None) as stream:
            yield from _cut(file, stream, stop)
    except (OSError, pa.ArrowException) as error:
        raise DataError(
            f"{file}: cannot be read to its end ({error}). Is it cut short, or not what its name says?"
        ) from error


def _cut(file: Path, stream: "pa.NativeFile", stop: int | None) -> Generator[RawBlock]:
    rest, first = b"", 0
    while stop is None or first < stop:
        more = stream.read(_BLOCK_BYTES)
        data = rest + more
        end = data.rfind(b"\n") + 1 if more else len(data)
        if not data:
            return
        if not end:
            raise DataError(f"{file}: line {first + 1} is longer than {_BLOCK_BYTES} bytes. Is this a raw Criteo log?")
        data, rest = data[:end], data[end:]
        lines = data.count(b"\n") + (not data.endswith(b"\n"))
        if stop is not None and first + lines > stop:
            lines = stop - first
            data = data[: int(np.flatnonzero(np.frombuffer(data, np.uint8) == ord("\n"))[lines - 1]) + 1]
        yield RawBlock(file, first, lines, data)
        first += lines


def count_lines(file: Path) -> int:
    """Lines of a raw file."""
    return sum(block.lines for block in blocks(file))


def parse(block: RawBlock) -> Rows:
    """The rows of a block."""
    try:
        table = _read(block, pa.float64(), [])
    except pa.ArrowInvalid:
        return _parse_carefully(block)
    numbers = [_numbers(table.column(name)) for name in NUMBERS]
    sparse = [table.column(name).combine_chunks() for name in SPARSE]
    labels = np.where(np.asarray(table.column(LABEL).is_null()), np.nan, numbers[0])
    if (
        table.num_rows == block.lines
        and ((labels == 0) | (labels == 1)).all()
        and all(np.isfinite(column).all() for column in numbers)
        and all((pc.max(pc.binary_length(column)).as_py() or 0) <= MAX_ID_BYTES for column in sparse)
    ):
        lines = np.arange(block.first_line, block.first_line + block.lines)
        return Rows(lines, labels, numbers[1:], sparse, np.zeros(0, np.int64), None)
    return _parse_carefully(block)


def _read(block: RawBlock, number: "pa.DataType", wrong_width: list["csv.InvalidRow"] | None) -> "pa.Table":
    """The block as a table; rows of a wrong width go to `wrong_width`, whose numbers need a single thread."""
    careful = pa.types.is_string(number)

    def on_wrong_width(row: "csv.InvalidRow") -> str:
        if wrong_width is not None:
            wrong_width.append(row)
        return "skip" if careful else "error"

    types = dict.fromkeys(NUMBERS, number) | dict.fromkeys(SPARSE, pa.binary())
    return csv.read_csv(
        pa.BufferReader(block.data),
        csv.ReadOptions(column_names=list(COLUMNS), use_threads=not careful, block_size=2 * _BLOCK_BYTES),
        csv.ParseOptions(
            delimiter="\t", quote_char=False, ignore_empty_lines=False, invalid_row_handler=on_wrong_width
        ),
        csv.ConvertOptions(column_types=types, null_values=[""], strings_can_be_null=True, check_utf8=False),
    )


def _numbers(column: "pa.ChunkedArray") -> NDArray[np.float64]:
    """Numbers of a column, missing 0."""
    return np.asarray(pc.fill_null(column.combine_chunks(), 0.0))


@dataclass(frozen=True)
class _Fault:
    line: int  # 0-based
    text: str


def _parse_carefully(block: RawBlock) -> Rows:
    """`parse` for a block that holds bad rows: finds each of them, and says what is wrong with the first."""
    wrong: list[csv.InvalidRow] = []
    table = _read(block, pa.string(), wrong)
    if table.num_rows + len(wrong) != block.lines:
        raise DataError(
            f"{block.file}: lines {block.first_line + 1} to {block.first_line + block.lines} hold carriage returns "
            "inside of lines. Remove them; data.on_bad_row=skip cannot tell such lines apart."
        )
    wrong_lines = np.array([row.number - 1 for row in wrong], np.int64) + block.first_line
    lines = np.setdiff1d(np.arange(block.first_line, block.first_line + block.lines), wrong_lines)
    faults = [
        _Fault(int(line), f"{row.actual_columns} columns, expected {len(COLUMNS)} separated by tabs")
        for line, row in zip(wrong_lines[:1], wrong, strict=False)
    ]
    good = np.ones(len(lines), bool)
    numbers: list[NDArray[np.float64]] = []
    for name in COLUMNS:
        column = table.column(name).combine_chunks()
        bad, expected = _bad_values(name, column, numbers)
        good &= ~bad
        if bad.any():
            at = int(np.argmax(bad))
            faults.append(_Fault(int(lines[at]), f"column {name}: {_shown(column[at])}, expected {expected}"))
    first = min(faults, key=lambda fault: fault.line)
    kept = pa.array(good)
    return Rows(
        lines[good],
        numbers[0][good],
        [column[good] for column in numbers[1:]],
        [table.column(name).combine_chunks().filter(kept) for name in SPARSE],
        np.sort(np.concatenate([wrong_lines, lines[~good]])),
        f"{block.file}: line {first.line + 1}: {first.text}. {_REMEDY}",
    )


def _bad_values(name: str, column: "pa.Array", numbers: list[NDArray[np.float64]]) -> tuple[NDArray[np.bool_], str]:
    """Which values of a column cannot be used, [n] bool, and what was expected. Appends the numbers it reads."""
    if name in SPARSE:
        too_long = pc.fill_null(pc.greater(pc.binary_length(column), MAX_ID_BYTES), False)
        return np.asarray(too_long), f"an id of at most {MAX_ID_BYTES} bytes"
    trimmed = pc.ascii_trim_whitespace(column)
    number = pc.fill_null(pc.match_substring_regex(trimmed, _NUMBER), name != LABEL)
    values = pc.fill_null(pc.cast(pc.if_else(number, trimmed, pa.scalar("0")), pa.float64()), 0.0)
    numbers.append(np.asarray(values))
    bad = ~(np.asarray(number) & np.isfinite(numbers[-1]))
    if name == LABEL:
        return bad | ~np.isin(numbers[-1], (0.0, 1.0)), "the label 0 or 1"
    return bad, "a finite number, or nothing"


def _shown(value: "pa.Scalar") -> str:
    raw = value.as_py()
    return "missing" if raw is None else repr(raw.decode(errors="replace") if isinstance(raw, bytes) else raw)
