"""Writes a prepared data set of Zipf ids over tables of any size, for `data=criteo data.path=...`.

    python benchmarks/zipf_data.py --out data/zipf --preset kaggle --rows 800000 --exponent 1.2
    python benchmarks/zipf_data.py --out data/huge --cardinalities 10000000000,1000000,1000 --rows 100000
    hetrain train data=criteo data.path=data/zipf consistency=het
    hetrain train +experiment=criteo_het_huge data=criteo data.path=data/huge

The id of rank r (0 the hottest) has probability (r + 1)^-exponent. Ranks are spread over the table by a fixed
permutation, so that hot rows are no neighbours. Labels (base rate 0.25) hang weakly on the 13 dense columns, ids carry
nothing to learn: this is for speed and traffic, not for quality.

kaggle: the 26 tables of Criteo Kaggle, 33.76M rows. prototype: its shape in 610K rows.
"""

import argparse
import math
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hetrain.data.folder import PartWriter, locked, partial_folder
from hetrain.data.hidden import random_stream
from hetrain.data.schema import LABEL, MOST_ROWS, DatasetSchema, SparseColumn, save_schema

Ids = NDArray[np.int64]

KAGGLE = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194,
    27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)  # fmt: skip
PROTOTYPE_ROWS = 610_000
DENSE = 13
BASE_RATE = 0.25
HEAD = (
    1 << 20
)  # ranks drawn from their exact frequencies; those behind from the continuous law, whose error there is nil
CHUNK = 262_144  # rows drawn from one random stream
LABELS_STREAM, ROWS_STREAM = 0, 1
_BITS = 20  # of the low part of a multiplier: products of 2^40 and 2^20 stay inside of int64


def prototype() -> tuple[int, ...]:
    """Kaggle's tables scaled to PROTOTYPE_ROWS in all; small ones keep up to 10 rows."""
    share = PROTOTYPE_ROWS / sum(KAGGLE)
    rows = [max(round(k * share), min(k, 10)) for k in KAGGLE]
    rows[rows.index(max(rows))] += PROTOTYPE_ROWS - sum(rows)
    return tuple(rows)


PRESETS = {"kaggle": KAGGLE, "prototype": prototype()}


class ZipfColumn:
    """Draws ids of one table."""

    def __init__(self, rows: int, exponent: float) -> None:
        self.rows = rows
        self._power = 1 - exponent if abs(1 - exponent) > 1e-6 else 0.0  # nearer to 1, differences would cancel out
        head = np.arange(1, min(rows, HEAD) + 1, dtype=np.float64) ** -exponent
        self._cumulative = np.cumsum(head)
        self._head = float(self._cumulative[-1])
        # The tail's mass: the sum of r^-a over HEAD < r <= rows is the integral between the halves, but for 1e-12.
        self._low, self._high = HEAD + 0.5, rows + 0.5
        self._tail = self._integral(self._low, self._high) if rows > HEAD else 0.0
        self._multiplier = spread_by(rows)

    def _integral(self, a: float, b: float) -> float:
        power = self._power
        return math.log(b / a) if power == 0 else (b**power - a**power) / power

    def ranks(self, rng: np.random.Generator, n: int) -> Ids:
        """[n] ranks, 0 the hottest."""
        mass = rng.random(n) * (self._head + self._tail)
        ranks = np.searchsorted(self._cumulative, mass, "right").astype(np.int64)
        tail = mass >= self._head
        if tail.any():
            ranks[tail] = self._tail_ranks(mass[tail] - self._head)
        return np.minimum(ranks, self.rows - 1)

    def _tail_ranks(self, mass: NDArray[np.float64]) -> Ids:
        """The inverse of the integral from `_low` on, as ranks."""
        power = self._power
        at = self._low * np.exp(mass) if power == 0 else (self._low**power + power * mass) ** (1 / power)
        return np.maximum(np.rint(np.minimum(at, self._high)).astype(np.int64) - 1, HEAD)

    def draw(self, rng: np.random.Generator, n: int) -> Ids:
        """[n] ids in [0, rows)."""
        return permuted(self.ranks(rng, n), self._multiplier, self.rows)


def spread_by(rows: int) -> int:
    """A number near rows / golden ratio without a common divisor with `rows`."""
    multiplier = max(int(rows * 0.6180339887498949), 1)
    while math.gcd(multiplier, rows) != 1:
        multiplier += 1
    return multiplier


def permuted(ranks: Ids, multiplier: int, rows: int) -> Ids:
    """[n] ranks * multiplier mod rows, exact for rows up to 2^40."""
    high, low = multiplier >> _BITS, multiplier & ((1 << _BITS) - 1)
    return ((ranks * high % rows << _BITS) + ranks * low) % rows


class Labels:
    """Labels with the base rate, from a weak signal of the dense columns."""

    def __init__(self, seed: int) -> None:
        rng = random_stream(seed, LABELS_STREAM)
        self._weight = rng.normal(size=DENSE) * 0.25
        self._threshold = float(np.quantile(self._score(rng, rng.standard_normal((CHUNK, DENSE))), 1 - BASE_RATE))

    def _score(self, rng: np.random.Generator, dense: NDArray[Any]) -> NDArray[np.float64]:
        score: NDArray[np.float64] = dense @ self._weight + rng.logistic(size=len(dense))
        return score

    def draw(self, rng: np.random.Generator, dense: NDArray[np.float32]) -> NDArray[np.float32]:
        """[n] 0 or 1 for dense [n, DENSE]."""
        return (self._score(rng, dense) > self._threshold).astype(np.float32)


def write_split(file: Path, rows: int, columns: Sequence[ZipfColumn], labels: Labels, stream: tuple[int, int]) -> int:
    """One Parquet file of `rows` examples; how many are positive. `stream`: seed and a number of the split's own."""
    writer, positives = PartWriter(file), 0
    for chunk, first in enumerate(range(0, rows, CHUNK)):
        rng = random_stream(stream[0], ROWS_STREAM + stream[1], chunk)
        n = min(CHUNK, rows - first)
        dense = rng.standard_normal((n, DENSE), np.float32)
        label = labels.draw(rng, dense)
        data = {LABEL: label}
        data |= {f"I{i + 1}": np.ascontiguousarray(dense[:, i]) for i in range(DENSE)}
        for number, column in enumerate(columns):
            ids = column.draw(rng, n)
            data[f"C{number + 1}"] = ids.astype(np.int32) if column.rows <= 1 << 31 else ids
        writer.write(pa.table(data))
        positives += int(label.sum())
    writer.close()
    return positives


def write(out: Path, cardinalities: Sequence[int], rows: int, test_rows: int, exponent: float, seed: int) -> None:
    """The data set folder, whole or not at all. SystemExit where something lies there."""
    with locked(out):
        if out.exists():
            sys.exit(f"--out {out}: exists. Remove it, or choose another folder.")
        work, started = partial_folder(out), time.monotonic()
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        try:
            columns, labels = [ZipfColumn(k, exponent) for k in cardinalities], Labels(seed)
            splits = {"train": rows, "validation": 0, "test": test_rows}
            positives = {
                split: write_split(work / split / "part-00000.parquet", n, columns, labels, (seed, number))
                for number, (split, n) in enumerate(splits.items())
            }
            sparse = tuple(SparseColumn(f"C{i + 1}", k) for i, k in enumerate(cardinalities))
            settings = {"cardinalities": list(cardinalities), "exponent": exponent, "rows": rows, "seed": seed}
            report = {"rows": splits, "positives": positives, "table_rows": sum(cardinalities)}
            dense = tuple(f"I{i + 1}" for i in range(DENSE))
            made_from = {"kind": "zipf", **settings}
            save_schema(work, DatasetSchema(dense, sparse, splits, None, made_from, report))
            work.rename(out)
        except BaseException:
            shutil.rmtree(work, ignore_errors=True)
            raise
    seconds = time.monotonic() - started
    print(f"{out}: {rows:,} + {test_rows:,} examples, tables of {sum(cardinalities):,} rows, {seconds:.1f} s")


def numbers(text: str) -> tuple[int, ...]:
    """Cardinalities as the command line gives them; 1e10 is a number too."""
    found = tuple(int(float(part)) if "e" in part else int(part) for part in text.split(","))
    if not all(0 < k < MOST_ROWS for k in found):
        raise argparse.ArgumentTypeError(f"{text}: expected numbers of rows from 1 to 2^40, separated by commas")
    return found


def main() -> None:
    """Read the command line, write the data set."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write, which must not exist")
    parser.add_argument("--rows", type=int, default=800_000, help="training examples (800,000)")
    parser.add_argument("--test-rows", type=int, default=20_000, help="test examples (20,000)")
    parser.add_argument("--exponent", type=float, default=1.2, help="skew of the ids; 0: even (1.2)")
    parser.add_argument("--seed", type=int, default=1)
    tables = parser.add_mutually_exclusive_group()
    tables.add_argument("--preset", choices=sorted(PRESETS), default="kaggle", help="tables (kaggle)")
    tables.add_argument("--cardinalities", type=numbers, metavar="A,B,...", help="rows of every table, up to 2^40")
    args = parser.parse_args()
    for name, value, least in (("rows", args.rows, 1), ("test-rows", args.test_rows, 1), ("seed", args.seed, 0)):
        if value < least:
            parser.error(f"--{name} {value}: expected at least {least}")
    if not 0 <= args.exponent <= 10:
        parser.error(f"--exponent {args.exponent:g}: expected a number from 0 (even) to 10")
    cardinalities = args.cardinalities or PRESETS[args.preset]
    write(args.out, cardinalities, args.rows, args.test_rows, args.exponent, args.seed)


if __name__ == "__main__":
    main()
