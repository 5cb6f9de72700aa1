"""Dense gradients in fewer bytes, in every mode on real ranks: resumed bit for bit, nothing lost, bytes counted."""

from typing import Any

import numpy as np
import pytest

from hetrain.comms import scaled_half
from hetrain.comms.dense_exchange import DenseComms
from hetrain.config import DctConfig, ScheduleConfig
from hetrain.engine import Engine
from hetrain.engine.async_engine import AsyncEngine
from hetrain.telemetry import Traffic
from tests.engine import bsp
from tests.engine.async_cases import make_async
from tests.engine.held import load, save, tables_of
from tests.engine.server_cases import make_side, side_batches
from tests.engine.store_cases import batches, train
from tests.engine.test_async_engine_ranks import recorded
from tests.engine.test_torchrec_engine_ranks import KINDS, shares
from tests.ranks import run_ranks

FP16 = DenseComms("fp16", timeout_s=30)
DCT = DenseComms("dct", DctConfig(dense_sparsity=0.8, refresh_steps=3, dense_warmup_steps=1, smallest=20), 30)
OPTIONS = (DenseComms(), FP16, DCT)
CUT = 4
STEADY = ScheduleConfig()


def _engine(kind: str, rank: int, world_size: int, comms: DenseComms) -> tuple[Engine, list[Any]]:
    """Of a mode, with or without a server, and its batches."""
    if kind == "bsp":
        return bsp.engine(bsp.optimizer("adagrad"), KINDS["mixed"], world_size, dense=comms), shares(rank)
    servers = int("server" in kind)
    data = side_batches(rank, world_size, servers)
    if kind == "asp, server":
        return make_async("asp", servers=servers, dense_comms=comms), data
    return make_side(rank, world_size, servers, capacity=60, staleness=2, dense_comms=comms), data


def _resume(rank: int, world_size: int, kind: str) -> dict[str, Any]:
    """The same steps by an engine that goes on, having been looked at, and by one that takes up what it saved."""
    engine, data = _engine(kind, rank, world_size, DCT)
    for step in range(CUT):
        engine.step(iter(data[step : step + 1]))
    if isinstance(engine, AsyncEngine):  # as ranks that meet do: nobody looks before all have pushed
        engine.finish()
        engine._transport.barrier()
    saved = {**save(engine), "step": CUT}
    other, _ = _engine(kind, rank, world_size, DCT)
    other.step(iter(data[3:4]))
    load(other, saved, exact=True)
    found = {}
    for name, one in (("gone on", engine), ("taken up", other)):
        losses = train(one, iter(data[CUT:]))
        if isinstance(one, AsyncEngine):
            one._transport.barrier()
        with one.snapshot() as state:
            pending = {key: value.numpy().copy() for key, value in state.dense_pending.items()}
        found[name] = {"losses": losses, "tables": tables_of(one), "pending": pending, "report": one.report()}
        one.finish()
    return found


@pytest.mark.parametrize(("kind", "world_size"), [("bsp", 2), ("het", 2), ("het, server", 3), ("asp, server", 2)])
def test_thresholded_gradients_resume_bit_for_bit(kind: str, world_size: int) -> None:
    ranks = run_ranks(world_size, _resume, kind)
    workers = [rank for rank in ranks if rank["gone on"]["report"].get("dense_dct")]
    for rank in ranks:
        gone_on, taken_up = rank["gone on"], rank["taken up"]
        assert gone_on["losses"] == taken_up["losses"]
        for name in ("tables", "pending"):
            assert gone_on[name].keys() == taken_up[name].keys()
            for key, value in gone_on[name].items():
                np.testing.assert_array_equal(value, taken_up[name][key], err_msg=key)
    assert any(np.abs(value).max() > 0 for value in workers[0]["gone on"]["pending"].values())
    for rank in workers[1:]:
        for key in ("tables", "pending"):
            for name, value in workers[0]["gone on"][key].items():
                if "@" not in name:
                    np.testing.assert_array_equal(value, rank["gone on"][key][name])
    for rank in workers:
        report = rank["gone on"]["report"]["dense_dct"]
        assert report == rank["taken up"]["report"]["dense_dct"]
        assert kind == "asp, server" or 0 < report["values_sent"] < report["values"]


def _replicated(rank: int, world_size: int) -> dict[str, Any]:
    found = {}
    for comms in OPTIONS:
        traffic = Traffic()
        engine = bsp.engine(bsp.optimizer("adagrad"), KINDS["data_parallel"], world_size, traffic=traffic, dense=comms)
        before = traffic.bytes["dense"]
        assert all(reducer.report() is None for reducer in engine._bags._reducers)  # no threshold on a table's rows
        train(engine, iter(shares(rank)))
        found[comms.name] = (tables_of(engine), traffic.bytes["dense"] - before)
    return found


def test_gradients_of_replicated_tables_are_narrowed_too() -> None:
    first, second = run_ranks(2, _replicated)
    exact, nbytes = first["none"]
    for name in ("fp16", "dct"):
        for key, value in first[name][0].items():
            np.testing.assert_array_equal(value, second[name][0][key])
            if name == "fp16":
                np.testing.assert_allclose(value, exact[key], atol=5e-3)
    assert nbytes / 2 <= first["fp16"][1] < 0.55 * nbytes
    assert first["dct"][1] < first["fp16"][1]


def _pushed(rank: int, world_size: int, servers: int) -> list[dict[str, Any]]:
    """For every option what was pushed, what waits, and where the dense part ended."""
    workers, found = world_size - servers, []
    for comms in OPTIONS:
        traffic = Traffic()
        engine = make_async("asp", dense="sgd", servers=servers, schedule=STEADY, traffic=traffic, dense_comms=comms)
        pushes = recorded(engine)
        train(engine, iter(batches(rank, workers) if rank < workers else []))
        engine.finish()
        engine._transport.barrier()
        with engine.snapshot() as state:
            pending = {name: value.numpy().copy() for name, value in state.dense_pending.items()}
            dense = {name: value.numpy().copy() for name, value in state.dense.items()}
        total: dict[int, Any] = {}
        for owner, gradient, _ in pushes:
            total[owner] = total.get(owner, 0.0) + gradient.double().numpy()
        found.append({"dense": dense, "pending": pending, "pushed": total, "bytes": traffic.bytes["dense"]})
    return found


@pytest.mark.parametrize(("world_size", "servers"), [(2, 0), (3, 1)])
def test_no_gradient_pushed_is_lost(world_size: int, servers: int) -> None:
    """With SGD the dense part at the end is that at the start less the rate times all pushed, but for what waits."""
    start = tables_of(make_async("asp", schedule=STEADY))
    names = ("hidden.weight", "hidden.bias", "out.weight", "out.bias")
    owners = range(world_size - servers if servers else 0, world_size)
    every = run_ranks(world_size, _pushed, servers)
    nbytes = {}
    for i, comms in enumerate(OPTIONS):
        ranks = [rank[i] for rank in every]
        pushed = np.concatenate([sum(rank["pushed"].get(owner, 0.0) for rank in ranks) for owner in owners])
        pending = ranks[0]["pending"]
        assert (len(pending) > 0) == (comms.name == "dct")
        waiting = np.concatenate([pending[n].ravel() for n in names]) if pending else 0.0
        moved = np.concatenate([(start[n].astype(np.float64) - ranks[0]["dense"][n]).ravel() for n in names])
        np.testing.assert_allclose(moved, 0.1 * (pushed - waiting), rtol=2e-3, atol=2e-4)
        assert comms.name != "dct" or np.abs(waiting).max() > 1e-3
        nbytes[comms.name] = sum(rank["bytes"] for rank in ranks)
    if servers:  # everything goes to the one owner, and comes from it
        assert nbytes["fp16"] * 4 * len(pushed) == nbytes["none"] * scaled_half.nbytes(len(pushed))
    assert nbytes["dct"] < nbytes["fp16"] < 0.6 * nbytes["none"]


def _taken_up(rank: int, world_size: int) -> dict[str, Any]:
    """What one mode left waiting, in engines without thresholds: the next step moves as if it had been sent."""
    engine, data = _engine("het", rank, world_size, DCT)
    for step in range(CUT):
        engine.step(iter(data[step : step + 1]))
    saved = save(engine)
    found = {"pending": {name: value.numpy() for name, value in saved["dense_pending"].items()}}
    plain, _ = _engine("het", rank, world_size, DenseComms())
    load(plain, saved, exact=True)
    plain.step(iter(data[CUT : CUT + 1]))
    plain._settle()
    found["with"] = {name: p.grad.numpy().copy() for name, p in plain._network.named_parameters()}
    load(plain, {**saved, "dense_pending": {}}, exact=True)
    plain.step(iter(data[CUT : CUT + 1]))
    plain._settle()
    found["without"] = {name: p.grad.numpy().copy() for name, p in plain._network.named_parameters()}
    return found


def _kept(rank: int, world_size: int, kind: str) -> dict[str, Any]:
    """What waits where a run is saved, where another one took it up, and where that was saved before it trained."""
    engine, data = _engine(kind, rank, world_size, DCT)
    for step in range(CUT):
        engine.step(iter(data[step : step + 1]))
    if isinstance(engine, AsyncEngine):
        engine.finish()
        engine._transport.barrier()
    saved, found = {**save(engine), "step": CUT}, {}
    found["saved"] = saved["dense_pending"]
    for comms in OPTIONS:
        other, again = (_engine(kind, rank, world_size, comms)[0] for _ in range(2))
        load(other, saved, exact=False)
        found[f"{comms.name}, taken up"] = save(other)["dense_pending"]
        load(again, save(other), exact=True)
        found[f"{comms.name}, again"] = save(again)["dense_pending"]
    return {name: {key: value.numpy() for key, value in pending.items()} for name, pending in found.items()}


@pytest.mark.parametrize("kind", ["bsp", "het", "asp, server"])
def test_what_waited_still_waits_where_a_run_is_saved_before_it_trains(kind: str) -> None:
    first, *_ = run_ranks(2, _kept, kind)
    for name, pending in first.items():
        assert pending.keys() == first["saved"].keys(), name
        for key, value in first["saved"].items():
            np.testing.assert_array_equal(pending[key], value, err_msg=f"{name}: {key}")
    assert any(np.abs(value).max() > 0 for value in first["saved"].values())


def test_what_waited_is_sent_by_a_run_without_thresholds() -> None:
    for rank in run_ranks(2, _taken_up):
        for name, waited in rank["pending"].items():
            np.testing.assert_allclose(rank["with"][name], rank["without"][name] + waited, rtol=1e-5, atol=1e-6)
            assert waited.size < 20 or np.abs(waited).max() > 0
