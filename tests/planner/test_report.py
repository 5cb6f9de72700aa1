"""What is said and drawn of a plan: ranks in short where there are many, every byte of every rank in the picture."""

import re

import pytest

from hetrain.planner.cluster import GIB, Cluster
from hetrain.planner.machines import USED, Machines
from hetrain.planner.picture import SEGMENTS, page
from hetrain.planner.piece import Piece
from hetrain.planner.plan import Plan
from hetrain.planner.planned import Planned, RankCost
from hetrain.planner.report import HEAD, SLOWEST, asked_lines, found_lines, rank_rows
from hetrain.planner.workload import TableLoad
from hetrain.tables import Table


def cluster(nodes: int, ranks: int) -> Cluster:
    return Cluster("cuda", nodes, ranks, GIB, 2 * GIB, 1000.0, 50.0, 300.0, 20.0)


def loads(tables: int) -> list[TableLoad]:
    return [TableLoad(Table(f"t<{i}>", 1000 + i, 16, (f"t{i}",), 0.0), (1.0,)) for i in range(tables)]


def planned(tables: list[TableLoad], ranks: int, per_node: int = 0) -> Planned:
    """Whole tables in turn, the first one replicated; rank r takes r + 1 milliseconds."""
    first, *others = tables
    pieces = [Piece(load.table.name, i % ranks, 0, load.table.rows, 0, 16, "hbm") for i, load in enumerate(others)]
    sharding = {load.table.name: "table_wise" for load in others} | {first.table.name: "data_parallel"}
    plan = Plan("torchrec", ranks, tuple(pieces), frozenset([first.table.name]), sharding, per_node)
    costs = tuple(RankCost(r, GIB // 2, 0, 10, r + 0.75, 0.25) for r in range(ranks))
    return Planned(plan, costs, ranks / 2, "the mean", "rank 0's lookups; more ranks", {"hbm": GIB, "ddr": 0})


def test_few_ranks_are_listed_and_many_summed_up() -> None:
    few = rank_rows(planned(loads(9), 8, 4))
    assert [row[:2] for row in few] == [(str(r), str(r // 4)) for r in range(8)]
    assert few[2] == ("2", "0", "0.5", "0.00", "10", "2.750", "0.250", "3.000")
    many = rank_rows(planned(loads(9), 64, 8))
    assert [row[0] for row in many] == ["63", "62", "61", "60", "59", "...", "0", "mean"]
    assert len(many) == SLOWEST + 3
    assert many[-1][-1] == "32.50"
    assert {len(row) for row in few + many} == {len(HEAD)}


def test_words_say_how_far_from_the_best_a_plan_is() -> None:
    said = dict(found_lines(planned(loads(9), 8), 512))
    assert said["slowest"] == "8.000 ms a step for the embeddings of 512 examples per rank"
    assert said["bound"] == "100.0% above 4.000 ms, which no plan of the cuts allowed can go below: the mean"
    assert said["balance"] == "max/mean 1.778"
    assert said["tables as"] == "8 table_wise, 1 data_parallel"
    assert said["memory"] == "1.00 GiB in hbm"
    asked = dict(asked_lines("mine", loads(9), Machines(cluster(2, 4), dict.fromkeys(USED["cuda"], "the config"))))
    assert asked["machines"] == "2 of 4 cuda ranks, each 1.00 GiB hbm and 2.00 GiB ddr for tables"
    hbm = "1000 GB/s hbm, 50 GB/s ddr, 32 GB/s between hbm and ddr"
    assert asked["speeds"] == f"{hbm}, 300 GB/s within a machine, 20 GB/s between machines from the config"
    assert asked["tables"].startswith("9 (mine): 9,036 rows, 0.55 MiB with optimizer state, 9 lookups per example")


@pytest.mark.parametrize(("tables", "nodes", "ranks"), [(40, 2, 4), (3000, 8, 8), (1500, 64, 8)])
def test_the_picture_holds_every_byte_of_every_rank(tables: int, nodes: int, ranks: int) -> None:
    held, c = loads(tables), cluster(nodes, ranks)
    found = planned(held, c.world_size, ranks)
    text = page("a <plan>", found_lines(found, 512), found, held, c)
    assert "http" not in text
    assert "<script" not in text
    assert "a &lt;plan&gt;" in text
    assert not re.search(r"t<\d", text)
    memory = text[text.index("What each rank holds") : text.index("What each rank takes")]
    rows = [line for line in memory.splitlines() if 'class="piece"' in line]
    assert len(rows) == c.world_size
    widths = [[float(w) for w in re.findall(r'piece" x="[^"]*" y="[^"]*" width="([^"]*)"', row)] for row in rows]
    size = {load.table.name: load.table.rows * load.row_bytes for load in held}
    bytes_of = [size["t<0>"]] * c.world_size
    for piece in found.plan.pieces:
        bytes_of[piece.rank] += size[piece.table]
    shares = [sum(row) / sum(max(widths, key=sum)) for row in widths]
    assert shares == pytest.approx([held_bytes / max(bytes_of) for held_bytes in bytes_of], rel=0.05)
    assert sum(map(len, widths)) <= max(SEGMENTS, 3 * c.world_size)
    assert len(text) < 3_000_000
