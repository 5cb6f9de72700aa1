"""How evenly the owners of a store are asked for rows: blocks of equal rows against ranges of equal lookups.

    python benchmarks/uneven_rows.py --preset prototype --owners 4 --exponent 1.1

Tables of Zipf ids (benchmarks/zipf_data.py). `ordered`: an id is its rank, the hottest first, as vocabularies by count
have them; `spread`: ranks spread over the table, as hashed ids are. Plans, made from one sample of batches and measured
on another; the first, third and fourth cut every table of at least `--smallest` rows over all owners:

    blocks        block k of every cut table on owner k, as row-wise sharding has it
    hierarchical  planner=hierarchical with the sample's skew, as `hetrain stats` measures it
    lookups       ranges of equal lookups, the largest load first to the owner with least
    distinct      the same by the distinct rows of a batch, which are what travels

An owner's share is counted by the store's own placement of the rows.
"""

import argparse
import json
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.zipf_data import PRESETS, ZipfColumn, permuted, spread_by
from hetrain.planner.cluster import GIB, Cluster
from hetrain.planner.measured import skew_of
from hetrain.planner.options import Options
from hetrain.planner.piece import Piece
from hetrain.planner.plan import Plan
from hetrain.planner.strategies import make_plan
from hetrain.planner.workload import TableLoad
from hetrain.stats.spectrum import Spectrum
from hetrain.store.space import Placement, RowSpace
from hetrain.tables import Table

QUANTILES = 256  # as in stats.json
Ids = NDArray[np.int64]


class Column:
    """Draws ids of one table, in the order of their frequency or spread over it."""

    def __init__(self, rows: int, exponent: float, *, spread: bool) -> None:
        self.rows, self._zipf, self._spread = rows, ZipfColumn(rows, exponent), spread

    def draw(self, rng: np.random.Generator, n: int) -> Ids:
        """[n] ids."""
        ranks = self._zipf.ranks(rng, n)
        return permuted(ranks, spread_by(self.rows), self.rows) if self._spread else ranks


def quantiles(ids: Ids, rows: int) -> list[int]:
    """The rows below which k / QUANTILES of `ids` lie, with the first row and the number of rows at the ends."""
    inner = np.sort(ids)[np.arange(1, QUANTILES) * len(ids) // QUANTILES]
    return [0, *inner.tolist(), rows]


def ranges_of(ids: Ids, rows: int, parts: int) -> list[int]:
    """Boundaries between which equal shares of `ids` lie; no range is empty."""
    bounds = [0]
    for k, row in enumerate(np.sort(ids)[np.arange(1, parts) * len(ids) // parts], start=1):
        bounds.append(min(max(int(row), bounds[-1] + 1), rows - (parts - k)))
    return [*bounds, rows]


def hierarchical(tables: Sequence[Table], lookups: Sequence[Ids], owners: int, batch: int) -> Plan:
    """The strategy's plan for owners that are hosts of their own, by what these lookups say of the skew."""
    loads = []
    for table, ids in zip(tables, lookups, strict=True):
        groups = Spectrum.of(np.unique(ids, return_counts=True)[1]).coarse()
        pairs = list(zip(groups.ids.tolist(), groups.lookups.tolist(), strict=True))
        skew = skew_of({"spectrum": pairs, "row_quantiles": quantiles(ids, table.rows)})
        loads.append(TableLoad(table, (1.0,), skew=skew))
    cluster = Cluster("cpu", owners, 1, 0, 64 * GIB, 10.0, 10.0, 1.0, 1.25)
    options = Options(("table_wise", "row_wise"))
    return make_plan("hierarchical", loads, cluster, "store", batch, options).plan


def blocks(table: Table, owners: int, *, cut: bool) -> list[int]:
    """Boundaries of blocks of ceil(rows / owners), or of the whole table."""
    block = -(-table.rows // owners) if cut else table.rows
    return [*range(0, table.rows, block), table.rows]


def plan_of(tables: Sequence[Table], bounds: Sequence[list[int]], loads: Sequence[Ids], owners: int) -> Plan:
    """Pieces at the bounds, the largest load first to the owner with least; blocks of all owners stay in order."""
    weighed = []
    for table, cuts, ids in zip(tables, bounds, loads, strict=True):
        counts = np.diff(np.searchsorted(np.sort(ids), cuts))
        weighed += [(int(n), table, k, cuts) for k, n in enumerate(counts)]
    held, pieces = np.zeros(owners), []
    in_order = [len(cuts) == owners + 1 and cuts == blocks(t, owners, cut=True) for _, t, _, cuts in weighed]
    order = sorted(range(len(weighed)), key=lambda i: (not in_order[i], -weighed[i][0]))
    for i in order:
        load, table, k, cuts = weighed[i]
        rank = k if in_order[i] else int(np.argmin(held))
        held[rank] += load
        pieces.append(Piece(table.name, rank, cuts[k], cuts[k + 1] - cuts[k], 0, table.dim))
    plan = Plan("store", owners, tuple(pieces), frozenset(), {t.name: "row_wise" for t in tables})
    plan.check(tables)
    return plan


def asked(plan: Plan, space: RowSpace, batches: Sequence[Sequence[Ids]]) -> dict[str, float]:
    """Max / mean over owners of lookups, of distinct rows per batch, and of rows held."""
    placement = Placement(space, plan, plan.world_size)
    lookups, distinct = np.zeros(plan.world_size), np.zeros(plan.world_size)
    for batch in batches:
        rows = np.concatenate([ids + offset for ids, offset in zip(batch, space.offsets, strict=True)])
        for counts, some in ((lookups, rows), (distinct, np.unique(rows))):
            owners = placement.owner_of(torch.from_numpy(some)).numpy()
            counts += np.bincount(owners, minlength=plan.world_size)
    held = np.array(placement.local_rows)
    return {
        name: round(float(counts.max() / counts.mean()), 3)
        for name, counts in (("lookups", lookups), ("distinct", distinct), ("rows", held))
    }


def measure(args: argparse.Namespace, *, spread: bool) -> None:
    """Print every plan's figures for one order of the ids."""
    rng = np.random.default_rng(args.seed)
    cardinalities = PRESETS[args.preset]
    tables = [Table(f"t{i}", rows, 16, (f"f{i}",), 0.1) for i, rows in enumerate(cardinalities)]
    columns = [Column(rows, args.exponent, spread=spread) for rows in cardinalities]
    cut = [rows >= max(args.smallest, args.owners) for rows in cardinalities]
    known = [[column.draw(rng, args.batch) for _ in range(args.steps)] for column in columns]
    lookups = [np.concatenate(ids) for ids in known]
    distinct = [np.concatenate([np.unique(batch) for batch in ids]) for ids in known]
    even = [blocks(t, args.owners, cut=c) for t, c in zip(tables, cut, strict=True)]
    plans = {
        "blocks": plan_of(tables, even, lookups, args.owners),
        "hierarchical": hierarchical(tables, lookups, args.owners, args.batch),
    }
    for name, loads in (("lookups", lookups), ("distinct", distinct)):
        ranges = [
            ranges_of(ids, t.rows, args.owners) if c else [0, t.rows]
            for t, ids, c in zip(tables, loads, cut, strict=True)
        ]
        plans[name] = plan_of(tables, ranges, loads, args.owners)
    batches = [[column.draw(rng, args.batch) for column in columns] for _ in range(args.steps)]
    space = RowSpace(tables, 16)
    for name, plan in plans.items():
        found = asked(plan, space, batches)
        print(json.dumps({"ids": "spread" if spread else "ordered", "plan": name, "max_over_mean": found}), flush=True)


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="prototype")
    parser.add_argument("--owners", type=int, default=4)
    parser.add_argument("--exponent", type=float, default=1.1)
    parser.add_argument("--batch", type=int, default=2048, help="examples of a worker's batch")
    parser.add_argument(
        "--steps", type=int, default=50, help="batches that boundaries come from, and as many to measure on"
    )
    parser.add_argument("--smallest", type=int, default=1000, help="rows from which a table is cut")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    for spread in (False, True):
        measure(args, spread=spread)


if __name__ == "__main__":
    main()
