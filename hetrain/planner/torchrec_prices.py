"""What a cut costs under TorchRec's own estimator (1.8.0), without its enumerator: the same milliseconds and bytes.

TorchRec prices a shard from its lookups, its width and four speeds. The formulas are re-stated here because its
enumerator makes millions of objects for large models; a test compares every figure with TorchRec's. Where a table's
skew is known, two things are priced better than TorchRec does: the fullest block of rows, and hits of a cached tier.
Where the cluster was measured, what pieces cost beside their bytes is kept apart from TorchRec's price (shared_ms).
"""

import math
from dataclasses import dataclass, replace

from hetrain.planner.cluster import Cluster
from hetrain.planner.cut import ALL, NODE, RANK, Cut, has_empty_block, strips, tiers_for
from hetrain.planner.workload import TableLoad

ID_BYTES = 8
CACHED_SHARE = 0.2  # of a cached table's bytes that TorchRec keeps in the device's memory
CACHE_STATE = 4 + CACHED_SHARE * 16  # bytes per row of such a cache's own state
SLOW_HOST = 10.0  # TorchRec divides the speed of rows read through the host by it
COPY, REPLICA_COPIES = 2.455, 9.22  # memory passes of a batched copy, and of a replicated table's update
BYTES_PER_MS = 1e6  # of 1 GB/s
FULL_BLOCK = 128  # columns at which a GPU block is full; under 64 it is a quarter full


@dataclass(frozen=True)
class _Asked:
    """What a step asks of a table, per rank's batch."""

    ids: float  # lookups
    bags: float  # pooled outputs
    element: int
    state: float  # optimizer bytes per byte of weights


class TorchRecPrices:
    """Prices every way TorchRec can cut a table on a cluster."""

    def __init__(self, cluster: Cluster, batch_size: int) -> None:
        self.cluster, self.batch_size = cluster, batch_size
        self._inter = cluster.inter_gb_s * BYTES_PER_MS
        self._intra = cluster.intra_gb_s * BYTES_PER_MS
        self._world = self._intra if cluster.nodes == 1 else self._inter
        self._device = (cluster.hbm_gb_s if cluster.kind == "cuda" else cluster.ddr_gb_s) * BYTES_PER_MS

    def cuts(
        self, load: TableLoad, kinds: tuple[str, ...], tiers: tuple[str, ...], columns: int | None = None
    ) -> list[Cut]:
        """Every cut of the sharding types and tiers given; `columns` fixes the width of column pieces."""
        found = self._torchrecs(load, kinds, tiers, columns)
        if not any(vars(self.cluster.piece_costs).values()):
            return found
        return [replace(cut, shared_ms=self._shared_ms(load, cut)) for cut in found]

    def _shared_ms(self, load: TableLoad, cut: Cut) -> float:
        """What a part costs every rank beside its bytes: each of its pieces gets ids of every rank's batch."""
        if cut.kind == "data_parallel":
            return 0.0
        pieces = cut.width(self.cluster.world_size, self.cluster.ranks_per_node)
        ids = load.pooling * self.batch_size * (pieces if cut.kind == "table_column_wise" else 1)  # rows share them out
        return self.cluster.piece_costs.part_ms(pieces, load.inputs, self.batch_size, ids)

    def _torchrecs(
        self, load: TableLoad, kinds: tuple[str, ...], tiers: tuple[str, ...], columns: int | None
    ) -> list[Cut]:
        """The cuts as TorchRec prices them."""
        asked = _Asked(
            load.pooling * self.batch_size,
            sum(min(1.0, p) for p in load.poolings) * self.batch_size,
            load.element_bytes,
            load.state_bytes_per_row / (load.table.dim * load.element_bytes),
        )
        rows, dim, local = load.table.rows, load.table.dim, self.cluster.ranks_per_node
        widths = [n for n in strips(dim) if columns is None or dim // n == columns]
        found: list[Cut] = []
        for kind in kinds:
            for tier in tiers_for(kind, tiers, self.cluster.device_tier):
                if kind == "data_parallel":
                    found.append(self._replicated(load, asked, tier))
                elif kind == "table_wise":
                    found.append(self._whole(load, asked, kind, tier, 1))
                elif kind == "column_wise":
                    found += [self._whole(load, asked, kind, tier, n) for n in widths if n <= self.cluster.world_size]
                elif kind == "table_column_wise":
                    found += [self._whole(load, asked, kind, tier, n) for n in widths if n == local]
                elif kind == "row_wise" and not has_empty_block(rows, self.cluster.world_size):
                    found.append(self._row_wise(load, asked, tier))
                elif kind == "table_row_wise" and not has_empty_block(rows, local):
                    found.append(self._node_rows(load, asked, kind, tier, 1))
                elif kind == "grid_shard" and not has_empty_block(rows, local):
                    found += [self._node_rows(load, asked, kind, tier, n) for n in widths if n <= self.cluster.nodes]
        return found

    def _speed(self, load: TableLoad, tier: str) -> float:
        """Bytes per ms at which a kernel reads rows."""
        link = self.cluster.host_link_gb_s * BYTES_PER_MS
        if tier == self.cluster.device_tier:
            return self._device
        if tier == "ddr":
            return link / SLOW_HOST
        hits = CACHED_SHARE if load.skew is None else max(CACHED_SHARE, load.skew.top_share(CACHED_SHARE))
        return (hits * self._device + (1 - hits) * link) / SLOW_HOST

    def _replicated(self, load: TableLoad, asked: _Asked, tier: str) -> Cut:
        cluster, dim = self.cluster, load.table.dim
        speed = self._device / 2  # no fused kernel
        forward = (math.ceil(asked.ids * ID_BYTES) + (asked.ids + asked.bags) * dim * asked.element) / speed
        size = load.elements * asked.element
        nodes = min(float(cluster.nodes), 2.0)
        reduce = size * (2 * nodes - 1) / nodes / (self._inter * cluster.ranks_per_node)
        if cluster.nodes > 2:
            reduce *= 2
        inputs, outputs = math.ceil(asked.ids * ID_BYTES), math.ceil(asked.bags * dim * asked.element)
        held = self._bytes(load, asked, load.table.rows, dim, tier, inputs + outputs)
        compute = 3 * forward + size * REPLICA_COPIES / speed
        return Cut(
            "data_parallel",
            tier,
            ALL,
            1,
            compute,
            reduce,
            *held,
            held[0] * cluster.world_size,
            held[1] * cluster.world_size,
        )

    def _whole(self, load: TableLoad, asked: _Asked, kind: str, tier: str, parts: int) -> Cut:
        """All rows on one rank, in `parts` strips of columns."""
        ranks, width = self.cluster.world_size, load.table.dim // parts
        outputs = asked.bags * ranks * width * asked.element
        read = asked.ids * ranks * max(width, 32) * asked.element
        inputs = math.ceil(asked.ids * ranks * ID_BYTES)
        penalty = 1.0 if width >= FULL_BLOCK else 1.15 if width >= FULL_BLOCK // 2 else 1.75
        compute = 3 * (inputs + read + outputs) * penalty / self._speed(load, tier)
        held = self._bytes(load, asked, load.table.rows, width, tier, inputs + math.ceil(outputs))
        place, count = (NODE, 1) if kind == "table_column_wise" else (RANK, parts)
        total = (held[0] * parts, held[1] * parts)
        return Cut(kind, tier, place, count, compute, 2 * outputs / self._world, *held, *total)

    def _row_wise(self, load: TableLoad, asked: _Asked, tier: str) -> Cut:
        ranks, dim = self.cluster.world_size, load.table.dim
        speed, outputs = self._speed(load, tier), asked.bags * ranks * dim * asked.element
        inputs = math.ceil(asked.ids / ranks * ranks * ID_BYTES)
        fullest = _fullest(load, ranks)
        compute = (3 * ((inputs + asked.ids * dim * asked.element) * fullest + outputs) + outputs * COPY) / speed
        held, total = self._blocks(load, asked, ranks, dim, tier, inputs + math.ceil(outputs))
        return Cut("row_wise", tier, ALL, 1, compute, 2 * outputs / self._world, *held, *total)

    def _node_rows(self, load: TableLoad, asked: _Asked, kind: str, tier: str, parts: int) -> Cut:
        """Rows cut over the ranks of a node; `parts` strips of columns may be on different nodes."""
        cluster, width = self.cluster, load.table.dim // parts
        ids = asked.ids / cluster.ranks_per_node * cluster.world_size
        speed, outputs = self._speed(load, tier), asked.bags * cluster.world_size * width * asked.element
        inputs = math.ceil(ids * ID_BYTES)
        fullest = _fullest(load, cluster.ranks_per_node)
        compute = (3 * ((inputs + ids * width * asked.element) * fullest + outputs) + outputs * COPY) / speed
        between = asked.bags * cluster.nodes * width * asked.element / self._inter if cluster.nodes > 1 else 0.0
        buffers = inputs + math.ceil(outputs)
        held, total = self._blocks(load, asked, cluster.ranks_per_node, width, tier, buffers)
        comm = 2 * (outputs / self._intra + between)
        return Cut(kind, tier, NODE, parts, compute, comm, *held, total[0] * parts, total[1] * parts)

    def _blocks(
        self, load: TableLoad, asked: _Asked, ranks: int, width: int, tier: str, buffers: int
    ) -> tuple[tuple[int, int], tuple[int, int]]:
        """Bytes of the largest block of rows, and of all `ranks` blocks."""
        block = -(-load.table.rows // ranks)
        first = self._bytes(load, asked, block, width, tier, buffers)
        last = self._bytes(load, asked, load.table.rows - block * (ranks - 1), width, tier, buffers)
        return first, (first[0] * (ranks - 1) + last[0], first[1] * (ranks - 1) + last[1])

    def _bytes(self, load: TableLoad, asked: _Asked, rows: int, width: int, tier: str, buffers: int) -> tuple[int, int]:
        """(hbm, ddr) bytes of a piece with its optimizer state and the batch's buffers."""
        weights = rows * width * asked.element
        held = weights + math.ceil(weights * asked.state)
        if self.cluster.kind == "cpu":
            return 0, held + buffers
        if tier == "hbm":
            return held + buffers, 0
        if tier == "ddr":
            return buffers, held
        whole = load.elements * asked.element
        cache = math.ceil(round(whole * CACHED_SHARE) * (rows * width) / load.elements)
        cache += math.ceil(cache * asked.state) + math.ceil(rows * CACHE_STATE)
        return cache + buffers, held


def _fullest(load: TableLoad, ranks: int) -> float:
    """Lookups of the fullest of equal blocks of rows, over the mean; 1 where the skew is not known."""
    if load.skew is None or not load.skew.row_quantiles:
        return 1.0
    block = -(-load.table.rows // ranks)
    return ranks * max(load.skew.share_below((k + 1) * block) - load.skew.share_below(k * block) for k in range(ranks))
