"""A profile measured on real ranks is one that plans can use; what was not measured is not in it."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hetrain.config import ClusterConfig
from hetrain.engine.bag_step import bag_step
from hetrain.errors import TrainingError
from hetrain.planner import calibrate, calibrate_pieces
from hetrain.planner.machines import machines_of
from hetrain.ranks import Ranks
from tests.ranks import run_ranks


def measured(rank: int, world_size: int, file: str) -> None:
    """Few sizes, far apart."""
    calibrate.LOOKUPS, calibrate.MESSAGES = ((64, 16, 1), (4096, 128, 10)), (1 << 12, 1 << 23)  # type: ignore[assignment]
    calibrate.REPEATS = 3
    calibrate_pieces.TURNS = 1
    ranks = Ranks(rank, world_size, dist.group.WORLD)
    calibrate.calibrate(ranks, torch.device("cpu"), Path(file), bag_step)


def test_ranks_write_a_profile_that_plans_use(tmp_path: Path) -> None:
    file = tmp_path / "made" / "profile.json"
    run_ranks(2, measured, str(file))
    held = json.loads(file.read_text())
    assert (held["device"], held["nodes"], held["ranks_per_node"]) == ("cpu", 1, 2)
    assert set(held["measured"]) == {"lookups", "exchange within a machine", "sum of dense gradients"}
    assert all(len(series["points"]) == 2 for series in held["measured"].values())
    cluster = machines_of(ClusterConfig(device="cpu", profile=str(file))).cluster
    assert {key: getattr(cluster, key) for key in held["speeds"]} == held["speeds"]
    assert cluster.piece_costs.to_json() == held["piece_costs"]
    assert any(held["piece_costs"].values())
    assert all(value > 0 for key, value in held["speeds"].items() if key != "latency_us")


def test_speeds_are_those_that_were_measured() -> None:
    def series(what: str, gb_s: float) -> calibrate.Series:
        times = (0.5 + 1 / gb_s, 0.5 + 2 / gb_s)
        return calibrate._fitted(what, [1e6, 2e6], list(times))

    found = [series("lookups", 5.0), series("exchange within a machine", 2.0), series("exchange of all", 0.25)]
    made = calibrate.profile([*found, series("sum of dense gradients", 8.0)], "cpu", 8, 4)
    expected = {"ddr_gb_s": 5.0, "intra_gb_s": 2.0, "latency_us": 500.0, "inter_gb_s": 0.25}
    assert made["speeds"] == pytest.approx(expected)
    assert made["nodes"] == 2
    one = calibrate.profile([*found[:2], series("sum of dense gradients", 8.0)], "cuda", 4, 4)
    assert one["speeds"] == pytest.approx({"hbm_gb_s": 5.0, "intra_gb_s": 2.0, "latency_us": 500.0, "inter_gb_s": 2.0})
    with pytest.raises(TrainingError, match="the times of the lookups do not grow with their size"):
        calibrate._fitted("lookups", [1e6, 2e6], [2.0, 1.0])
