"""The machines a training run plans for: measured ones where it is this machine, a preset's where it names others."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hetrain.config.compose import compose, config_folders
from hetrain.planner.cluster import Cluster
from hetrain.planner.machines import NVIDIA, PROFILE, USUAL
from hetrain.planner.piece_costs import NO_COSTS, PieceCosts
from hetrain.planner.run_plan import _own_cluster
from hetrain.ranks import Ranks

COSTS = PieceCosts(type_us=800.0, piece_us=90.0)


def own(*words: str) -> Cluster:
    return _own_cluster(compose(words, config_folders(None)), Ranks(0, 2), torch.device("cpu"))


@pytest.mark.skipif(NVIDIA.is_dir(), reason="a run on the CPU of a machine with GPUs has no profile in its usual place")
def test_a_speed_leaves_the_profile_and_a_preset_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    PROFILE.parent.mkdir()
    speeds = {"ddr_gb_s": 7.0, "intra_gb_s": 3.0}
    held = {"format": 2, "device": "cpu", "nodes": 1, "speeds": speeds, "piece_costs": COSTS.to_json()}
    PROFILE.write_text(json.dumps(held))
    measured = own()
    assert (measured.ddr_gb_s, measured.intra_gb_s, measured.piece_costs) == (7.0, 3.0, COSTS)
    assert own("cluster.device=cpu") == measured
    assert own("cluster.intra_gb_s=0.5") == replace(measured, intra_gb_s=0.5)
    laptop = own("cluster=laptop")
    assert (laptop.ddr_gb_s, laptop.intra_gb_s, laptop.piece_costs) == (8.0, 1.0, NO_COSTS)
    other = own("cluster.device=cpu", "cluster.intra_gb_s=0.5")
    assert (other.ddr_gb_s, other.piece_costs) == (USUAL["cpu"]["ddr_gb_s"], NO_COSTS)
