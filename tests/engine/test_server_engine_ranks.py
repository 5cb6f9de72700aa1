"""Workers and dedicated servers on real ranks: the numbers of a run whose rows live on the workers, bit for bit."""

from typing import Any

import numpy as np
import pytest

from hetrain import embedding
from hetrain.telemetry import Traffic
from tests.engine.held import check_gone_on, gone_on, tables_of, whole_tables
from tests.engine.server_cases import make_side, side_batches
from tests.engine.store_cases import train
from tests.handed_to_gloo import handed_to_gloo
from tests.ranks import run_ranks

CUT = 7


def _run(rank: int, world_size: int, servers: int, settings: dict[str, Any]) -> dict[str, Any]:
    engine = make_side(rank, world_size, servers, **settings)
    data = side_batches(rank, world_size, servers)
    losses = train(engine, iter(data[:CUT]))
    with engine.evaluating():
        predictions = [engine.predict(batch).numpy() for batch in data]
    alone = engine.predict(data[0]).numpy()  # opens a view of its own
    losses += train(engine, iter(data[CUT:]))
    before, report = tables_of(engine), engine.report()
    engine.finish()
    return {
        "losses": losses,
        "predictions": [*predictions, alone],
        "before": before,
        "after": tables_of(engine),
        "report": report,
    }


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize(
    "settings",
    [
        {"capacity": 0, "optimizer": "rowwise_adagrad"},
        {"capacity": 0, "optimizer": "adagrad", "audit_every": 2},
        {"capacity": 60, "staleness": 2, "optimizer": "sgd"},
        {"capacity": 60, "staleness": 2, "validation": "clock", "prefetch": False},
        {"capacity": 60, "staleness": 3, "optimizer": "adagrad", "clock": "sum", "audit_every": 1},
    ],
)
def test_servers_change_no_bit(servers: int, settings: dict[str, Any]) -> None:
    together = run_ranks(2, _run, 0, settings)
    apart = run_ranks(2 + servers, _run, servers, settings)
    for ours, theirs in zip(apart, together, strict=False):
        assert ours["losses"] == theirs["losses"]
        assert all(np.array_equal(a, b) for a, b in zip(ours["predictions"], theirs["predictions"], strict=True))
        assert ours["report"]["cache"] == theirs["report"]["cache"]
        assert not any("@" in name for name in ours["before"])  # workers own nothing
    for when in ("before", "after"):
        ours, theirs = (whole_tables([rank[when] for rank in ranks]) for ranks in (apart, together))
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            np.testing.assert_array_equal(ours[name], value, err_msg=name)
    for key in ("observed_staleness_max", "missed_updates_max"):
        most = [[r["report"][key] for r in ranks if r["report"][key] is not None] for ranks in (apart, together)]
        assert max(most[0], default=None) == max(most[1], default=None), key
    for server in apart[2:]:
        assert server["losses"] == [0.0] * 12
        assert all(len(p) == 0 for p in server["predictions"])
        assert server["report"]["cache"] is None


def _pairs(rank: int, world_size: int, servers: int) -> tuple[set[int], int, int]:
    """Ranks this one sent rows to, the bytes of that, and what was counted."""
    traffic = Traffic()
    with handed_to_gloo() as handed:
        engine = make_side(rank, world_size, servers, traffic=traffic, capacity=40, staleness=1, audit_every=2)
        train(engine, iter(side_batches(rank, world_size, servers)))
        engine.finish()
    if rank >= world_size - servers:
        assert traffic.bytes["dense"] == 0
    return handed.peers, handed.nbytes, traffic.total - traffic.bytes["dense"]


def test_only_workers_and_servers_talk_to_each_other() -> None:
    ranks = run_ranks(4, _pairs, 2)
    assert [peers for peers, _, _ in ranks] == [{2, 3}, {2, 3}, {0, 1}, {0, 1}]
    assert all(sent == counted for _, sent, counted in ranks)


def _flushed(rank: int, world_size: int, push_bytes: int) -> dict[str, Any]:
    embedding.PUSH_BYTES = push_bytes
    engine = make_side(rank, world_size, 1, capacity=60, staleness=30)
    train(engine, iter(side_batches(rank, world_size, 1)[:-1]))
    with handed_to_gloo() as handed:
        engine.finish()
    return {"messages": handed.messages, "left": tables_of(engine)}


def test_a_server_takes_what_is_pushed_in_several_rounds() -> None:
    whole, parts = (run_ranks(3, _flushed, push_bytes) for push_bytes in (1 << 25, 200))
    for one, many in zip(whole, parts, strict=True):
        assert many["messages"] > one["messages"]
        for name, value in one["left"].items():
            np.testing.assert_array_equal(many["left"][name], value)


def _resume(rank: int, world_size: int, servers: int, capacity: float) -> dict[str, Any]:
    settings: dict[str, Any] = {"capacity": capacity, "staleness": 3, "policy": "lfu", "audit_every": 3}
    data = side_batches(rank, world_size, servers)
    return gone_on(lambda: make_side(rank, world_size, servers, **settings), data, CUT)


@pytest.mark.parametrize("capacity", [0, 60])
def test_resume_is_bit_for_bit(capacity: float) -> None:
    for rank in run_ranks(3, _resume, 1, capacity):
        check_gone_on(rank)
