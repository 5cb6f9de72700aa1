"""Plans that cannot be: every numbered remedy is followed, as a user would, and a plan comes out."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from hetrain.cli.command import run
from hetrain.config import RunConfig
from hetrain.errors import ConfigError
from tests import small_run

TABLES = [
    {"name": "a", "rows": 1000, "dim": 8},
    {"name": "b", "rows": 90_000, "dim": 64, "pooling": [1, 10]},
    {"name": "c", "rows": 40_000, "dim": 32},
    {"name": "d", "rows": 60_000, "dim": 16, "pooling": 3},
]
CPUS = ("cluster.device=cpu", "cluster.nodes=2", "cluster.gpus_per_node=2", "optimizer=sgd")
GPUS = ("cluster.device=cuda", "cluster.nodes=1", "cluster.gpus_per_node=2", "optimizer=sgd", "cluster.hbm_gib=1")
NO_MEMORY = "planner.memory_gib=0.004"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with tables.json."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tables.json").write_text(json.dumps(TABLES))
    return tmp_path


def refused(*words: str) -> list[str]:
    """The remedies for a plan that cannot be."""
    with pytest.raises(ConfigError) as error:
        run(["plan", *words])
    first, *lines = str(error.value).split("\n  ")
    assert re.fullmatch(
        r"no plan fits: table '\w+' \([\d,]+ x \d+, [\d.e-]+ GiB\) needs [\d.e-]+ GiB of [\w ]+ on each rank that "
        r"holds a part of it, in the cut that needs least, and all tables [\d.e-]+ GiB of the mean rank, which has "
        r"[\d.e-]+ GiB(\. All of it would fit, but not in the places that this strategy gives)?\. Choose one:",
        first,
    )
    assert [line.split()[0] for line in lines] == [f"({k})" for k in range(1, len(lines) + 1)]
    return [line.partition(" ")[2] for line in lines]


def followed(remedy: str, words: tuple[str, ...], folder: Path) -> list[str]:
    """The command line of `words` changed as `remedy` says; tables.json is edited where that is what it says."""
    changes = re.findall(r"[(\s]([a-z_.]+=(?:\[.*?\]|[^\s,)]+))", f" {remedy}")
    changes += [
        f"{key}={value}" for key, value in re.findall(r"(?:raise|lower) (\S+) from \S+ to (?:at least )?(\S+)", remedy)
    ]
    if table := re.search(r"halve the rows of '(\w+)' to (\d+)", remedy):
        edited = [{**t, "rows": int(table[2])} if t["name"] == table[1] else t for t in TABLES]
        (folder / "tables.json").write_text(json.dumps(edited))
    words = tuple(word for word in words if not (" out of planner.constraints" in remedy and "constraints" in word))
    if "cluster=" in remedy:
        words = tuple(word for word in words if not word.startswith("cluster."))
    keys = {change.partition("=")[0] for change in changes}
    return [*(word for word in words if word.partition("=")[0] not in keys), *changes]


RAISE = "raise planner.memory_gib from 0.004 to at least 0.0"
RAISE_HOST = "raise cluster.ddr_gib from 0.01 to at least 0.0"
CASES = {  # what is asked, and parts of what is said
    "hierarchical": (
        ("planner=hierarchical", *CPUS, NO_MEMORY),
        (RAISE, "(cluster.nodes=", "take other machines: cluster=", " planner.memory_gib=null cluster.nodes=1"),
    ),
    "round_robin": (("planner=round_robin", *CPUS, "train.batch_size=64", NO_MEMORY), (RAISE, "(cluster.nodes=")),
    "memory_balanced, whole tables": (
        ("planner=memory_balanced", *CPUS, "planner.sharding_types=[table_wise]", "planner.memory_gib=0.015"),
        ("(planner.sharding_types=[table_wise,row_wise,table_row_wise])", "halve the rows of 'b' to 45000"),
    ),
    "batch": (
        ("planner=memory_optimized", *CPUS, "train.batch_size=65536", "planner.memory_gib=0.05"),
        ("lower train.batch_size from 65536 to ",),
    ),
    "gpus": (
        ("planner=hierarchical", *GPUS, "planner.tiers=[hbm]", "planner.memory_gib=0.01", "train.batch_size=64"),
        (
            "raise planner.memory_gib from 0.01",
            "allow ddr in planner.tiers, the host's memory (planner.tiers=[hbm,ddr])",
        ),
    ),
    "gpus, host memory alone": (
        ("planner=hierarchical", *GPUS, "planner.tiers=[ddr]", "cluster.ddr_gib=0.01"),
        (RAISE_HOST, "(cluster.nodes="),
    ),
    "constraint": (
        (
            *("planner=memory_balanced", *CPUS, "train.batch_size=64", "planner.memory_gib=0.016"),
            "planner.constraints={b: {sharding_types: [table_wise]}}",
        ),
        ("take 'b' out of planner.constraints",),
    ),
    "store": (
        ("planner=memory_optimized", *CPUS, "consistency=het", NO_MEMORY),
        (RAISE, "set store.index=hash to hold only the rows seen"),
    ),
    "store on machines with gpus": (
        ("planner=hierarchical", *GPUS, "consistency=het", "cluster.ddr_gib=0.01"),
        (RAISE_HOST,),
    ),
    "servers": (
        ("planner=hierarchical", *CPUS, "consistency=het", "cluster.servers=2", NO_MEMORY),
        (RAISE, "(cluster.servers="),
    ),
    "torchrec": (
        ("planner=torchrec", *CPUS, "planner.sharding_types=[table_wise]", "planner.memory_gib=0.015"),
        ("raise planner.memory_gib from 0.015 to", "(planner.sharding_types=[table_wise,row_wise])"),
    ),
    "torchrec, servers": (
        ("planner=torchrec", *CPUS, "consistency=ssp", "cluster.servers=2", NO_MEMORY),
        (RAISE, "set store.index=hash"),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_every_remedy_gives_a_plan(case: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked, parts = CASES[case]
    words = ("plan.tables=tables.json", *asked)
    remedies = refused(*words)
    for part in parts:
        assert any(part in remedy for remedy in remedies), (part, remedies)
    for remedy in remedies:
        changed = followed(remedy, words, folder)
        assert changed != list(words) or "halve" in remedy, remedy
        assert run(["plan", *changed]) == 0, remedy
        assert "slowest" in capsys.readouterr().out
        (folder / "tables.json").write_text(json.dumps(TABLES))
    if case == "hierarchical":  # and little less memory is not enough
        least = float(remedies[0].rpartition(" ")[2])
        with pytest.raises(ConfigError):
            run(["plan", *words[:-1], f"planner.memory_gib={0.97 * least}"])


@pytest.mark.parametrize("planner", ["torchrec", "hierarchical"])
def test_a_training_is_told_the_same(planner: str, cfg_of: Callable[..., RunConfig]) -> None:
    cfg = cfg_of("bsp", planner__name=planner, planner__memory_gib=0.00001)
    with pytest.raises(ConfigError) as error:
        small_run.make(cfg)
    text = str(error.value)
    assert text.startswith("no plan fits: table 'C1' (500 x 8, 1.7e-05 GiB) needs ")
    named = re.search(r"\(\d\) raise planner\.memory_gib from 1e-05 to at least (\S+)", text)
    assert named is not None
    assert "cluster.nodes" not in text
    cfg.planner.memory_gib = float(named[1])
    small_run.make(cfg)
