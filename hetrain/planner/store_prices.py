"""What a table of the store costs its owners: distinct rows asked for in a step, sent, and updated.

Every worker asks for the distinct ids of its batch, once. An owner reads and updates those rows in its memory and
sends them and takes their gradients over its link. Where the skew is not known ids count as equally frequent, and all
misses of a cache: caches make every owner's work less, and that of hot rows most.
"""

import math
from itertools import pairwise

from hetrain.planner.cluster import Cluster
from hetrain.planner.cut import ALL, RANK, Cut
from hetrain.planner.workload import TableLoad

ID_BYTES = 8
PASSES = 3  # over a row's bytes: it is read, and read and written in its update
GRADIENT_PASSES = 4  # over a replicated table's gradient: cleared, read and written as it is summed, and looked through
BYTES_PER_MS = 1e6  # of 1 GB/s
MOST_RANGES = 64  # rows of a table are cut into at most, beside one for every rank


class StorePrices:
    """Prices whole tables and row ranges of equal lookups on the owners of a cluster."""

    def __init__(self, cluster: Cluster, batch_size: int, workers: int = 0) -> None:
        """`workers`: where the cluster is one of servers, how many ranks ask them; 0: its own ranks do."""
        self.cluster, self.batch_size, self._workers = cluster, batch_size, workers or cluster.world_size
        self._device = (cluster.hbm_gb_s if cluster.kind == "cuda" else cluster.ddr_gb_s) * BYTES_PER_MS
        others = cluster.world_size - 1
        within = cluster.ranks_per_node - 1
        # milliseconds per byte that an owner exchanges with the average worker; its own costs nothing
        self._per_byte = (
            within / (cluster.intra_gb_s * BYTES_PER_MS) + (others - within) / (cluster.inter_gb_s * BYTES_PER_MS)
        ) / max(1, cluster.world_size)
        if workers:
            self._per_byte = 1 / (cluster.inter_gb_s * BYTES_PER_MS)

    def cuts(
        self, load: TableLoad, kinds: tuple[str, ...], tiers: tuple[str, ...], columns: int | None = None
    ) -> list[Cut]:
        """Every cut of the sharding types given, in the owners' host memory; `columns` is for other engines."""
        del columns, tiers
        found = []
        for kind in kinds:
            if kind == "table_wise":
                found.append(self._ranges(load, kind, 1))
            elif kind == "data_parallel":
                found.append(self.replicated(load))
            elif kind == "row_wise":
                numbers = {2, 4, 8, 16, 32, MOST_RANGES, self.cluster.world_size}
                most = min(load.table.rows, self.cluster.world_size)
                parts = [n for n in sorted(numbers) if 1 < n <= most]
                found += [self._ranges(load, kind, n) for n in parts]
                if load.skew is not None and load.skew.row_quantiles:
                    found += [self._ranges(load, kind, n, even=True) for n in parts]
        return found

    def replicated(self, load: TableLoad) -> Cut:
        """The table whole on every worker, its gradients summed by a ring through all of them."""
        cluster, ranks = self.cluster, self.cluster.world_size
        size = load.elements * load.element_bytes
        link = cluster.intra_gb_s if cluster.nodes == 1 else cluster.inter_gb_s
        comm = 2 * size * (ranks - 1) / ranks / (link * BYTES_PER_MS)
        compute = (GRADIENT_PASSES * size + self._touched(load, ranks) * PASSES * load.row_bytes) / self._device
        held = load.table.rows * load.row_bytes + 2 * size
        hbm, ddr = (held, 0) if cluster.kind == "cuda" else (0, held)
        return Cut("data_parallel", cluster.device_tier, ALL, 1, compute, comm, hbm, ddr, hbm * ranks, ddr * ranks)

    def mean(self, load: TableLoad) -> float:
        """Milliseconds of the mean owner."""
        return self._ranges(load, "table_wise", 1).cost / self.cluster.world_size

    def _ranges(self, load: TableLoad, kind: str, parts: int, *, even: bool = False) -> Cut:
        """Ranges of equal lookups, or `even` ones of equal rows, which need least memory on a rank."""
        edges = row_edges(load, parts, even=even)
        share = 1 / parts
        if even and load.skew is not None:
            share = max(load.skew.share_below(b) - load.skew.share_below(a) for a, b in pairwise(edges))
        rows = self._asked(load) * share
        compute = rows * PASSES * load.row_bytes / (self.cluster.ddr_gb_s * BYTES_PER_MS)
        comm = rows * (2 * load.table.dim * load.element_bytes + ID_BYTES) * self._per_byte
        held = max(b - a for a, b in pairwise(edges)) * load.row_bytes
        return Cut(kind, "ddr", RANK, parts, compute, comm, 0, held, 0, load.table.rows * load.row_bytes, even)

    def _asked(self, load: TableLoad) -> float:
        """Rows that all workers ask for in a step."""
        return self._workers * self._touched(load, 1)

    def _touched(self, load: TableLoad, workers: int) -> float:
        """Distinct rows in the batches of `workers` of them, together."""
        lookups = load.pooling * self.batch_size * workers
        if load.skew is not None:
            return load.skew.unique_ids(lookups)
        rows = load.table.rows
        return rows * -math.expm1(lookups * math.log1p(-1 / rows)) if rows > 1 else 1.0


def row_edges(load: TableLoad, parts: int, *, even: bool = False) -> list[int]:
    """Rows at which ranges of about equal lookups begin, and the table's end; of equal rows if `even` or unknown skew.

    No range is empty: a row that alone takes more than its share gets a range of its own.
    """
    rows, skew = load.table.rows, load.skew
    edges = [rows * k // parts for k in range(parts + 1)]
    if skew is not None and skew.row_quantiles and not even:
        edges = [0, *(_row_at(skew.row_quantiles, k / parts) for k in range(1, parts)), rows]
    for k in range(1, parts):
        edges[k] = min(max(edges[k], edges[k - 1] + 1), rows - (parts - k))
    return edges


def _row_at(quantiles: tuple[int, ...], share: float) -> int:
    """The row below which `share` of the lookups lie, between the quantiles by straight lines."""
    at = share * (len(quantiles) - 1)
    low = min(int(at), len(quantiles) - 2)
    return round(quantiles[low] + (quantiles[low + 1] - quantiles[low]) * (at - low))
