"""HET's Algorithms 1 to 3 one key at a time, in dicts: slow, obvious, and what the vectorised store must equal.

Written from the paper and the project's order of a round, not from the store's code; shared with it are
only the two bounds (hetrain.consistency), the initial rows and the constant HOT of light LFU.
"""

import math
from dataclasses import dataclass, field

import numpy as np

from hetrain.consistency import breaks_others_bound, breaks_own_bound, staleness_bound
from hetrain.store import policy as policy_module


@dataclass
class Optimizer:
    name: str
    lr: float
    eps: float

    def update(self, value, state, gradient):
        """The new (value [D], state [S])."""
        if self.name == "sgd":
            return value - self.lr * gradient, state
        squares = gradient * gradient
        state = state + (squares.mean(keepdims=True) if self.name == "rowwise_adagrad" else squares)
        return value - self.lr * gradient / (np.sqrt(state) + self.eps), state

    def denominator(self, state):
        return 1.0 if self.name == "sgd" else np.sqrt(state) + self.eps


@dataclass
class Master:
    """A row at its owner."""

    value: np.ndarray
    state: np.ndarray
    clock: int = 0
    updates: frozenset = frozenset()  # (worker, step) of every update applied


@dataclass
class Copy:
    """A row at a worker."""

    value: np.ndarray
    state: np.ndarray
    base_value: np.ndarray
    base_state: np.ndarray
    c_s: int
    c_c: int
    fetched_updates: frozenset
    own_updates: list = field(default_factory=list)
    used: tuple = ()  # (step, position of the last lookup)
    count: int = 0
    reached: tuple = ()  # `used` of the step in which `count` took its value


@dataclass
class Push:
    row: int
    value: np.ndarray  # gradient or difference
    state: np.ndarray
    denominator: object  # of the worker's own state
    clock: int
    updates: list


@dataclass
class Message:
    """What one worker sends in a round, to all owners."""

    pushes: list = field(default_factory=list)
    fetches: list = field(default_factory=list)
    checks: list = field(default_factory=list)  # (row, c_c)


class Worker:
    def __init__(self, rank, capacity, policy, staleness, optimizer):
        self.rank, self.capacity, self.policy, self.optimizer = rank, capacity, policy, optimizer
        self.staleness, self.bound = staleness, staleness_bound(staleness)
        self.copies = {}
        self.staged = []
        self.victims = []
        self.counters = dict.fromkeys(("hits", "misses", "invalid", "own_invalid", "evictions"), 0)

    def push_of(self, row):
        copy = self.copies[row]
        return Push(
            row,
            copy.value - copy.base_value,
            copy.state - copy.base_state,
            self.optimizer.denominator(copy.state),
            copy.c_c,
            list(copy.own_updates),
        )

    def read(self, lookups):
        """Read(K): the message of this round."""
        last = {row: position for position, row in enumerate(lookups)}
        self.reading = sorted(last, key=last.get)
        self.last = last
        message = Message(pushes=self.staged)
        self.staged = []
        missing = [row for row in self.reading if row not in self.copies]
        own_invalid = []
        for row in self.reading:
            if row in missing:
                continue
            copy = self.copies[row]
            if breaks_own_bound(copy.c_s, copy.c_c, self.bound):
                own_invalid.append(row)
                message.pushes.append(self.push_of(row))
            elif math.isinf(self.staleness):
                self.counters["hits"] += 1
            else:
                message.checks.append((row, copy.c_c))
        message.fetches = missing + own_invalid
        self.counters["misses"] += len(missing)
        self.counters["own_invalid"] += len(own_invalid)
        return message

    def fetched(self, row, master):
        self.copies[row] = Copy(
            master.value, master.state, master.value, master.state, master.clock, master.clock, master.updates,
            *self._history(row),
        )  # fmt: skip

    def _history(self, row):
        """A row that was cached all along keeps its place in the policy."""
        if row not in self.copies:
            return ()
        old = self.copies[row]
        return ([], old.used, old.count, old.reached)

    def rebased(self, row, master):
        old = self.copies[row]
        push = self.push_of(row)
        self.fetched(row, master)
        copy = self.copies[row]
        copy.state = master.state + push.state
        copy.value = master.value + push.value * push.denominator / self.optimizer.denominator(copy.state)
        copy.c_c = master.clock + (old.c_c - old.c_s)
        copy.own_updates = list(old.own_updates)
        self.counters["invalid"] += 1

    def write(self, step, gradients):
        """Write(K, G): Update and Clock each key, then Evict()."""
        for row in self.reading:
            copy = self.copies[row]
            copy.c_c += 1
            copy.own_updates.append((self.rank, step))
            copy.used = (step, self.last[row])
            if copy.count < policy_module.HOT:
                copy.count += 1
                copy.reached = copy.used
            if self.capacity == 0:
                push = Push(row, gradients[row], np.zeros(0, np.float32), 1.0, copy.c_c, [(self.rank, step)])
                self.staged.append(push)
            else:
                copy.value, copy.state = self.optimizer.update(copy.value, copy.state, gradients[row])
        if self.capacity == 0:
            self.copies = {}
        self.victims = []
        while len(self.copies) > self.capacity:
            self.evict()

    def evict(self):
        def lru(row):
            return self.copies[row].used

        def lfu(row):
            return self.copies[row].count, self.copies[row].reached

        victim = min(self.copies, key=lru if self.policy == "lru" else lfu)
        if self.copies[victim].c_c > self.copies[victim].c_s:
            self.staged.append(self.push_of(victim))
        del self.copies[victim]
        self.victims.append(victim)
        self.counters["evictions"] += 1

    def pending(self):
        held = [self.push_of(row) for row, copy in self.copies.items() if copy.c_c > copy.c_s]
        return Message(pushes=self.staged + held)


class Reference:
    """All owners as one dict of masters, and the workers."""

    def __init__(self, initial, state_width, workers, clock_rule, optimizer):
        self.masters = {
            row: Master(value, np.zeros(state_width, np.float32)) for row, value in enumerate(np.asarray(initial))
        }
        self.workers, self.clock_rule, self.optimizer = workers, clock_rule, optimizer
        self.held_back = workers[0].capacity > 0
        self.all_updates = {row: set() for row in self.masters}
        self.missed = 0

    def read(self, batches):
        """One round; returns the messages by worker."""
        messages = [worker.read(batch) for worker, batch in zip(self.workers, batches, strict=True)]
        invalid = [
            [row for row, c_c in m.checks if breaks_others_bound(self.masters[row].clock, c_c, worker.bound)]
            for worker, m in zip(self.workers, messages, strict=True)
        ]
        before = {row: master.clock for row, master in self.masters.items()}
        self.apply(messages)
        for worker, message, bad in zip(self.workers, messages, invalid, strict=True):
            for row in message.fetches:
                worker.fetched(row, self.masters[row])
            for row in bad:
                worker.rebased(row, self.masters[row])
            worker.counters["hits"] += len(message.checks) - len(bad)
            self.assert_bounds(worker, before)
        return messages

    def assert_bounds(self, worker, clocks_before):
        for row in worker.reading:
            copy = worker.copies[row]
            assert not breaks_own_bound(copy.c_s, copy.c_c, worker.bound)
            assert not breaks_others_bound(clocks_before[row], copy.c_c, worker.bound)
            known = copy.fetched_updates | set(copy.own_updates)
            self.missed = max(self.missed, len(self.all_updates[row] - known))

    def write(self, step, gradients):
        """`gradients`: by worker, row -> [D]."""
        for worker, gradient in zip(self.workers, gradients, strict=True):
            worker.write(step, gradient)
            for row in worker.reading:
                self.all_updates[row].add((worker.rank, step))

    def apply(self, messages):
        pushes = [push for message in messages for push in message.pushes]
        if self.held_back:
            for push in pushes:
                self.masters[push.row].state = self.masters[push.row].state + push.state
            for push in pushes:
                master = self.masters[push.row]
                scale = push.denominator / self.optimizer.denominator(master.state)
                master.value = master.value + push.value * scale
        else:
            for row in dict.fromkeys(push.row for push in pushes):
                gradient = sum(push.value for push in pushes if push.row == row)
                master = self.masters[row]
                master.value, master.state = self.optimizer.update(master.value, master.state, gradient)
        for push in pushes:
            master = self.masters[push.row]
            if self.clock_rule == "max":
                master.clock = max(master.clock, push.clock)
            else:
                master.clock += len(push.updates)
            master.updates = master.updates | set(push.updates)

    def flush(self):
        self.apply([worker.pending() for worker in self.workers])
