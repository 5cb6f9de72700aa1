"""Our prices are TorchRec's own, figure by figure, for every sharding type, kernel and kind of cluster."""

import pytest
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.types import ParameterConstraints

from hetrain.planner.cluster import GIB, Cluster
from hetrain.planner.piece import SHARDING_TYPES, TIERS
from hetrain.planner.torchrec_planner import meta_bags
from hetrain.planner.torchrec_prices import BYTES_PER_MS, TorchRecPrices
from hetrain.planner.workload import Skew, TableLoad
from hetrain.tables import Table

STATE_BYTES = {"sgd": lambda dim: 0, "adagrad": lambda dim: 4 * dim, "rowwise_adagrad": lambda dim: 4}
KERNEL = {"hbm": "fused", "cached": "fused_uvm_caching", "ddr": "fused_uvm"}
SHAPES = [(1000, 16, (1.0,)), (1003, 64, (1.0, 30.0)), (100_000, 128, (0.4,)), (999_999, 256, (20.0, 1.5))]


class EverySharder(EmbeddingBagCollectionSharder):
    def sharding_types(self, compute_device_type):
        return list(SHARDING_TYPES)


def loads(optimizer="sgd"):
    found = []
    for k, (rows, dim, poolings) in enumerate(SHAPES):
        table = Table(f"t{k}", rows, dim, tuple(f"t{k}_{i}" for i in range(len(poolings))), 0.01)
        found.append(TableLoad(table, poolings, state_bytes_per_row=STATE_BYTES[optimizer](dim)))
    return found


def cluster(kind="cuda", nodes=2, local=4):
    memory = (80 * GIB, 200 * GIB) if kind == "cuda" else (0, 200 * GIB)
    return Cluster(kind, nodes, local, *memory, 963.1, 54.7, 640.0, 13.4, host_link_gb_s=34.4)


def topology(c):
    speeds = {
        name: gb_s * BYTES_PER_MS
        for name, gb_s in {
            "hbm_mem_bw": c.hbm_gb_s,
            "ddr_mem_bw": c.ddr_gb_s,
            "hbm_to_ddr_mem_bw": c.host_link_gb_s,
            "intra_host_bw": c.intra_gb_s,
            "inter_host_bw": c.inter_gb_s,
        }.items()
    }
    caps = {"ddr_cap": c.ddr_bytes} | ({"hbm_cap": c.hbm_bytes} if c.kind == "cuda" else {})
    return Topology(c.world_size, c.kind, local_world_size=c.ranks_per_node, **caps, **speeds)


def torchrec_options(tables, optimizer, c, batch_size, strips=1, columns=None):
    constraints = {
        load.table.name: ParameterConstraints(
            sharding_types=list(SHARDING_TYPES),
            pooling_factors=list(load.poolings),
            min_partition=columns or load.table.dim // strips,
        )
        for load in tables
    }
    enumerator = EmbeddingEnumerator(topology(c), batch_size, constraints)
    return enumerator.enumerate(meta_bags([load.table for load in tables], optimizer), [EverySharder()])


@pytest.mark.parametrize(
    ("kind", "nodes", "local", "optimizer", "strips"),
    [
        ("cuda", 1, 4, "sgd", 2),
        ("cuda", 2, 4, "rowwise_adagrad", 4),
        ("cuda", 4, 2, "adagrad", 2),
        ("cpu", 2, 2, "sgd", 2),
    ],
)
def test_prices_and_bytes_are_torchrecs(kind, nodes, local, optimizer, strips):
    c, tables = cluster(kind, nodes, local), loads(optimizer)
    prices = TorchRecPrices(c, 512)
    cuts = {
        (load.table.name, cut.kind, "fused" if kind == "cpu" else KERNEL[cut.tier]): cut
        for load in tables
        for cut in prices.cuts(load, SHARDING_TYPES, TIERS, load.table.dim // strips)
    }
    compared = set()
    for option in torchrec_options(tables, optimizer, c, 512, strips):
        kernel = {"dense": "fused"}.get(option.compute_kernel, option.compute_kernel)
        cut = cuts.get((option.name, option.sharding_type, kernel))
        if cut is None:
            continue
        compared.add((option.sharding_type, kernel))
        for shard in option.shards:
            assert cut.cost == pytest.approx(shard.perf.total, rel=1e-9), (option.name, option.sharding_type, kernel)
            assert (cut.hbm, cut.ddr) >= (shard.storage.hbm, shard.storage.ddr)
        first, held = option.shards[0].storage, [shard.storage for shard in option.shards]
        assert (cut.hbm, cut.ddr) == (first.hbm, first.ddr), (option.name, option.sharding_type, kernel)
        assert (cut.hbm_total, cut.ddr_total) == (sum(s.hbm for s in held), sum(s.ddr for s in held))
    kernels = list(KERNEL.values()) if kind == "cuda" else ["fused"]
    wanted = {(k, kernel) for k in SHARDING_TYPES for kernel in kernels} - {("data_parallel", k) for k in kernels[1:]}
    left_out = {"grid_shard"} if nodes < strips else set()
    left_out |= {"table_column_wise"} if local != strips else set()
    assert compared == {(k, kernel) for k, kernel in wanted if k not in left_out}


def test_skew_makes_the_fullest_block_and_the_cache_dearer_or_cheaper():
    (load,) = [x for x in loads() if x.table.name == "t3"]
    even = Skew(((512.0, 500.0),), ((0.2, 0.2),), (0, 500_000, 999_999))
    hot = Skew(((512.0, 90.0),), ((0.2, 0.9),), (0, 1000, 999_999))
    prices = TorchRecPrices(cluster(), 512)

    def cost(skew, kind, tier):
        asked = TableLoad(load.table, load.poolings, skew=skew)
        (cut,) = prices.cuts(asked, (kind,), (tier,))
        return cut.cost

    for kind, tier in [("row_wise", "hbm"), ("table_row_wise", "hbm"), ("table_wise", "cached")]:
        assert cost(even, kind, tier) == pytest.approx(cost(None, kind, tier), rel=1e-4)
    assert cost(hot, "row_wise", "hbm") > cost(None, "row_wise", "hbm")
    assert cost(hot, "table_wise", "cached") < cost(None, "table_wise", "cached")
    assert cost(hot, "table_wise", "hbm") == cost(None, "table_wise", "hbm")
