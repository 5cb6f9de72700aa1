"""`hetrain plan --calibrate`: times what a plan's cost is made of on the ranks of this run, and fits the speeds to it.

Measured with all ranks at it at once, as in training: fused lookups with their backward and update, the exchange of
pooled embeddings, the sum of dense gradients. A speed is what makes the cost model (TorchRecPrices) give these times.
What pieces and sharding types cost beside their bytes comes from whole steps (calibrate_pieces.py), at these speeds.
"""

import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice, SplitTableBatchedEmbeddingBagsCodegen

from hetrain.errors import TrainingError
from hetrain.planner.calibrate_pieces import MakeStep, measure_pieces
from hetrain.planner.cluster import GIB, Cluster
from hetrain.planner.fit import line, relative_error
from hetrain.planner.kept_profile import keep
from hetrain.planner.machines import FORMAT, USUAL, check_replaceable
from hetrain.planner.piece_costs import NO_COSTS, PieceCosts
from hetrain.planner.torchrec_prices import BYTES_PER_MS, TorchRecPrices
from hetrain.planner.workload import TableLoad
from hetrain.ranks import Ranks
from hetrain.tables import Table

LOOKUPS = ((512, 16, 1), (2048, 16, 10), (2048, 64, 1), (4096, 64, 4), (4096, 128, 1), (2048, 128, 10))  # B, D, pooling
ROWS = 200_000  # of the table looked up: far more than caches of a core hold
MESSAGES = tuple(1 << n for n in (12, 14, 16, 18, 20, 22, 24))  # bytes that a rank sends, to all others together
REPEATS = 15


@dataclass(frozen=True)
class Series:
    """One kind of work: `sizes` in bytes, `times` in ms of the slowest rank, the line fitted to them."""

    what: str
    sizes: tuple[float, ...]
    times: tuple[float, ...]
    start_ms: float
    gb_s: float

    def to_json(self) -> dict[str, Any]:
        """As the profile keeps it."""
        points = [{"bytes": size, "ms": ms} for size, ms in zip(self.sizes, self.times, strict=True)]
        return {"start_ms": self.start_ms, "gb_s": self.gb_s, "points": points, "error": self.error}

    @property
    def error(self) -> float:
        """The median relative error of the line."""
        return relative_error(self.start_ms, 1 / (self.gb_s * BYTES_PER_MS), self.sizes, self.times)


def calibrate(ranks: Ranks, device: torch.device, file: Path, make_step: MakeStep) -> None:
    """Measure on all ranks and let the first write the profile and say what it found. Collective.

    `make_step`: makes a step of the engine that trains by TorchRec's plans. Raises ConfigError, before anything is
    measured, where `file` holds the profile of others.
    """
    local = int(os.environ.get("LOCAL_WORLD_SIZE", ranks.world_size))
    nodes = ranks.world_size // local
    ranks.together(lambda: check_replaceable(file, device.type, nodes, local) if ranks.first else None)
    found = [_fitted("lookups", *_lookups(ranks, device))]
    if not ranks.alone:
        node = None if local == ranks.world_size else dist.new_subgroups(local)[0]
        if local > 1:
            found.append(_fitted("exchange within a machine", *_exchanges(ranks, device, node, local)))
        if local < ranks.world_size:
            found.append(_fitted("exchange of all", *_exchanges(ranks, device, None, ranks.world_size)))
        found.append(_fitted("sum of dense gradients", *_sums(ranks, device)))
    speeds = _speeds(found, device.type, local)
    costs, off = NO_COSTS, 0.0
    if not ranks.alone:
        all_speeds = {**USUAL[device.type], "hbm_gb_s": speeds.get("ddr_gb_s", 0.0), **speeds}
        cluster = Cluster(device.type, nodes, local, GIB, GIB, **all_speeds, piece_costs=NO_COSTS)
        costs, off = measure_pieces(ranks, device, cluster, make_step)
    if not ranks.first:
        return
    for series in found:
        print(f"{series.what:<28}{series.gb_s:>9.3f} GB/s, {series.start_ms * 1000:,.0f} us to begin with ", end="")
        print(f"({len(series.times)} sizes, off by {series.error:.0%})")
    if not ranks.alone:
        print(_in_words(costs, off))
    print(keep(file, profile(found, device.type, ranks.world_size, local, costs, off)))


def profile(
    found: list[Series], device: str, world_size: int, local: int, costs: PieceCosts = NO_COSTS, off: float = 0.0
) -> dict[str, Any]:
    """The profile: speeds as `cluster.*` has them, what they were fitted to, and what pieces cost beside bytes.

    `off`: how far the steps that gave `costs` are from them.
    """
    return {
        "format": FORMAT,
        "host": platform.node(),
        "device": device,
        "nodes": world_size // local,
        "ranks_per_node": local,
        "speeds": _speeds(found, device, local),
        "piece_costs": costs.to_json(),
        "pieces_error": off,
        "measured": {series.what: series.to_json() for series in found},
    }


def _in_words(costs: PieceCosts, off: float) -> str:
    return (
        f"{'pieces':<28}{costs.piece_us:>9,.0f} us each, {costs.bag_ns:,.0f} ns per example, {costs.id_ns:,.0f} ns per "
        f"id (steps off by {off:.0%})\n"
        f"{'sharding types':<28}{costs.type_us:>9,.0f} us each, replicated tables {costs.replicas_us:,.0f} us"
    )


def _speeds(found: list[Series], device: str, local: int) -> dict[str, float]:
    by_name = {series.what: series for series in found}
    speeds = {"hbm_gb_s" if device == "cuda" else "ddr_gb_s": by_name["lookups"].gb_s}
    exchange = by_name.get("exchange within a machine")
    if exchange is not None:
        speeds |= {"intra_gb_s": exchange.gb_s, "latency_us": exchange.start_ms * 1000}
    if "exchange of all" in by_name:
        speeds["inter_gb_s"] = by_name["exchange of all"].gb_s
    elif "sum of dense gradients" in by_name:
        # On one machine the cost model takes this speed for nothing but replicated tables, a part of it for each rank.
        speeds["inter_gb_s"] = by_name["sum of dense gradients"].gb_s / local
    return speeds


def _fitted(what: str, sizes: list[float], times: list[float]) -> Series:
    start, slope = line(sizes, times)
    if not slope:
        raise TrainingError(
            f"--calibrate: the times of the {what} do not grow with their size, so something else used this machine "
            "meanwhile. Measure again when it is idle."
        )
    return Series(what, tuple(sizes), tuple(times), start, 1 / (slope * BYTES_PER_MS))


def _lookups(ranks: Ranks, device: torch.device) -> tuple[list[float], list[float]]:
    """Bytes as the cost model counts them, and times."""
    tier = "hbm" if device.type == "cuda" else "ddr"
    one = Cluster(device.type, 1, 1, GIB, GIB, 1.0, 1.0, 1.0, 1.0)
    sizes, times = [], []
    for batch, dim, pooling in LOOKUPS:
        load = TableLoad(Table("t", ROWS, dim, ("t",), 0.0), (float(pooling),))
        (cut,) = TorchRecPrices(one, batch).cuts(load, ("table_wise",), (tier,))
        sizes.append(cut.compute_ms * BYTES_PER_MS)
        times.append(_slowest_ms(ranks, device, _lookup(batch, dim, pooling, device)))
    return sizes, times


def _lookup(batch: int, dim: int, pooling: int, device: torch.device) -> Callable[[], object]:
    on_gpu = device.type == "cuda"
    place = (EmbeddingLocation.DEVICE, ComputeDevice.CUDA) if on_gpu else (EmbeddingLocation.HOST, ComputeDevice.CPU)
    kernel = SplitTableBatchedEmbeddingBagsCodegen(
        [(ROWS, dim, *place)],
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        stochastic_rounding=False,
        pooling_mode=PoolingMode.SUM,
        bounds_check_mode=BoundsCheckMode.NONE,
        device=device,
    )
    ids = torch.randint(ROWS, (batch * pooling,), device=device)
    offsets = torch.arange(0, len(ids) + 1, pooling, device=device)
    gradient = torch.full((batch, dim), 1e-3, device=device)
    return lambda: kernel(ids, offsets).backward(gradient)


def _exchanges(
    ranks: Ranks, device: torch.device, group: dist.ProcessGroup | None, among: int
) -> tuple[list[float], list[float]]:
    sizes, times = [], []
    for size in MESSAGES:
        sent = torch.ones(among * max(1, size // 4 // among), device=device)
        received = torch.empty_like(sent)
        sizes.append(float(sent.nbytes))
        times.append(_slowest_ms(ranks, device, partial(dist.all_to_all_single, received, sent, group=group)))
    return sizes, times


def _sums(ranks: Ranks, device: torch.device) -> tuple[list[float], list[float]]:
    sizes, times = [], []
    for size in MESSAGES:
        summed = torch.zeros(size // 4, device=device)
        sizes.append(float(summed.nbytes))
        times.append(_slowest_ms(ranks, device, partial(dist.all_reduce, summed)))
    return sizes, times


def _slowest_ms(ranks: Ranks, device: torch.device, work: Callable[[], object]) -> float:
    """The shortest over repeats of the slowest rank's time: what others make longer says nothing of this cluster."""
    times: list[float] = []
    for _ in range(REPEATS + 1):
        if not ranks.alone:
            dist.barrier(ranks.group)
        begun = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(max(ranks.gather((time.perf_counter() - begun) * 1000)))
    return min(times[1:])  # the first warms up
