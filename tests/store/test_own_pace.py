"""Owners and copies where workers step at their own pace, without processes: bounds and losslessness by counting.

Every push adds 1 to a row that starts at 0 (SGD, lr 1, gradient -1): a value read says how many pushes it holds.
"""

import math
import random
import threading

import pytest
import torch

from hetrain.optim import RowOptimizer
from hetrain.planner.plan import Piece, Plan
from hetrain.store.ask import NO_GATE, Ask, RowsAsked
from hetrain.store.clocked_copies import ClockedCopies
from hetrain.store.dense_shard import DenseShard, shard_bounds, shard_state, whole_state
from hetrain.store.meetings import Meetings
from hetrain.store.owner import Owner
from hetrain.store.service import OwnerService
from hetrain.store.space import Placement, RowSpace
from hetrain.store.worker_clocks import ENDED, WorkerClocks
from hetrain.tables import Table

SGD, DIM, ROWS = RowOptimizer("sgd", 1.0, 1e-8), 4, 6


def make_service(workers, *, meetings=None, audit=False):
    table = Table("t", ROWS, DIM, ("f",), 0.0)
    space = RowSpace([table], DIM)
    placement = Placement(space, Plan("store", 1, (Piece("t", 0, 0, ROWS, 0, DIM),), frozenset(), {}), 1)
    owner = Owner(
        space, placement, 0, SGD, seed=0, device=torch.device("cpu"), held_back=False, audit=audit, workers=workers
    )
    dense = DenseShard(torch.zeros(5), lambda params: torch.optim.SGD(params, lr=1.0))
    clocks = WorkerClocks(workers)
    service = OwnerService([owner], dense, clocks, lambda _: 1.0, copies=True, audit=audit, meetings=meetings)
    return service, space, owner


def ask_of(worker, clock, *, push=None, fetch=None, gate=NO_GATE, begin=1, ended=False, seen=None):
    rows = torch.empty(0, dtype=torch.int64) if push is None else push
    wanted = torch.empty(0, dtype=torch.int64) if fetch is None else fetch
    part = RowsAsked(rows, torch.full((len(rows), DIM), -1.0), rows[:0] if seen is None else seen, wanted)
    dense = torch.empty(0) if push is None else torch.full((5,), -1.0)
    return Ask(worker, clock, 0 if push is None else 1, begin, gate, ended, True, dense, [part])


class Worker:
    """Reads and updates every row in every step, at whatever pace the test gives it."""

    def __init__(self, number, service, space, staleness, capacity):
        self.number, self.service, self.staleness = number, service, staleness
        self.copies = ClockedCopies(
            space, capacity, ROWS, staleness, SGD, seed=0, policy="lru", index="array", audit=False
        )
        self.clock, self.push, self.reading, self.answer = 0, None, None, None

    @property
    def parked(self):
        return self.reading is not None and self.answer is None

    def ask(self):
        self.reading = self.copies.begin(torch.arange(ROWS).repeat(2), self.clock)
        wanted = self.reading.rows[self.reading.fetched]
        gate = max(self.clock - self.staleness, 0) if self.staleness < math.inf else NO_GATE
        ask = ask_of(self.number, self.clock, push=self.push, fetch=wanted, gate=gate)
        self.service.serve(ask, lambda answer: setattr(self, "answer", answer))

    def train(self):
        """The values read, [ROWS] in row order."""
        answer, reading = self.answer, self.reading
        rows = answer.rows[0]
        tags = torch.full((len(rows.stored),), answer.slowest)
        self.copies.admit(reading, rows.stored, rows.value, rows.state, tags, rows.applied)
        read = reading.value[torch.argsort(reading.rows), 0].clone()
        self.copies.commit(reading, torch.full((ROWS, DIM), -1.0), 1.0)
        self.push, self.reading, self.answer = torch.arange(ROWS), None, None
        self.clock += 1
        return read


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("staleness", [0, 1, 4])
@pytest.mark.parametrize("capacity", [0, 3, ROWS])
def test_no_read_is_older_than_the_bound_and_the_lead_reaches_it(seed, staleness, capacity):
    """On random schedules: a read at clock c holds all c own updates and every other worker's first c - s."""
    chance, steps = random.Random(seed), 40
    service, space, owner = make_service(3)
    workers = [Worker(n, service, space, staleness, capacity) for n in range(3)]
    weight = [5, 1, 1]  # the first is eager
    while any(w.clock < steps for w in workers):
        worker = chance.choices(workers, weight)[0]
        if worker.clock == steps or worker.parked:
            continue
        if worker.reading is None:
            worker.ask()
            continue
        clock, others = worker.clock, sum(w.clock for w in workers if w is not worker)
        read = worker.train()
        assert (read >= clock + 2 * max(0, clock - staleness)).all()
        assert (read <= clock + others).all()
        assert clock - min(w.clock for w in workers if w is not worker) <= staleness
    assert service.clocks.lead_max == staleness
    assert max(w.copies.age_max for w in workers) <= staleness
    if capacity == ROWS and staleness == 4:
        assert sum(w.copies.counters.hits for w in workers) > 0
    for worker in workers:
        service.serve(ask_of(worker.number, worker.clock, push=worker.push, begin=0, ended=True), lambda _: None)
    assert (owner.value == 3 * steps).all()
    assert (service._dense.value == 3 * steps).all()
    assert service.clocks.slowest == ENDED


@pytest.mark.parametrize("staleness", [0, 4, math.inf])
@pytest.mark.parametrize("capacity", [0, 3, ROWS])
def test_a_row_that_was_never_read_is_fetched(staleness, capacity):
    """Where no copy is there, none is young enough, not even without a bound."""
    service, space, _ = make_service(2)
    service.serve(ask_of(1, 0, push=torch.arange(ROWS), begin=0), lambda _: None)
    worker = Worker(0, service, space, staleness, capacity)
    worker.ask()
    assert worker.train().tolist() == [1.0] * ROWS
    counters = worker.copies.counters
    assert (counters.hits, counters.misses, counters.invalid) == (0, ROWS, 0)
    assert worker.copies.age_max == 0


def test_pushes_of_many_threads_are_neither_lost_nor_mixed():
    service, _, owner = make_service(8)
    reads = []

    def work(number):
        for clock in range(1, 201):
            push = torch.arange(number % 2, ROWS, 2)
            fetch = torch.arange(ROWS)
            ask = ask_of(number, clock, push=push, fetch=fetch)
            service.serve(ask, lambda answer: reads.append(answer.rows[0]))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert (owner.value == 800).all()
    assert (service._dense.value == 1600).all()
    assert len(reads) == 1600
    for rows in reads:  # a push covers all even or all odd rows: no read saw a part of one
        whole = torch.zeros(ROWS)
        whole[rows.stored] = rows.value[:, 0]
        assert len(set(whole[::2].tolist())) == 1
        assert len(set(whole[1::2].tolist())) == 1
        assert (rows.value == rows.value[:, :1]).all()


def test_updates_missed_are_counted():
    service, _, _ = make_service(2, audit=True)
    rows = torch.arange(ROWS)
    answers = []
    service.serve(ask_of(0, 0, fetch=rows), answers.append)
    assert not answers[0].rows[0].stored.any()
    for clock in (1, 2, 3):
        service.serve(ask_of(1, clock, push=rows[:2], fetch=rows), answers.append)
    assert service.missed_pushes_max == 0
    service.serve(ask_of(0, 1, push=rows, seen=torch.zeros(ROWS, dtype=torch.int64)), answers.append)
    assert (service.missed_updates_max, service.missed_pushes_max) == (3, 3)
    assert answers[3].rows[0].applied.tolist() == [3, 3]


def test_the_gate_parks_and_opens_and_a_parked_read_can_be_withdrawn():
    service, _, _ = make_service(2)
    answers = []
    service.serve(ask_of(0, 2, gate=1), answers.append)
    assert not answers
    service.serve(ask_of(1, 1, gate=NO_GATE), answers.append)
    assert [(a.granted, a.slowest) for a in answers] == [(True, 1), (True, 1)]
    service.serve(ask_of(0, 4, gate=3), answers.append)
    assert len(answers) == 2
    service.withdraw(0, 0)
    assert not answers[2].granted
    service.withdraw(0, 7)
    late = ask_of(0, 4, gate=3)
    late.number = 7
    service.serve(late, answers.append)  # which its withdrawal overtook
    assert not answers[3].granted
    service.serve(ask_of(1, 2, begin=0, ended=True), answers.append)
    service, _, _ = make_service(2)
    next_one = ask_of(0, 9, gate=8)
    next_one.number = 8
    service.serve(next_one, answers.append)
    told = len(answers)
    service.withdraw(0, 7)  # late: of one before
    assert len(answers) == told
    service.serve(ask_of(1, 8, begin=0), answers.append)
    assert answers[-2:][0].granted
    next_one.number = 9
    service, _, _ = make_service(1)
    service.serve(next_one, answers.append)
    assert answers[-1].granted


def test_meetings_fall_on_an_exact_count_and_need_everybody():
    meetings, told = Meetings(3, 2), []
    meetings.plan(lambda begun: begun + 20)
    assert [meetings.begin(8), meetings.begin(8), meetings.begin(8), meetings.begin(8)] == [True, True, True, False]
    assert meetings.attend(0, told.append) == []
    assert meetings.missing == [1, 2]
    assert meetings.attend(2, told.append) == []
    for tell in meetings.attend(1, told.append):
        tell()
    assert [(v.begun, v.signal, v.ended) for v in told] == [(24, 0, False)] * 3
    assert meetings.begin(8)
    meetings.stop(15)
    assert not meetings.begin(8)
    meetings.end(0)
    meetings.end(1)
    assert meetings.first_end[0] == 32
    told.clear()
    for rank in range(3):
        for tell in meetings.attend(rank, told.append):
            tell()
    assert [(v.begun, v.signal, v.ended) for v in told] == [(32, 15, True)] * 3


@pytest.mark.parametrize("name", ["SGD", "Adagrad", "Adam", "AdamW"])
@pytest.mark.parametrize("owners", [1, 2, 3, 7])
def test_shards_train_as_the_whole_and_their_states_make_up_its_state(name, owners):
    shapes = [torch.Size([2, 2]), torch.Size([]), torch.Size([1])]

    def make(params):
        return getattr(torch.optim, name)(params, lr=0.1, weight_decay=0.01, fused=True)

    generator = torch.Generator().manual_seed(3)
    start = torch.randn(6, generator=generator)
    whole = [torch.nn.Parameter(p.view(s).clone()) for p, s in zip(start.split([4, 1, 1]), shapes, strict=True)]
    optimizer, bounds = make(whole), shard_bounds(6, owners)
    shards = [DenseShard(start[a:b], make) for a, b in bounds]
    for step in range(5):
        gradient = torch.randn(6, generator=generator)
        for p, g in zip(whole, gradient.split([4, 1, 1]), strict=True):
            p.grad = g.view(p.shape).clone()
        optimizer.param_groups[0]["lr"] = 0.1 * 0.5**step
        optimizer.step()
        for shard, (a, b) in zip(shards, bounds, strict=True):
            shard.push(gradient[a:b].clone(), 0.5**step)
    torch.testing.assert_close(torch.cat([s.value for s in shards]), torch.cat([p.detach().view(-1) for p in whole]))
    state = whole_state([shard.state() for shard in shards], shapes)
    expected = optimizer.state_dict()["state"]
    assert state.keys() == {k for k, v in expected.items() if any(isinstance(t, torch.Tensor) for t in v.values())}
    for i, values in state.items():
        for key, value in values.items():
            torch.testing.assert_close(value, expected[i][key])
    for shard, (a, b) in zip(shards, bounds, strict=True):
        fresh = DenseShard(torch.zeros(b - a), make)
        fresh.load(shard.value, shard_state(state, shapes, (a, b)))
        gradient = torch.ones(b - a)
        fresh.push(gradient, 1.0)
        shard.push(gradient, 1.0)
        assert torch.equal(fresh.value, shard.value)
