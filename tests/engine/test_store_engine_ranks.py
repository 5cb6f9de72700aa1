"""The store engine on two real ranks: exact with an empty cache, bounded with one, resumable, never disturbed."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from hetrain import embedding
from hetrain.telemetry import Traffic
from tests.engine.held import load, reproducible, same_rows, save, tables_of, whole_tables
from tests.engine.store_cases import STEPS, PlainTorch, batches, make_engine, train
from tests.handed_to_gloo import handed_to_gloo
from tests.ranks import run_ranks

CUT = 7


def _train(
    rank: int, world_size: int, optimizer: str, kwargs: dict[str, Any], multi_hot: bool, steps: int = STEPS
) -> dict[str, Any]:
    engine = make_engine(world_size, optimizer, **kwargs)
    data = batches(rank, world_size, multi_hot=multi_hot, steps=steps)
    losses = train(engine, iter(data))
    before = tables_of(engine)
    predictions = [engine.predict(batch).numpy() for batch in data]
    engine.finish()
    return {
        "losses": losses,
        "before": before,
        "after": tables_of(engine),
        "predictions": predictions,
        "report": engine.report(),
    }


@pytest.mark.parametrize("steps", [3, STEPS], ids=["ends as rates change", "ends later"])
@pytest.mark.parametrize("late_leg", [False, True])
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad"])
def test_empty_cache_equals_plain_torch_on_whole_batches(optimizer: str, late_leg: bool, steps: int) -> None:
    plain = PlainTorch(optimizer)
    expected = plain.train(batches(0, 1, steps=steps))
    ranks = run_ranks(2, _train, optimizer, {"capacity": 0, "late_leg": late_leg}, False, steps)
    assert batches(1, 2, steps=steps)[-1].size == 0
    losses = [sum(parts) for parts in zip(*(r["losses"] for r in ranks), strict=True)]
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), atol=1e-5, rtol=1e-5)
    for when in ("before", "after"):
        tables = whole_tables([r[when] for r in ranks])
        assert sum(name.endswith((".value", ".sum")) for name in tables) == (3 if optimizer == "sgd" else 6)
        for i, (weight, sums) in enumerate(zip(plain._weights, plain.sums, strict=True)):
            torch.testing.assert_close(torch.from_numpy(tables[f"t{i}.value"]), weight.detach(), atol=1e-5, rtol=1e-4)
            if optimizer != "sgd":
                ours = torch.from_numpy(tables[f"t{i}.sum"]).view_as(sums)
                torch.testing.assert_close(ours, sums, atol=1e-6, rtol=1e-4)
    for name in ("hidden.weight", "out.bias"):
        assert (ranks[0]["after"][name] == ranks[1]["after"][name]).all()


@pytest.mark.parametrize("staleness", [0, 2, 100, math.inf])
@pytest.mark.parametrize(
    ("optimizer", "validation", "prefetch"),
    [("sgd", "directory", True), ("rowwise_adagrad", "directory", False), ("sgd", "clock", True)],
)
def test_bounds_hold_and_nothing_is_lost(staleness: float, optimizer: str, validation: str, prefetch: bool) -> None:
    kwargs = {
        "capacity": 60,
        "staleness": staleness,
        "audit_every": 1,
        "clock": "sum",
        "validation": validation,
        "prefetch": prefetch,
    }
    ranks = run_ranks(2, _train, optimizer, kwargs, True)
    for rank in ranks:
        assert rank["report"]["observed_staleness_max"] <= staleness
        # at s=0 every row is due again after one update
        assert (rank["report"]["cache"]["hits"] > 0) == (staleness > 0)
        assert rank["report"]["cache"]["evictions"] > 0
        for name, piece in rank["before"].items():
            # what looking shows is what the flush leaves
            np.testing.assert_allclose(piece, rank["after"][name], atol=1e-6, rtol=1e-5)
    assert max(r["report"]["missed_updates_max"] for r in ranks) > 0


def test_an_empty_cache_misses_no_update() -> None:
    for rank in run_ranks(2, _train, "adagrad", {"capacity": 0, "audit_every": 1}, False):
        assert rank["report"]["missed_updates_max"] == 0
        assert rank["report"]["observed_staleness_max"] == 0


def _looking(rank: int, world_size: int, capacity: float, look: bool) -> dict[str, Any]:
    traffic = Traffic()
    engine = make_engine(world_size, "adagrad", capacity=capacity, staleness=2, traffic=traffic)
    data = batches(rank, world_size)
    stream = iter(data)
    losses = []
    while (out := engine.step(stream)) is not None:
        losses.append(float(out.loss))
        if look:
            with engine.evaluating():
                engine.predict(data[0])
                engine.predict(data[-1])
            with engine.snapshot():
                pass
    report = reproducible(engine)
    engine.finish()
    return {"losses": losses, "report": report, "bytes": dict(traffic.bytes), **tables_of(engine)}


@pytest.mark.parametrize("capacity", [0, 60])
def test_looking_changes_no_bit(capacity: float) -> None:
    plain, looked = (run_ranks(2, _looking, capacity, look) for look in (False, True))
    for a, b in zip(plain, looked, strict=True):
        assert a.keys() == b.keys()
        for name, value in a.items():
            assert np.array_equal(value, b[name]) if isinstance(value, np.ndarray) else value == b[name], name


def _resume(rank: int, world_size: int, capacity: float, staleness: float, used: bool) -> dict[str, Any]:
    """Train, save midway; then load into another engine (one in use when `used`) and go on."""
    kwargs: dict[str, Any] = {"capacity": capacity, "staleness": staleness, "policy": "lfu"}
    data = batches(rank, world_size)
    first = make_engine(world_size, "rowwise_adagrad", **kwargs)
    stream = iter(data)
    for _ in range(CUT):
        first.step(stream)
    saved = save(first)
    assert saved["private"]["is_read"]  # the next batch's rows were read ahead
    losses = train(first, stream)
    second = make_engine(world_size, "rowwise_adagrad", **kwargs)
    if used:
        train(second, iter(data[3:]))
    load(second, saved, exact=True)
    again = train(second, iter(data[CUT:]))
    end = [tables_of(first), tables_of(second)]
    same = all(np.array_equal(value, end[1][name]) for name, value in end[0].items())
    third = make_engine(world_size, "rowwise_adagrad", **kwargs)
    train(third, iter(data[3:6]))
    load(third, saved, exact=False)
    return {
        "losses": losses,
        "again": again,
        "same": same,
        "report": [reproducible(first), reproducible(second)],
        "folded": same_rows(saved, save(third)),
        "dirty": float(sum(len(r) for r, *_ in [(g["owner"]["rows"],) for g in saved["private"]["groups"]])),
    }


@pytest.mark.parametrize(("capacity", "staleness"), [(0, 3), (60, 3), (60, 0)])
@pytest.mark.parametrize("used", [False, True])
def test_resume_is_bit_for_bit(capacity: float, staleness: float, used: bool) -> None:
    ranks = run_ranks(2, _resume, capacity, staleness, used)
    assert sum(r["dirty"] for r in ranks) > 0
    for rank in ranks:
        assert rank["losses"] == rank["again"]
        assert rank["same"]
        assert rank["report"][0] == rank["report"][1]
        assert rank["folded"]


def _flushed(rank: int, world_size: int, push_bytes: int, capacity: float) -> dict[str, Any]:
    """Tables as an evaluation shows them and as the flush leaves them; rounds of `push_bytes`."""
    embedding.PUSH_BYTES = push_bytes
    engine = make_engine(world_size, "adagrad", capacity=capacity, staleness=30)
    train(engine, iter(batches(rank, world_size)[:-1]))
    with handed_to_gloo() as handed:
        shown = save(engine)["tables"]
    engine.finish()
    return {
        "shown": {name: [value.numpy() for value, _ in pieces] for name, pieces in shown.items()},
        "left": tables_of(engine),
        "messages": handed.messages,
    }


@pytest.mark.parametrize("capacity", [0, 60])
def test_everything_held_back_is_pushed_in_rounds_of_bounded_size(capacity: float) -> None:
    whole, parts = (run_ranks(2, _flushed, push_bytes, capacity) for push_bytes in (1 << 25, 200))
    for one, many in zip(whole, parts, strict=True):
        assert many["messages"] > one["messages"]
        for name, value in one["left"].items():
            np.testing.assert_array_equal(many["left"][name], value)
        for name, pieces in one["shown"].items():
            for ours, theirs in zip(many["shown"][name], pieces, strict=True):
                np.testing.assert_array_equal(ours, theirs)


def _counted(rank: int, world_size: int) -> tuple[int, int, int]:
    """Bytes counted, bytes really handed to gloo for rows, and those of the dense part."""
    traffic = Traffic()
    with handed_to_gloo() as handed:
        engine = make_engine(world_size, "adagrad", capacity=40, staleness=1, traffic=traffic, audit_every=2)
        dense = traffic.bytes["dense"]
        train(engine, iter(batches(rank, world_size)))
        engine.finish()
    rows = sum(nbytes for channel, nbytes in traffic.bytes.items() if channel != "dense")
    assert all(traffic.bytes[c] > 0 for c in ("ids", "rows_pull", "rows_push", "clocks", "audit"))
    parameters = sum(p.numel() * 4 for p in engine._network.parameters())
    assert traffic.bytes["dense"] - dense == STEPS * parameters
    return rows, handed.nbytes, parameters


def test_every_byte_sent_is_counted() -> None:
    for rows, sent, _ in run_ranks(2, _counted):
        assert rows == sent
