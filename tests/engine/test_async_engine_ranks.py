"""Asynchronous engines on real processes over torch.distributed.rpc."""

import os
import time

import numpy as np
import pytest
import torch

from hetrain.config import ScheduleConfig
from hetrain.errors import LostPeerError, SilentPeerError
from hetrain.store.worker_clocks import WorkerClocks
from hetrain.telemetry import Traffic
from tests.engine.async_cases import make_async
from tests.engine.held import tables_of, whole_tables
from tests.engine.plain_bags import PlainBags
from tests.engine.store_cases import SEED, batches, make_tables, train
from tests.ranks import run_ranks

STEADY = ScheduleConfig()


def recorded(engine):
    """Every gradient this rank pushes, by owner: (rows, gradient) per width group, and the dense one."""
    send, found = engine._asking.send, []

    def sending(asks, *rest):
        found.extend(
            (owner, ask.dense.clone(), [(r.push_rows.clone(), r.push_gradient.clone()) for r in ask.rows])
            for owner, ask in asks
            if ask.pushed
        )
        return send(asks, *rest)

    engine._asking.send = sending
    return found


def all_pushed(rank, world_size, mode, servers, delay_s):
    workers = world_size - servers
    engine = make_async(mode, "sgd", dense="sgd", servers=servers, capacity=0.3, staleness=2, schedule=STEADY)
    pushes = recorded(engine)
    data = batches(rank, workers, multi_hot=True) * 3 if rank < workers else []
    steps = 0
    for _ in data:
        time.sleep(delay_s * (rank == 0))
        steps += engine.step(iter(data[steps:])) is not None
    assert engine.step(iter(())) is None
    engine.finish()
    engine._transport.barrier()
    plain = [(owner, dense.numpy(), [(r.numpy(), g.numpy()) for r, g in rows]) for owner, dense, rows in pushes]
    tables = tables_of(engine)
    engine._transport.barrier()
    return plain, tables, engine.report(), steps


@pytest.mark.parametrize(("world_size", "servers"), [(2, 0), (3, 0), (3, 1), (4, 2)])
@pytest.mark.parametrize("mode", ["asp", "ssp"])
def test_nothing_pushed_is_lost(mode, world_size, servers):
    """With SGD an owner's rows at the end are its rows at the start less the rate times all gradients pushed to it."""
    ranks = run_ranks(world_size, all_pushed, mode, servers, 0.003)
    tables = make_tables((8, 4, 8))
    expected = [weight.detach().double().numpy().copy() for weight in PlainBags(tables, SEED).weights]
    groups = [[(0, 0), (2, 50)], [(1, 0)]]  # (table, first global row) by embedding dim
    owners = range(world_size - servers if servers else 0, world_size)
    dense = dict.fromkeys(owners, 0.0)
    count = 0
    for pushes, _, _, _ in ranks:
        for owner, gradient, parts in pushes:
            count += 1
            dense[owner] = dense[owner] + gradient.astype(np.float64)
            for (rows, values), members in zip(parts, groups, strict=True):
                assert len(np.unique(rows)) == len(rows)
                for table, first in members:
                    here = (rows >= first) & (rows < first + len(expected[table]))
                    expected[table][rows[here] - first] -= 0.3 * values[here].astype(np.float64)
    assert count >= sum(steps for *_, steps in ranks) * len(owners)
    found = whole_tables([tables for _, tables, _, _ in ranks])
    for i, value in enumerate(expected):
        np.testing.assert_allclose(found[f"t{i}.value"], value, rtol=1e-4, atol=1e-5)
    start = tables_of(make_async("asp", schedule=STEADY))
    names = ("hidden.weight", "hidden.bias", "out.weight", "out.bias")
    moved = np.concatenate([(start[n].astype(np.float64) - found[n]).ravel() for n in names])
    np.testing.assert_allclose(moved, 0.1 * np.concatenate([dense[owner] for owner in owners]), rtol=1e-3, atol=1e-5)
    for _, other, _, _ in ranks:  # every rank, a server too, saw the same dense part
        for name in names:
            np.testing.assert_array_equal(other[name], found[name])


def paced(rank, world_size, staleness, slow):
    """Own and slowest clock at every read for training that this rank, as an owner, answered."""
    trace, reads = [], WorkerClocks.reads

    def traced(clocks, worker):
        slowest = reads(clocks, worker)
        trace.append((worker, clocks.clocks[worker], min(clocks.clocks)))
        return slowest

    WorkerClocks.reads = traced
    engine = make_async("ssp", capacity=1.0, staleness=staleness, schedule=STEADY, audit_every=1)
    engine._transport.barrier()
    data = iter(batches(rank, world_size, steps=25))
    while True:
        if rank == slow:
            time.sleep(0.01)
        if engine.step(data) is None:
            break
    engine._transport.barrier()
    report = engine.report()
    engine._transport.barrier()
    return trace, report


@pytest.mark.parametrize("staleness", [0, 1, 4])
def test_the_lead_is_never_above_the_bound_and_reaches_it(staleness):
    ranks = run_ranks(2, paced, staleness, 1)
    for trace, report in ranks:
        leads = [own - min(own, slowest) for _, own, slowest in trace]
        assert max(leads) == staleness
        assert {worker for worker, _, _ in trace} == {0, 1}
        for worker in (0, 1):  # one read per step
            clocks = [own for number, own, _ in trace if number == worker]
            assert clocks == sorted(set(clocks))
        assert report["lead_max"] == staleness
        assert report["observed_staleness_max"] <= staleness
        assert report["missed_updates_max"] <= 2 * staleness + 1
    assert max(report["observed_staleness_max"] for _, report in ranks) == staleness
    if staleness == 4:
        assert ranks[0][1]["cache"]["hits"] > 0


def left_behind(rank, world_size, mode, timeout_s):
    engine = make_async(mode, staleness=1, capacity=0, schedule=STEADY, timeout_s=timeout_s)
    data = iter(batches(rank, world_size))
    if rank == 1:
        engine.step(data)
        time.sleep(3 * timeout_s + 1)
        return None
    try:
        while engine.step(data) is not None:
            pass
        engine.accord.meet(None)
    except SilentPeerError as error:
        return str(error)
    return "no error"


def test_a_wait_at_the_gate_names_the_worker_behind():
    assert "rank 1 (at step 0), behind this rank's step 2" in run_ranks(2, left_behind, "ssp", 1.5)[0]


def test_a_wait_for_a_meeting_names_the_rank_that_does_not_come():
    told = run_ranks(2, left_behind, "asp", 1.0)[0]
    assert "gave up waiting for rank 1, which began no step for launch.timeout_s=1" in told


def counted(rank, world_size, mode):
    traffic = Traffic()
    engine = make_async(mode, "rowwise_adagrad", capacity=0.5, staleness=3, traffic=traffic)
    losses = train(engine, iter(batches(rank, world_size)))
    engine._transport.barrier()
    before = dict(traffic.bytes)
    with torch.no_grad(), engine.evaluating():
        for batch in batches(rank, world_size)[:3]:
            engine.predict(batch)
    engine._transport.barrier()
    return losses, before, traffic.bytes, traffic.aside, engine.report()


@pytest.mark.parametrize("mode", ["asp", "ssp"])
def test_bytes_are_on_their_channels_and_looking_is_aside(mode):
    for losses, before, after, aside, report in run_ranks(2, counted, mode):
        assert np.isfinite(losses).all()
        assert before == after
        assert aside["rows_pull"] > 0
        assert all(before[channel] > 0 for channel in ("ids", "rows_push", "rows_pull", "clocks", "dense"))
        assert before["pooled_fwd"] == before["audit"] == 0
        assert (report["cache"]["hits"] > 0) == (mode == "ssp")


def dying(rank, world_size, mode, told):
    engine = make_async(mode, staleness=4, capacity=0, schedule=STEADY)
    data = iter(batches(rank, world_size) * 50)
    try:
        for step in range(600):
            if rank == 1 and step == 3:
                os._exit(9)
            engine.step(data)
    except LostPeerError as error:
        told.write_text(str(error))


@pytest.mark.parametrize("mode", ["asp", "ssp"])
def test_an_owner_that_dies_is_named(mode, tmp_path):
    with pytest.raises(EOFError):
        run_ranks(2, dying, mode, tmp_path / "told")
    assert (tmp_path / "told").read_text().startswith("lost rank 1, which this rank had asked")
