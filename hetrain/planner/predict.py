"""What any plan costs on every rank, whoever made it: each piece at the price of the cut it is of."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from hetrain.planner.bottleneck import TableHere, bottleneck
from hetrain.planner.cluster import Cluster
from hetrain.planner.cut import Cut
from hetrain.planner.plan import Plan
from hetrain.planner.planned import RankCost
from hetrain.planner.torchrec_prices import TorchRecPrices
from hetrain.planner.workload import TableLoad

BY_ROWS = ("row_wise", "table_row_wise", "grid_shard")


def predict(plan: Plan, loads: Sequence[TableLoad], cluster: Cluster, batch_size: int) -> tuple[RankCost, ...]:
    """The cost of a plan, checked already, per rank of `cluster`.

    A piece of all rows costs what a whole table of its columns would; one of a block of rows what its block does.
    """
    local, costs = cluster.ranks_per_node, cluster.piece_costs
    fixed = costs.types_ms(plan.sharding.values())
    sums: list[Counter[str]] = [Counter() for _ in range(cluster.world_size)]
    spent = [[0.0, 0.0] for _ in sums]
    for _, rank, rows, cut in _held(plan, loads, cluster, batch_size):
        sums[rank].update(hbm=cut.hbm, ddr=cut.ddr, rows=rows)
        spent[rank][0] += cut.compute_ms
        spent[rank][1] += cut.comm_ms
        fixed += cut.shared_ms / cut.width(cluster.world_size, local)
    return tuple(
        RankCost(rank, held["hbm"], held["ddr"], held["rows"], compute, comm, fixed)
        for rank, (held, (compute, comm)) in enumerate(zip(sums, spent, strict=True))
    )


def bottleneck_of(plan: Plan, loads: Sequence[TableLoad], cluster: Cluster, batch_size: int, slowest: RankCost) -> str:
    """What makes `slowest`, a cost that `predict` gave, slow, and what would move it, in words."""
    spent: defaultdict[str, float] = defaultdict(float)
    tiers: dict[str, str] = {}
    for load, holder, _, cut in _held(plan, loads, cluster, batch_size):
        if holder == slowest.rank:
            spent[load.table.name] += cut.cost
            tiers[load.table.name] = cut.tier
    return bottleneck(plan, slowest, {name: TableHere(spent[name], tiers[name]) for name in tiers}, cluster)


def _held(
    plan: Plan, loads: Sequence[TableLoad], cluster: Cluster, batch_size: int
) -> Iterator[tuple[TableLoad, int, int, Cut]]:
    """Table, rank, rows and price of everything that a rank holds."""
    prices = TorchRecPrices(cluster, batch_size)
    for load in loads:
        name = load.table.name
        if name in plan.replicated:
            (cut,) = prices.cuts(load, ("data_parallel",), (cluster.device_tier,))
            yield from ((load, rank, load.table.rows, cut) for rank in range(cluster.world_size))
            continue
        pieces = plan.of_table(name)
        cuts = {
            (columns, tier): _cut(prices, load, plan.sharding[name], columns, tier)
            for columns, tier in {(piece.columns, piece.tier) for piece in pieces}
        }
        yield from ((load, piece.rank, piece.rows, cuts[piece.columns, piece.tier]) for piece in pieces)


def _cut(prices: TorchRecPrices, load: TableLoad, kind: str, columns: int, tier: str) -> Cut:
    if kind not in BY_ROWS:
        return prices.cuts(load.strip(columns), ("table_wise",), (tier,))[0]
    if kind == "grid_shard":
        return next(cut for cut in prices.cuts(load, (kind,), (tier,)) if load.table.dim // cut.parts == columns)
    return prices.cuts(load, (kind,), (tier,))[0]
