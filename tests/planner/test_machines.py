"""The cluster of a config: its numbers, a profile's, this machine's; and speeds fitted to times."""

import json
import math
import platform
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetrain.config import ClusterConfig
from hetrain.config.compose import compose, config_folders, group_options
from hetrain.errors import ConfigError
from hetrain.launch.rank_environment import check_machines
from hetrain.planner.cluster import GIB
from hetrain.planner.fit import line, relative_error
from hetrain.planner.host_memory import host_memory
from hetrain.planner.machines import PROFILE, USUAL, check_replaceable, machines_of
from hetrain.planner.piece_costs import PieceCosts
from hetrain.planner.report import speeds_text
from hetrain.roles import Roles


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def profile(file: Path, nodes: int = 1, device: str = "cpu") -> Path:
    file.parent.mkdir(exist_ok=True)
    speeds = {"ddr_gb_s": 7.0, "intra_gb_s": 3.0, "inter_gb_s": 0.5, "latency_us": 40.0}
    file.write_text(json.dumps({"device": device, "nodes": nodes, "speeds": speeds}))
    return file


def test_every_preset_is_a_cluster() -> None:
    folders = config_folders(None)
    for name in group_options("cluster", folders):
        cfg = compose([f"cluster={name}", "cluster.device=cpu", "cluster.nodes=3"], folders).cluster
        assert machines_of(cfg).cluster.nodes == 3
    cluster = machines_of(compose(["cluster=dgx_a100"], folders).cluster).cluster
    assert (cluster.kind, cluster.world_size, cluster.hbm_bytes) == ("cuda", 8, 68 * GIB)
    assert cluster.ddr_bytes == int(2048 * 0.85 * GIB) // 8


@pytest.mark.parametrize("speed", [0.0, 1e-320, 1e-9, math.nan])
def test_speeds_of_which_prices_would_be_infinite_are_refused(speed: float) -> None:
    """plan.json is JSON, which has no Infinity: a plan with such prices could not be read again."""
    machines_of(ClusterConfig(device="cuda", nodes=2, hbm_gib=1, inter_gb_s=1e-6))
    with pytest.raises(ConfigError, match=r"cluster\.inter_gb_s=.*: expected a speed above 0 GB/s, 1e-06 at least"):
        machines_of(ClusterConfig(device="cuda", nodes=2, hbm_gib=1, inter_gb_s=speed))


def test_this_machine_is_measured_where_nothing_is_said() -> None:
    cluster = machines_of(ClusterConfig(device="cpu"), nproc=4).cluster
    assert (cluster.nodes, cluster.ranks_per_node, cluster.hbm_bytes) == (1, 4, 0)
    assert cluster.ddr_bytes == int(host_memory() * 0.85) // 4
    assert machines_of(ClusterConfig(device="cpu"), memory_gib=0.5).cluster.ddr_bytes == GIB // 2
    with pytest.raises(ConfigError, match=r"cluster\.hbm_gib=null: expected GiB of a GPU's memory"):
        machines_of(ClusterConfig(device="cuda"))


def test_a_profile_gives_the_speeds_that_the_config_leaves_open(tmp_path: Path) -> None:
    file = profile(tmp_path / "p.json")
    found = machines_of(ClusterConfig(device="cpu", profile=str(file), intra_gb_s=9.0))
    assert (found.cluster.ddr_gb_s, found.cluster.intra_gb_s, found.cluster.inter_gb_s) == (7.0, 9.0, 0.5)
    measured, config = str(file), "the config"
    assert found.sources == {"ddr_gb_s": measured, "intra_gb_s": config, "inter_gb_s": measured}
    more = machines_of(ClusterConfig(device="cpu", profile=str(file), nodes=2)).cluster
    assert more.inter_gb_s == machines_of(ClusterConfig(device="cpu")).cluster.inter_gb_s  # one machine cannot tell
    two = profile(file, nodes=2)
    assert machines_of(ClusterConfig(device="cpu", profile=str(two), nodes=2)).cluster.inter_gb_s == 0.5


def test_the_profile_in_its_usual_place_is_of_this_machine_alone() -> None:
    here = machines_of(ClusterConfig())
    assert set(here.sources.values()) == {"common machines of the kind"}
    profile(PROFILE, device=here.cluster.kind)
    assert machines_of(ClusterConfig()).sources["intra_gb_s"] == str(PROFILE)
    assert set(machines_of(ClusterConfig(device="cpu")).sources.values()) == {"common machines of the kind"}


def test_a_speed_of_the_config_leaves_the_rest_of_the_profile(tmp_path: Path) -> None:
    """One key once dropped costs and speeds measured here: a slower link made a faster plan."""
    kind, costs = machines_of(ClusterConfig()).cluster.kind, PieceCosts(type_us=800.0, piece_us=90.0)
    profile(PROFILE, device=kind)
    PROFILE.write_text(json.dumps(json.loads(PROFILE.read_text()) | {"format": 2, "piece_costs": costs.to_json()}))
    measured = machines_of(ClusterConfig(nodes=2, hbm_gib=1))
    slower = machines_of(ClusterConfig(nodes=2, hbm_gib=1, inter_gb_s=0.25))
    assert measured.cluster.piece_costs == costs
    assert slower.cluster == replace(measured.cluster, inter_gb_s=0.25)
    usual = USUAL[kind]["inter_gb_s"]
    assert f"; {usual:g} GB/s between machines from common" in speeds_text(measured)
    assert "costs of pieces and sharding types from plans/profile.json" in speeds_text(slower)
    assert slower.sources == {**measured.sources, "inter_gb_s": "the config"}
    assert "0.25 GB/s between machines from the config" in speeds_text(slower)


def test_a_profile_of_one_rank_is_said_to_know_no_exchange(tmp_path: Path) -> None:
    file = tmp_path / "one.json"
    file.write_text(json.dumps({"device": "cpu", "nodes": 1, "speeds": {"ddr_gb_s": 7.0}}))
    cfg = ClusterConfig(device="cpu", profile=str(file), gpus_per_node=2)
    said = speeds_text(machines_of(cfg))
    assert said.startswith(
        f"7 GB/s ddr from {file}; 1 GB/s within a machine, 1.25 GB/s in sums of gradients from common"
    )
    assert "The profile is of one rank, which exchanged nothing: measure these ranks with" in said
    assert "--calibrate launch.nproc=2 cluster.profile=FILE`, in another file" in said
    assert "one rank" not in speeds_text(machines_of(replace(cfg, gpus_per_node=1)))
    assert "in sums of gradients and to servers" in speeds_text(machines_of(replace(cfg, servers=1)))


def test_profiles_that_are_none(tmp_path: Path) -> None:
    cfg = ClusterConfig(device="cpu", profile=str(tmp_path / "p.json"))
    with pytest.raises(ConfigError, match=r"p\.json: cannot be read .*hetrain plan --calibrate"):
        machines_of(cfg)
    wrong = ('"ddr_gb_s": "fast"', '"intra_gb_s": -1', '"intra_gb_s": 1e999', '"latency_us": NaN')
    speeds = [f'{{"device": "cpu", "nodes": 1, "speeds": {{{speed}}}}}' for speed in wrong]
    endless = '{"device": "cpu", "nodes": 1e999, "speeds": {}}'
    for text in ("{", "[]", "[" * 100_000, *speeds, endless):
        (tmp_path / "p.json").write_text(text)
        with pytest.raises(ConfigError, match=r"p\.json: is no profile of hetrain"):
            machines_of(cfg)
    profile(tmp_path / "p.json", device="cuda")
    with pytest.raises(ConfigError, match=r"was measured on cuda, this cluster's ranks are cpu"):
        machines_of(cfg)


def test_training_refuses_other_machines_than_its_own() -> None:
    four = Roles(5, 1)
    for nodes, ranks in [(None, None), (2, 2), (1, 4), (2, None), (None, 2)]:
        check_machines(ClusterConfig(nodes=nodes, gpus_per_node=ranks), four)
    with pytest.raises(
        ConfigError, match=r"cluster.nodes=2 x cluster.gpus_per_node=8: expected the machines .* 4 work"
    ):
        check_machines(ClusterConfig(nodes=2, gpus_per_node=8), four)
    with pytest.raises(ConfigError, match=r"cluster\.gpus_per_node=3: expected"):
        check_machines(replace(ClusterConfig(), gpus_per_node=3), four)


@given(start=st.floats(0, 5), slope=st.floats(1e-6, 1e-3), sizes=st.sets(st.integers(1, 1 << 24), min_size=2))
def test_a_line_is_found_again(start: float, slope: float, sizes: set[int]) -> None:
    x = sorted(sizes)
    times = [start + slope * size for size in x]
    assert relative_error(*line(x, times), x, times) < 1e-6


def test_a_fit_is_never_negative() -> None:
    start, slope = line([1, 2, 3], [1, 4, 9])
    assert start == 0
    assert slope > 0
    assert line([1, 2, 3], [3, 2, 1])[1] == 0


def test_a_profile_of_others_is_not_written_over(tmp_path: Path) -> None:
    file = tmp_path / "p.json"
    check_replaceable(file, "cpu", 1, 2)
    mine = {"device": "cpu", "nodes": 1, "ranks_per_node": 2}
    for held in (mine, {**mine, "host": platform.node()}):
        file.write_text(json.dumps(held))
        check_replaceable(file, "cpu", 1, 2)
    for shape, words in (
        (("cpu", 1, 1), "2 cpu ranks measured, and this run has 1 cpu rank"),
        (("cuda", 1, 2), "2 cpu ranks measured, and this run has 2 cuda ranks"),
        (("cpu", 2, 2), "2 cpu ranks measured, and this run has 2 machines of 2 cpu ranks"),
    ):
        with pytest.raises(ConfigError, match=rf"p\.json: holds what {words}\. Name another file"):
            check_replaceable(file, *shape)
    file.write_text(json.dumps({**mine, "host": "elsewhere"}))
    with pytest.raises(ConfigError, match="was measured on elsewhere, and this is "):
        check_replaceable(file, "cpu", 1, 2)
    for text in ("name,rows", "[]", '{"device": "cpu"}', '{"device": "cpu", "nodes": "1", "ranks_per_node": 2}'):
        file.write_text(text)
        with pytest.raises(ConfigError, match="is there and is no profile of hetrain"):
            check_replaceable(file, "cpu", 1, 2)
        assert file.read_text() == text
