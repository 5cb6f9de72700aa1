"""Tables that every worker of the store holds whole, on real ranks: the numbers of tables that have owners."""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from hetrain.comms.dense_exchange import DenseComms
from hetrain.planner.plan import Plan
from hetrain.telemetry import Traffic
from tests.engine.held import check_gone_on, gone_on, tables_of, whole_tables
from tests.engine.server_cases import make_side, server_plan, side_batches
from tests.engine.store_cases import ROWS, STEPS, PlainTorch, batches, make_engine, make_plan, make_tables, train
from tests.ranks import run_ranks

CUT = 7
WHOLE = ("t0", "t1")
ELEMENTS = 8 * (ROWS[0] + ROWS[1])  # of these


def without(plan: Plan, names: Collection[str] = WHOLE) -> Plan:
    """`plan` with the tables `names` held whole by every worker."""
    pieces = tuple(piece for piece in plan.pieces if piece.table not in names)
    return replace(plan, pieces=pieces, replicated=frozenset(names))


Case = tuple[tuple[str, ...], str, dict[str, Any]]  # tables held whole, row optimizer, settings of make_engine


def _train(rank: int, world_size: int, case: Case) -> dict[str, Any]:
    names, optimizer, settings = case
    plan, traffic = without(make_plan(make_tables(), world_size), names), Traffic()
    engine = make_engine(world_size, optimizer, plan=plan, traffic=traffic, **settings)
    before, network = dict(traffic.bytes), sum(p.numel() for p in engine._network.parameters())
    data = batches(rank, world_size)
    losses = train(engine, iter(data))
    sent = {channel: traffic.bytes[channel] - before[channel] for channel in traffic.bytes}
    predicted = [engine.predict(batch).numpy() for batch in data]
    engine.finish()
    tables = tables_of(engine)
    return {"losses": losses, "tables": tables, "predicted": predicted, "sent": sent, "network": network}


def _train_all(rank: int, world_size: int, cases: list[Case]) -> list[dict[str, Any]]:
    return [_train(rank, world_size, case) for case in cases]


def _run(*cases: Case) -> list[list[dict[str, Any]]]:
    """By case, what each of two ranks found."""
    return [list(ranks) for ranks in zip(*run_ranks(2, _train_all, list(cases)), strict=True)]


def _sums(ranks: list[Any]) -> torch.Tensor:
    return torch.tensor([sum(parts) for parts in zip(*(r["losses"] for r in ranks), strict=True)])


def _same_on_both(ranks: list[dict[str, Any]], keys: Collection[str] = ("value",)) -> None:
    for name in (f"{table}.{key}@0" for table in WHOLE for key in keys):
        np.testing.assert_array_equal(ranks[0]["tables"][name], ranks[1]["tables"][name])


def test_replicas_train_as_plain_torch_on_whole_batches() -> None:
    optimizers = ("adagrad", "rowwise_adagrad")
    for optimizer, ranks in zip(optimizers, _run(*((WHOLE, o, {"capacity": 0}) for o in optimizers)), strict=True):
        plain = PlainTorch(optimizer)
        expected = plain.train(batches(0, 1))
        torch.testing.assert_close(_sums(ranks), torch.tensor(expected), atol=1e-5, rtol=1e-5)
        _same_on_both(ranks, ("value", "sum"))
        whole = whole_tables([rank["tables"] for rank in ranks])
        for i, (weight, sums) in enumerate(zip(plain._weights, plain.sums, strict=True)):
            torch.testing.assert_close(torch.from_numpy(whole[f"t{i}.value"]), weight.detach(), atol=1e-5, rtol=1e-4)
            ours = torch.from_numpy(whole[f"t{i}.sum"]).view_as(sums)
            torch.testing.assert_close(ours, sums, atol=1e-6, rtol=1e-4)


def test_replicas_change_no_number_where_every_read_is_fresh() -> None:
    assert batches(1, 2)[-1].size == 0
    owned, ranks = _run(*((names, "sgd", {"capacity": 0}) for names in ((), WHOLE)))
    torch.testing.assert_close(_sums(ranks), _sums(owned), atol=1e-6, rtol=1e-6)
    before, after = (whole_tables([rank["tables"] for rank in of]) for of in (owned, ranks))
    assert before.keys() == after.keys()
    for name, value in before.items():
        np.testing.assert_allclose(after[name], value, atol=1e-6)
    for one, other in zip(ranks, owned, strict=True):
        for ours, theirs in zip(one["predicted"], other["predicted"], strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-6)
        # a ring of two sends every value once
        assert one["sent"]["dense"] - other["sent"]["dense"] == STEPS * 4 * ELEMENTS
        assert one["sent"]["rows_push"] < other["sent"]["rows_push"]


def test_replicas_beside_rows_that_are_held_back() -> None:
    """However old other rows may be, replicas are those of all workers, to the bit, and nearer to fresh reads."""
    stale = [{"capacity": 60, "staleness": s} for s in (0, 10)]
    fresh, *runs = _run(((), "sgd", {"capacity": 0}), *((names, "sgd", s) for s in stale for names in (WHOLE, ())))
    for ranks, owned in (runs[:2], runs[2:]):
        _same_on_both(ranks)
        far, further = ((_sums(of) - _sums(fresh)).abs().max() for of in (ranks, owned))
        assert 0 < far < further


def test_gradients_of_replicas_travel_as_the_dense_part() -> None:
    exact, *narrow = _run(
        *((WHOLE, "sgd", {"capacity": 0, "dense_comms": DenseComms(c, timeout_s=30)}) for c in ("none", "bf16", "dct"))
    )
    for ranks in narrow:
        _same_on_both(ranks)
        np.testing.assert_allclose(ranks[0]["tables"]["t0.value@0"], exact[0]["tables"]["t0.value@0"], atol=0.02)
        assert ranks[0]["sent"]["dense"] < STEPS * 2 * (ELEMENTS + ranks[0]["network"]) + STEPS * 100


def _side(rank: int, world_size: int, servers: int) -> Any:
    plan = without(server_plan(make_tables((8, 4, 8)), world_size, servers))
    settings: dict[str, Any] = {"capacity": 60, "staleness": 3, "policy": "lfu", "audit_every": 3, "plan": plan}
    data = side_batches(rank, world_size, servers)
    return gone_on(lambda: make_side(rank, world_size, servers, **settings), data, CUT)


def test_resume_is_bit_for_bit_and_servers_hold_no_replicas() -> None:
    together, apart = run_ranks(2, _side, 0), run_ranks(3, _side, 1)
    for rank in (*together, *apart):
        check_gone_on(rank)
    for ours, theirs in zip(apart, together, strict=False):
        assert ours["losses"] == theirs["losses"]
        assert {name for name in ours["tables"] if "@" in name} == {
            f"{t}.{k}@0" for t in WHOLE for k in ("value", "sum")
        }
    assert not any(name.startswith(WHOLE) for name in apart[2]["tables"])
    ours, theirs = (whole_tables([rank["tables"] for rank in ranks]) for ranks in (apart, together))
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        np.testing.assert_array_equal(ours[name], value, err_msg=name)
