"""What any plan costs on every rank, whoever made it: each piece at the price of the cut it is of."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from hetrain.planner.cluster import Cluster
from hetrain.planner.cut import Cut
from hetrain.planner.plan import Plan
from hetrain.planner.planned import RankCost
from hetrain.planner.torchrec_prices import TorchRecPrices
from hetrain.planner.workload import TableLoad

BY_ROWS = ("row_wise", "table_row_wise", "grid_shard")


def predict(plan: Plan, loads: Sequence[TableLoad], cluster: Cluster, batch_size: int) -> tuple[RankCost, ...]:
    """The cost of a plan for TorchRec, checked already, per rank of `cluster`.

    A piece of all rows costs what a whole table of its columns would; one of a block of rows what its block does.
    """
    prices = TorchRecPrices(cluster, batch_size)
    ranks = [_Rank() for _ in range(cluster.world_size)]
    for load in loads:
        name = load.table.name
        if name in plan.replicated:
            (cut,) = prices.cuts(load, ("data_parallel",), (cluster.device_tier,))
            for rank in ranks:
                rank.add(cut, load.table.rows)
            continue
        pieces = plan.of_table(name)
        cuts = {
            (columns, tier): _cut(prices, load, plan.sharding[name], columns, tier)
            for columns, tier in {(piece.columns, piece.tier) for piece in pieces}
        }
        for piece in pieces:
            ranks[piece.rank].add(cuts[piece.columns, piece.tier], piece.rows)
    return tuple(rank.cost(number) for number, rank in enumerate(ranks))


def _cut(prices: TorchRecPrices, load: TableLoad, kind: str, columns: int, tier: str) -> Cut:
    if kind not in BY_ROWS:
        whole = replace(load, table=replace(load.table, dim=columns))
        return prices.cuts(whole, ("table_wise",), (tier,))[0]
    if kind == "grid_shard":
        return next(cut for cut in prices.cuts(load, (kind,), (tier,)) if load.table.dim // cut.parts == columns)
    return prices.cuts(load, (kind,), (tier,))[0]


class _Rank:
    """Sums of one rank."""

    def __init__(self) -> None:
        self._sums: Counter[str] = Counter()
        self._ms = [0.0, 0.0]

    def add(self, cut: Cut, rows: int) -> None:
        self._sums.update(hbm=cut.hbm, ddr=cut.ddr, rows=rows)
        self._ms[0] += cut.compute_ms
        self._ms[1] += cut.comm_ms

    def cost(self, number: int) -> RankCost:
        sums = self._sums
        return RankCost(number, sums["hbm"], sums["ddr"], sums["rows"], *self._ms)
