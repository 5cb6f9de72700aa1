"""Table lists that planners are compared on: Merlin's synthetic models, Criteo, and a heavy-tailed one."""

import math
import random
from itertools import count

from hetrain.planner.workload import TableLoad
from hetrain.tables import Table

K, M, B = 10**3, 10**6, 10**9
# name: (bag length of the second input, tables read by a one-hot and that input, tables read by a one-hot)
MERLIN = {
    "tiny": (
        10,
        "1x10K x8, 1x1M x16, 1x25M x16",
        "1x25M x16, 16x10 x8, 10x1K x8, 4x10K x8, 2x100K x16, 19x1M x16",
    ),
    "small": (
        30,
        "5x10K x16, 3x4M x32, 1x50M x32",
        "1x50M x32, 30x10 x16, 30x1K x16, 5x10K x16, 5x100K x32, 27x4M x32",
    ),
    "medium": (
        50,
        "20x100K x64, 5x10M x64, 1x100M x128",
        "1x100M x128, 80x10 x32, 60x1K x32, 80x100K x64, 24x200K x64, 40x10M x64",
    ),
    "large": (
        100,
        "40x100K x64, 16x15M x64, 1x200M x128",
        "1x200M x128, 100x10 x32, 100x10K x32, 160x100K x64, 50x500K x64, 144x15M x64",
    ),
    "jumbo": (
        200,
        "50x100K x128, 24x20M x128, 1x400M x256",
        "1x400M x256, 100x10 x32, 200x10K x64, 350x100K x128, 80x1M x128, 216x20M x128",
    ),
    "colossal": (
        300,
        "100x100K x128, 50x40M x256, 1x2B x256",
        "1x1B x256, 100x10 x32, 400x10K x128, 100x100K x128, 800x1M x128, 450x40M x256",
    ),
}
KAGGLE = (
    "1460 583 10131227 2202608 305 24 12517 633 3 93145 5683 8351593 3194 27 14992 5461306 10 5652 2173 4 7046547 18 "
    "15 286181 105 142572"
)
# Criteo 1TB as MLPerf's DLRM-DCNv2 has it: rows up to 40M, and the bag lengths of its multi-hot data
DCNV2 = (
    "40000000:3 39060:2 17295:1 7424:2 20265:6 3:1 7122:1 1543:1 63:1 40000000:7 3067956:3 405282:8 10:1 2209:6 "
    "11938:9 155:5 4:1 976:1 14:1 40000000:12 40000000:100 40000000:27 590152:10 12973:3 108:1 36:1"
)
HEAVY_IDS = 887_017_990 / 65_536  # ids per sample of the published 856-table locality data


def workload(name: str) -> list[TableLoad]:
    """The tables of `name`: tiny ... colossal, kaggle, dcnv2, heavy856."""
    if name in MERLIN:
        bag, shared, alone = MERLIN[name]
        numbers = count()
        return [
            _load(next(numbers), rows, dim, poolings)
            for groups, poolings in ((shared, (1.0, float(bag))), (alone, (1.0,)))
            for tables, rows, dim in map(_group, groups.split(", "))
            for _ in range(tables)
        ]
    if name == "kaggle":
        return [_load(k, int(rows), 16, (1.0,)) for k, rows in enumerate(KAGGLE.split())]
    if name == "dcnv2":
        pairs = (entry.split(":") for entry in DCNV2.split())
        return [_load(k, int(rows), 128, (float(bag),)) for k, (rows, bag) in enumerate(pairs)]
    return _heavy()


def _group(words: str) -> tuple[int, int, int]:
    """`16x10K x8` as tables, rows, columns."""
    tables, rows, dim = words.replace(" x", "x").split("x")
    unit = {"K": K, "M": M, "B": B}.get(rows[-1], 1)
    return int(tables), int(rows.rstrip("KMB")) * unit, int(dim)


def _heavy() -> list[TableLoad]:
    """856 tables with log-normal rows and bag lengths: made up, but for their number and the ids of a sample."""
    draw = random.Random(7)
    rows = [int(min(40 * M, max(100, math.exp(draw.gauss(12.0, 2.4))))) for _ in range(856)]
    bags = [math.exp(draw.gauss(0.0, 1.6)) for _ in range(856)]
    scale = HEAVY_IDS / sum(bags)
    return [_load(k, r, 128, (round(b * scale, 3),)) for k, (r, b) in enumerate(zip(rows, bags, strict=True))]


def _load(number: int, rows: int, dim: int, poolings: tuple[float, ...]) -> TableLoad:
    name = f"t{number:04d}"
    return TableLoad(Table(name, rows, dim, tuple(f"{name}_{i}" for i in range(len(poolings))), 0.01), poolings)
