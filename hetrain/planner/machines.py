"""The cluster that a config describes: its own numbers, else a measured profile's, else this machine's. No torch."""

import math
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetrain.config import ClusterConfig
from hetrain.errors import ConfigError
from hetrain.json_file import read_json, whole_number
from hetrain.planner.cluster import GIB, Cluster
from hetrain.planner.host_memory import host_memory
from hetrain.planner.piece_costs import NO_COSTS, PieceCosts

PROFILE = Path("plans") / "profile.json"  # where `hetrain plan --calibrate` writes, and what is read when it is there
SPEEDS = ("hbm_gb_s", "ddr_gb_s", "host_link_gb_s", "intra_gb_s", "inter_gb_s", "latency_us")
# GB/s and microseconds of common machines. A rank on a CPU shares its host's memory channels, and between processes of
# one host gloo moves about 1 GB/s; for GPUs the speeds that TorchRec takes for granted.
USUAL = {
    "cpu": dict(zip(SPEEDS, (0.0, 10.0, 1.0, 1.0, 1.25, 60.0), strict=True)),
    "cuda": dict(zip(SPEEDS, (897.0, 51.0, 32.0, 600.0, 12.5, 20.0), strict=True)),
}
USED = {"cpu": ("ddr_gb_s", "intra_gb_s", "inter_gb_s"), "cuda": SPEEDS[:-1]}  # in prices
NVIDIA = Path("/proc/driver/nvidia/gpus")  # one folder per GPU
LOCAL_RANKS = 2  # of a machine without GPUs
FORMAT = 2  # of a profile; one of format 1 has no costs of pieces
CONFIG, COMMON = "the config", "common machines of the kind"  # sources of speeds
PIECES = "piece_costs"


@dataclass(frozen=True)
class Machines:
    """The cluster, and where its numbers come from."""

    cluster: Cluster
    sources: Mapping[str, str]  # in words, of each of USED; of PIECES too, where a profile gives some
    servers: int = 0  # machines beside, which own rows alone
    one_rank: bool = False  # whether the profile is of one rank, which has exchanged nothing, and these are more


@dataclass(frozen=True)
class _Speeds:
    """All speeds of a cluster, its costs of pieces, and where they come from."""

    gb_s: Mapping[str, float]  # and microseconds
    piece_costs: PieceCosts
    sources: Mapping[str, str]
    one_rank: bool


def machines_of(cfg: ClusterConfig, memory_gib: float | None = None, nproc: int | None = None) -> Machines:
    """The cluster of `cfg`.

    memory_gib: `planner.memory_gib`, what tables may take of a rank's own memory whatever it has.
    nproc: `launch.nproc`, the ranks of a machine where `cfg` does not say.
    Raises ConfigError when a number is needed that neither `cfg` nor this machine gives.
    """
    gpus = len(list(NVIDIA.iterdir())) if NVIDIA.is_dir() else 0
    device = cfg.device or ("cuda" if gpus else "cpu")
    ranks = cfg.gpus_per_node or nproc or (gpus if device == "cuda" else 0) or LOCAL_RANKS
    speeds = _speeds(cfg, device)
    alone = (cfg.nodes or 1) * ranks == 1  # nothing is exchanged
    piece_costs = NO_COSTS if alone else speeds.piece_costs
    own = None if memory_gib is None else int(memory_gib * GIB)
    ddr = GIB * cfg.ddr_gib if cfg.ddr_gib is not None else host_memory()
    share = int(ddr * (1 - cfg.reserve)) // ranks
    if device == "cpu":
        hbm, share = 0, share if own is None else own
    else:
        hbm = own if own is not None else int(_hbm_gib(cfg) * (1 - cfg.reserve) * GIB)
    cluster = Cluster(device, cfg.nodes or 1, ranks, hbm, share, **speeds.gb_s, piece_costs=piece_costs)
    return Machines(cluster, speeds.sources, cfg.servers, speeds.one_rank and not alone)


def _hbm_gib(cfg: ClusterConfig) -> float:
    if cfg.hbm_gib is not None:
        return cfg.hbm_gib
    import torch

    if not torch.cuda.is_available():
        raise ConfigError(
            "cluster.hbm_gib=null: expected GiB of a GPU's memory with cluster.device=cuda, as this machine has no GPU "
            "to ask. Set it, or take a preset, as in cluster=dgx_a100."
        )
    return float(torch.cuda.get_device_properties(0).total_memory) / GIB


def _speeds(cfg: ClusterConfig, device: str) -> _Speeds:
    """The config's own speeds, each in place of the profile's; a profile in its usual place is of no preset's machine.

    A preset names its device. Without a word of it the ranks are this machine's, whatever speeds are tried for them.
    """
    given = {key: getattr(cfg, key) for key in SPEEDS if getattr(cfg, key) is not None}
    file = Path(cfg.profile) if cfg.profile is not None else PROFILE
    there = cfg.profile is not None or (cfg.device is None and PROFILE.is_file())
    measured, piece_costs = read_profile(file, device, cfg.nodes or 1) if there else ({}, NO_COSTS)
    gb_s = {**USUAL[device], **measured, **given}
    gb_s["hbm_gb_s"] = gb_s["hbm_gb_s"] or gb_s["ddr_gb_s"]  # never used on a CPU
    sources = {key: CONFIG if key in given else str(file) if key in measured else COMMON for key in USED[device]}
    if piece_costs != NO_COSTS:
        sources[PIECES] = str(file)
    one_rank = there and not measured.keys() & {"intra_gb_s", "inter_gb_s"}
    return _Speeds(gb_s, piece_costs, sources, one_rank)


def read_profile(file: Path, device: str, nodes: int) -> tuple[dict[str, float], PieceCosts]:
    """What a profile of `hetrain plan --calibrate` measured; ConfigError when it is none, or of another device.

    One machine has not measured the speed between machines: for more of them it is left out. A profile of format 1, and
    one of a single rank, know no costs of pieces, so that prices are by bytes alone.
    """
    remedy = "Measure again with `hetrain plan --calibrate`, or leave cluster.profile out."
    try:
        held: dict[str, Any] = read_json(file)
        speeds = {key: float(value) for key, value in held["speeds"].items() if key in SPEEDS}
        if not all(0 <= speed < math.inf for speed in speeds.values()):
            raise ValueError(f"speeds {speeds}")
        if (version := whole_number(held.get("format", 1))) not in (1, FORMAT):
            raise ValueError(f"format {version}")
        piece_costs = NO_COSTS if version == 1 else PieceCosts.from_json(held["piece_costs"])
        measured_on, measured_nodes = str(held["device"]), whole_number(held["nodes"])
    except OSError as error:
        raise ConfigError(f"cluster.profile={file}: cannot be read ({error.strerror}). {remedy}") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"cluster.profile={file}: is no profile of hetrain ({error!r}). {remedy}") from error
    if measured_on != device:
        raise ConfigError(
            f"cluster.profile={file}: was measured on {measured_on}, this cluster's ranks are {device}. {remedy}"
        )
    if measured_nodes == 1 and nodes > 1:
        speeds.pop("inter_gb_s", None)
    return speeds, piece_costs


def check_replaceable(file: Path, device: str, nodes: int, ranks_per_node: int) -> None:
    """Raise ConfigError where `file` holds anything but an earlier profile of these machines and as many ranks."""
    if not file.exists():
        return
    other = "Name another file, as in cluster.profile=FILE, or remove that one."
    try:
        held = read_json(file)
        there = held["device"], whole_number(held["nodes"]), whole_number(held["ranks_per_node"])
        host = held.get("host", platform.node())  # profiles of before did not say
    except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{file}: is there and is no profile of hetrain ({error!r}). {other}") from error
    if there != (device, nodes, ranks_per_node):
        raise ConfigError(
            f"{file}: holds what {_ranks_in_words(*there)} measured, and this run has "
            f"{_ranks_in_words(device, nodes, ranks_per_node)}. {other}"
        )
    if host != platform.node():
        raise ConfigError(f"{file}: was measured on {host}, and this is {platform.node()}. {other}")


def _ranks_in_words(device: str, nodes: int, ranks_per_node: int) -> str:
    ranks = f"{ranks_per_node} {device} rank{'s' if ranks_per_node > 1 else ''}"
    return ranks if nodes == 1 else f"{nodes} machines of {ranks}"
