"""`hetrain stats` and `hetrain plan` as a user types them, in this process."""

import json
import re
from pathlib import Path

import pytest

from hetrain.cli.command import run
from hetrain.errors import ConfigError, DataError
from hetrain.planner.plan import Plan
from hetrain.planner.request import STATE
from hetrain.planner.table_list import read

SAMPLE = ("data.path=sample", "data.sample.rows=2000", "data.sample.cardinalities=[50,700,9]")
TABLES = '[{"name": "a", "rows": 1000, "dim": 8}, {"name": "b", "rows": 90000, "dim": 64, "pooling": [1, 10]}]'
CPUS = ("planner=hierarchical", "optimizer=sgd", "cluster.device=cpu", "cluster.nodes=2", "cluster.gpus_per_node=2")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a list of tables in tables.json."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tables.json").write_text(TABLES)
    return tmp_path


def lines(text: str) -> dict[str, str]:
    """Labels and texts of what was printed."""
    return dict(re.match(r"([a-z ]{12})(.*)", line).groups() for line in text.splitlines() if re.match(r"[a-z]", line))  # type: ignore[union-attr]


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, str]:
    capsys.readouterr()
    assert run(["plan", *words]) == 0
    return {label.strip(): text for label, text in lines(capsys.readouterr().out).items()}


def refused(*words: str, error: type[Exception] = ConfigError) -> str:
    with pytest.raises(error) as raised:
        run(["plan", *words])
    return str(raised.value)


def test_a_plan_is_shown_saved_and_read_again(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = planned(capsys, "plan.tables=tables.json", *CPUS, "plan.out=out", "train.batch_size=64")
    assert said["tables"].startswith("2 (tables): 91,000 rows, 22.00 MiB with optimizer state, 12 lookups per example")
    assert said["machines"].startswith("2 of 2 cpu ranks, each ")
    assert (said["saved"], said["picture"]) == ("out/plan.json", "out/plan.html")
    saved = json.loads((folder / "out" / "plan.json").read_text())
    assert Plan.from_json(saved).to_json() == {key: saved[key] for key in Plan.from_json(saved).to_json()}
    Plan.from_json(saved).check([load.table for load in read(folder / "tables.json", STATE["sgd"])])
    assert len(saved["predicted"]["ranks"]) == 4
    assert saved["asked"]["cluster"]["ranks_per_node"] == 2
    assert "<svg" in (folder / "out" / "plan.html").read_text()


def test_what_is_not_in_the_prices_is_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("plan.tables=tables.json", *CPUS)
    assert "comms" not in planned(capsys, *words, "plan.out=a")
    assert "float32" in planned(capsys, *words, "plan.out=b", "comms.pooled_forward=fp16")["comms"]


def test_a_plan_is_never_written_over(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("plan.tables=tables.json", *CPUS)
    planned(capsys, *words, "plan.out=out")
    before = (folder / "out" / "plan.json").read_text()
    assert refused(*words, "plan.out=out", "train.batch_size=9").startswith(
        "plan.out=out: holds a plan already. Choose"
    )
    assert (folder / "out" / "plan.json").read_text() == before
    assert refused(*words, "plan.out=tables.json") == "plan.out=tables.json: is no folder."
    assert refused(*words, "plan.out=").startswith("plan.out=: expected a folder, or null")
    made = [planned(capsys, *words)["saved"] for _ in range(2)]
    assert len(set(made)) == 2
    assert made[0].startswith("plans/tables_hierarchical_2x2_")


def test_where_nothing_can_be_written_is_said_before_the_search(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("plan.tables=tables.json", *CPUS)
    said = refused(*words, "plan.out=tables.json/of/mine")
    assert said.startswith(f"plan.out=tables.json/of/mine: {folder}/tables.json is a file, and a folder is wanted")
    monkeypatch.setattr("os.access", lambda path, mode: path != folder)  # root may write to every folder
    for out in ("plan.out=new/out", "plan.out=null"):
        assert refused(*words, out).startswith(f"{out}: {folder} cannot be written to. Name another folder")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("name", ["round_robin", "memory_balanced", "memory_optimized", "torchrec"])
def test_every_planner_plans_what_the_sample_would_have(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = planned(capsys, f"planner={name}", *SAMPLE, *CPUS[2:])
    assert said["tables"].startswith("3 (wdl_sample): 759 rows")
    assert said["skew"].startswith("not known")
    assert not Path("sample").exists()


def test_stats_are_shown_saved_and_read(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["stats", *SAMPLE]) == 0
    shown = capsys.readouterr().out
    rows = [line.split() for line in shown.splitlines()]
    assert [row[:2] for row in rows[1:5]] == [["C1", "50"], ["C2", "700"], ["C3", "9"], ["all", "759"]]
    assert "sample/stats.json" in shown
    page = (folder / "sample" / "stats.html").read_text()
    assert page.count("<svg") == 2
    assert "http" not in page
    for mode in ("bsp", "het"):
        assert planned(capsys, f"consistency={mode}", *SAMPLE, *CPUS)["skew"] == "measured for 3 of 3 tables"
    (folder / "sample" / "stats.json").write_text("{}")
    assert "damaged" in refused("data=criteo", "data.path=sample", *CPUS, error=DataError)


def test_stats_look_at_the_data_there_and_never_make_it_anew(
    folder: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert run(["stats", *SAMPLE]) == 0
    before = {file: file.stat().st_mtime_ns for file in (folder / "sample").rglob("*.parquet")}
    for words in (["stats", "data.path=sample"], ["stats", *SAMPLE[:1], "data.sample.rows=300"]):
        caplog.clear()
        capsys.readouterr()
        assert run(words) == 0
        assert {file: file.stat().st_mtime_ns for file in (folder / "sample").rglob("*.parquet")} == before
        assert "of 1,600 train examples" in capsys.readouterr().out
        asked = words[-1].partition("rows=")[2] or "200000"
        assert f"a sample of other settings (sample.rows: 2000 there, {asked} asked for" in caplog.text
        assert "which is counted as it is" in caplog.text


def test_many_ranks_are_summed_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "plan.tables=tables.json", *CPUS[:3], "cluster.nodes=64", "cluster.gpus_per_node=8"]) == 0
    assert len(capsys.readouterr().out.splitlines()) < 30


def test_servers_alone_hold_rows(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    planned(capsys, *SAMPLE, *CPUS, "consistency=het", "cluster.servers=3", "plan.out=out")
    plan = Plan.from_json(json.loads((folder / "out" / "plan.json").read_text()))
    assert plan.world_size == 7
    assert {piece.rank for piece in plan.pieces} <= {4, 5, 6}


def test_mistakes() -> None:
    tables = "plan.tables=tables.json"
    assert refused("cluster.node=2").startswith(
        "cluster.node=2: there is no key 'cluster.node'. Did you mean 'cluster.nodes'?"
    )
    assert "cluster is one of: cpu_10gbe, cpu_1gbe, dgx_a100" in refused("cluster=dgx")
    assert refused("plan.tables=nope").startswith(
        "plan.tables=nope: expected a file that ends in .json, .csv, .yaml, or"
    )
    assert refused(tables, *CPUS, "planner.constraints={c: {columns: 8}}") == (
        "planner.constraints: there is no table 'c'."
    )
    wrong = refused(tables, *CPUS, "optimizer=rowwise_adagrad", "planner.sharding_types=[table_wise,column_wise]")
    assert wrong.startswith(
        "planner.sharding_types=['table_wise', 'column_wise']: column_wise with optimizer.rows.name="
    )
    wrong = refused(tables, *CPUS, "consistency=het", "planner.constraints={a: {sharding_types: [table_row_wise]}}")
    assert "table_row_wise cannot run with consistency.mode=het" in wrong
    assert refused(tables, "planner.plan=here").startswith("planner.plan=here: expected null with `hetrain plan`")
    (Path("folder.json")).mkdir()
    assert refused("plan.tables=folder.json") == "plan.tables=folder.json: is a folder, not a file."
    assert "no prepared data set there" in refused("data=criteo", error=DataError)
    for verb in ("train", "stats"):
        with pytest.raises(ConfigError, match="--calibrate measures for `hetrain plan`"):
            run([verb, "--calibrate"])


@pytest.mark.parametrize("planner", ["hierarchical", "round_robin", "torchrec"])
def test_what_does_not_fit_is_refused_with_numbers(planner: str) -> None:
    wrong = refused("plan.tables=tables.json", f"planner={planner}", *CPUS[1:], "planner.memory_gib=0.001")
    assert "table 'b'" in wrong
    assert re.search(r"needs? [\d.]+ GiB", wrong)
    assert "0.00" in wrong  # of a GiB
    assert not Path("plans").exists()
