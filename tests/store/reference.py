"""The store's protocol one key at a time, in dicts: slow, obvious, and what the vectorised store must equal.

Written from the paper (HET's Algorithms 1 to 3) and the project's order of a round, not from the store's code; shared
with it are only the two bounds (hetrain.consistency), the initial rows and the constant HOT of light LFU.

Every update is a pair (worker, step). Masters and copies carry the set of the updates in them, so that what the
clocks promise is checked against what really is in a row, at every read.
"""

import math
from dataclasses import replace

import numpy as np

from hetrain.consistency import breaks_others_bound, breaks_own_bound, staleness_bound
from hetrain.store import policy as policy_module
from tests.store.reference_records import NO_STATE, Answer, Copy, Master, Message, Plan, Push


class Worker:
    def __init__(self, rank, capacity, policy, staleness, optimizer, directory, late_leg):
        """`directory`: only copies that are doubted are checked."""
        self.late_leg = late_leg
        self.rank, self.capacity, self.policy, self.optimizer = rank, capacity, policy, optimizer
        self.bound = staleness_bound(staleness)
        self.checks_all, self.may_doubt = (math.isfinite(staleness) and on for on in (not directory, directory))
        self.copies = {}
        self.doubts = {}  # row: the clock its owner gave notice of
        self.staged = []
        self.victims = []  # of the last commit
        self.current = None  # the plan that was admitted and not yet committed
        self.next = None  # the plan that has begun and is not yet admitted
        self.late = None  # the late leg of it
        self.hot = set()  # rows of the batch in flight that somebody reads next (capacity 0)
        self.counters = dict.fromkeys(("hits", "misses", "invalid", "own_invalid", "evictions"), 0)
        turns = ("noticed", "doubted", "early", "early_in_flight", "spared", "ignored", "late", "hot", "cold")
        self.seen = dict.fromkeys((*turns, "late_elsewhere", "evicted_before_late"), 0)

    def push_of(self, row):
        copy = self.copies[row]
        return Push(
            row,
            copy.value - copy.base_value,
            copy.state - copy.base_state,
            self.optimizer.denominator(copy.state),
            copy.c_c,
            tuple(copy.pending),
        )

    def in_flight(self, row):
        """Whether an update of the row is being computed, which its copy lacks."""
        return self.current is not None and row in self.current.last

    def begin(self, lookups):
        """Read(K), first half: the message of this round."""
        last = {row: position for position, row in enumerate(lookups)}
        plan = self.next = Plan(last, sorted(last, key=last.get), Message(pushes=self.staged))
        self.staged = []
        for row in plan.reading:
            if self.late_leg and self.capacity > 0 and self.in_flight(row):
                plan.late.append(row)
            elif self.capacity > 0 and row in self.copies:
                self.ask(plan, row)
            else:
                plan.missing.append(row)
        plan.message.fetches = plan.missing + plan.own_invalid + plan.noticed
        return plan.message

    def announced(self, late, hot):
        """Capacity 0: which rows begun have to wait, and which of the batch in flight anybody reads next."""
        plan = self.next
        plan.late = [row for row in plan.missing if row in late]
        plan.missing = [row for row in plan.missing if row not in late]
        self.hot = hot

    def begin_late(self):
        """After the commit of the batch in flight: the message about the rows that waited for it."""
        late, plan = self.next.late, Plan({}, [], Message())
        self.late = plan
        if self.capacity == 0:
            plan.message.pushes = [push for push in self.staged if push.row in self.hot]
            self.staged = [push for push in self.staged if push.row not in self.hot]
            plan.missing = late
            self.seen["hot"] += len(plan.message.pushes)
            self.seen["cold"] += len(self.staged)
            self.seen["late_elsewhere"] += not self.hot <= set(late)
        else:
            self.seen["evicted_before_late"] += len(late) > 0 and len(self.staged) > 0
            for row in late:
                self.ask(plan, row)
        plan.message.fetches = plan.missing + plan.own_invalid + plan.noticed
        self.seen["late"] += len(late)
        return plan.message

    def ask(self, plan, row):
        """A row that is held: is it valid at the clock it will be read with?"""
        copy = self.copies[row]
        c = copy.c_c + self.in_flight(row)
        doubt = self.doubts.pop(row, None)
        if breaks_own_bound(copy.c_s, c, self.bound):
            plan.own_invalid.append(row)
            plan.message.pushes.append(self.push_of(row))
            copy.base_value, copy.base_state, copy.c_s = copy.value, copy.state, copy.c_c
            copy.base_updates, copy.pending = copy.base_updates | set(copy.pending), []
            plan.message.again[row] = copy.base_updates
            self.seen["early"] += 1
            self.seen["early_in_flight"] += self.in_flight(row)
        elif doubt is not None and breaks_others_bound(doubt, c, self.bound):
            plan.noticed.append(row)
            self.seen["noticed"] += 1
        elif doubt is not None or self.checks_all:
            plan.message.checks.append((row, c))
            self.seen["doubted"] += doubt is not None
        else:
            plan.silent += 1

    def admit(self, answer):
        """Read(K), second half."""
        plan, self.current, self.next = self.next, self.next, None
        self.take_up(plan, answer)

    def admit_late(self, answer):
        plan, self.late = self.late, None
        self.take_up(plan, answer)

    def take_up(self, plan, answer):
        for row in plan.missing:
            m = answer.fetched[row]
            self.copies[row] = Copy(m.value, m.state, m.value, m.state, m.clock, m.clock, m.updates)
        for row in plan.own_invalid + plan.noticed:
            self.rebase(row, answer.fetched[row])
        for row, master in answer.invalid.items():
            self.rebase(row, master)
        self.counters["misses"] += len(plan.missing)
        self.counters["own_invalid"] += len(plan.own_invalid)
        self.counters["invalid"] += len(plan.noticed) + len(answer.invalid)
        self.counters["hits"] += plan.silent + len(plan.message.checks) - len(answer.invalid)
        self.doubts |= {row: clock for row, clock in answer.notices.items() if row in self.copies}
        self.seen["ignored"] += sum(row not in self.copies for row in answer.notices)

    def rebase(self, row, master):
        """The owner's row with what is pending now on top."""
        copy, push = self.copies[row], self.push_of(row)
        copy.base_value, copy.base_state, copy.base_updates = master.value, master.state, master.updates
        copy.state = master.state + push.state
        copy.value = master.value + push.value * push.denominator / self.optimizer.denominator(copy.state)
        copy.c_s, copy.c_c = master.clock, master.clock + len(copy.pending)

    def commit(self, step, gradients):
        """Write(K, G): Update and Clock each key, then Evict(); rows that the next plan reads stay."""
        plan, self.current = self.current, None
        for row in plan.reading:
            copy = self.copies[row]
            copy.c_c += 1
            copy.pending.append((self.rank, step))
            self.use(row, (step, plan.last[row]))
            if self.capacity == 0:
                self.staged.append(Push(row, gradients[row], NO_STATE, 1.0, copy.c_c, ((self.rank, step),)))
            else:
                copy.value, copy.state = self.optimizer.update(copy.value, copy.state, gradients[row])
        if self.capacity == 0:
            self.copies = {}
        self.evict()

    def use(self, row, when):
        copy = self.copies[row]
        copy.used = when
        if self.policy != "light_lfu" or copy.count < policy_module.HOT:
            copy.count += 1
            copy.reached = when

    def evict(self):
        def order(row):
            copy = self.copies[row]
            return copy.used if self.policy == "lru" else (copy.count, copy.reached)

        excess = max(0, len(self.copies) - self.capacity)
        spared = self.next.last if self.next else {}
        ordered = sorted(self.copies, key=order)
        self.victims = [row for row in ordered if row not in spared][:excess]
        self.seen["spared"] += self.victims != ordered[:excess]
        for victim in self.victims:
            if self.copies[victim].c_c > self.copies[victim].c_s:
                self.staged.append(self.push_of(victim))
            del self.copies[victim]
            self.doubts.pop(victim, None)
            self.counters["evictions"] += 1

    def forget_read(self, step):
        """The batch that was admitted is never computed: its copies lack the update that owners count on.

        They were used, by ascending row, and are doubted; an empty cache keeps none.
        """
        plan, self.current = self.current, None
        if self.capacity == 0:
            self.copies = {}
        for row in sorted(plan.last) if self.capacity else []:
            self.use(row, (step, row))
            if self.may_doubt:
                self.doubts.setdefault(row, 0)
        self.evict()

    def pending(self):
        held = [self.push_of(row) for row, copy in self.copies.items() if copy.c_c > copy.c_s]
        return Message(pushes=self.staged + held)


class Reference:
    """All owners as one dict of masters, and the workers."""

    def __init__(self, initial, state_width, workers, clock_rule, optimizer, notices):
        """`notices`: owners give notice of copies that may be invalid."""
        nothing = np.zeros(state_width, np.float32)
        self.masters = {row: Master(value, nothing) for row, value in enumerate(np.asarray(initial))}
        self.workers, self.clock_rule, self.optimizer = workers, clock_rule, optimizer
        self.held_back = workers[0].capacity > 0
        self.bound = workers[0].bound
        self.directory = notices
        self.holders = {row: {} for row in self.masters}  # worker: L
        self.all_updates = {row: set() for row in self.masters}
        self.missed = 0
        self.flight = [[] for _ in workers]  # the rows that each announced last (capacity 0, with late legs)

    def begin(self, batches):
        """The messages by worker."""
        return [worker.begin(batch) for worker, batch in zip(self.workers, batches, strict=True)]

    def announce(self):
        """Capacity 0: what has to wait. By worker whether each row begun is late, each row in flight hot."""
        begun = [worker.next.reading for worker in self.workers]
        flying, read = (set().union(*batches) for batches in (self.flight, begun))
        late = [[row in flying for row in batch] for batch in begun]
        hot = [[row in read for row in batch] for batch in self.flight]
        for worker, in_flight in zip(self.workers, self.flight, strict=True):
            worker.announced(flying, read & set(in_flight))
        self.flight = begun
        return late, hot

    def begin_late(self):
        """The messages of the late leg by worker."""
        return [worker.begin_late() for worker in self.workers]

    def serve(self, messages, late_leg=False):
        """One round, or its late leg, at the owners; the answers by worker."""
        if not late_leg:  # what a read is promised is about the clocks before both legs
            self.before = dict(self.masters)
        answers = [Answer() for _ in self.workers]
        for message, answer in zip(messages, answers, strict=True):
            broken = [r for r, c in message.checks if breaks_others_bound(self.masters[r].clock, c, self.bound)]
            answer.invalid = dict.fromkeys(broken)
        self.apply(messages)
        for rank, (message, answer) in enumerate(zip(messages, answers, strict=True)):
            answer.fetched = {row: self.masters[row] for row in message.fetches}
            answer.invalid = {row: self.masters[row] for row in answer.invalid}
            for row, master in answer.fetched.items():  # neither what the worker can make, nor what it has
                waits = not late_leg and not self.held_back and row in self.workers[rank].next.late
                answer.sent[row] = master.touched and master.updates != message.again.get(row) and not waits
            if self.directory:
                reported = {row: c for row, c in message.checks if row not in answer.invalid}
                given = {row: master.clock for row, master in (answer.fetched | answer.invalid).items()}
                for row, clock in (reported | given).items():
                    self.holders[row][rank] = clock + 1  # at its next read: this read's batch updates it
        if self.directory:
            self.notify(answers, {push.row for message in messages for push in message.pushes})
        return answers

    def notify(self, answers, pushed):
        for row in pushed:
            for rank, known in list(self.holders[row].items()):
                if breaks_others_bound(self.masters[row].clock, known, self.bound):
                    answers[rank].notices[row] = self.masters[row].clock
                    del self.holders[row][rank]

    def apply(self, messages):
        pushes = [(rank, push) for rank, message in enumerate(messages) for push in message.pushes]
        if self.held_back:
            self.add_differences([push for _, push in pushes])
        else:
            self.step_gradients([push for _, push in pushes])
        for rank, push in pushes:
            master = self.masters[push.row]
            assert not master.updates & set(push.updates), "applied twice"
            clock = max(master.clock, push.clock) if self.clock_rule == "max" else master.clock + len(push.updates)
            updates = master.updates | set(push.updates)
            self.masters[push.row] = replace(master, clock=clock, updates=updates, touched=True)
            self.holders[push.row].pop(rank, None)

    def add_differences(self, pushes):
        for push in pushes:
            master = self.masters[push.row]
            self.masters[push.row] = replace(master, state=master.state + push.state)
        for push in pushes:
            master = self.masters[push.row]
            scale = push.denominator / self.optimizer.denominator(master.state)
            self.masters[push.row] = replace(master, value=master.value + push.value * scale)

    def step_gradients(self, pushes):
        for row in dict.fromkeys(push.row for push in pushes):
            gradient = sum(push.value for push in pushes if push.row == row)
            master = self.masters[row]
            value, state = self.optimizer.update(master.value, master.state, gradient)
            self.masters[row] = replace(master, value=value, state=state)

    def forget_read(self, step):
        """The batch read ahead does not come."""
        self.flight = [[] for _ in self.workers]
        for worker in self.workers:
            worker.forget_read(step)

    def admit(self, answers):
        """The answers arrive."""
        for worker, answer in zip(self.workers, answers, strict=True):
            worker.admit(answer)

    def admit_late(self, answers):
        """Those of the late leg."""
        for worker, answer in zip(self.workers, answers, strict=True):
            worker.admit_late(answer)

    def read(self):
        """Every worker reads its batch, all of whose rows have arrived."""
        for worker in self.workers:
            for row in worker.current.reading:
                self.assert_bounds(worker.copies[row], row)
            for row, copy in worker.copies.items():
                self.assert_sound(worker, row, copy)

    def assert_bounds(self, copy, row):
        """What a read is promised, `before` being the masters as the previous round left them."""
        before = self.before[row]
        assert copy.c_c - copy.c_s <= self.bound
        assert before.clock <= copy.c_c + self.bound
        known = copy.base_updates | set(copy.pending)
        self.missed = max(self.missed, len(self.all_updates[row] - known))
        if not self.held_back:  # the empty cache reads what one table would hold
            assert known == self.all_updates[row]
        if self.clock_rule == "sum":  # then a clock is the number of updates, and the promise is about those
            assert len(before.updates - known) <= self.bound + len(copy.pending)

    def assert_sound(self, worker, row, copy):
        """Clocks count what they say, and the directory knows or the worker doubts every copy that may be invalid."""
        assert copy.c_c - copy.c_s == len(copy.pending)
        assert not copy.base_updates & set(copy.pending)
        if self.clock_rule == "sum":
            assert self.masters[row].clock == len(self.masters[row].updates)
            assert copy.c_s == len(copy.base_updates)
        if self.directory and row not in worker.doubts:
            known = self.holders[row][worker.rank]
            assert known <= copy.c_c + 1
            assert not breaks_others_bound(self.masters[row].clock, known, self.bound)

    def write(self, step, gradients):
        """`gradients`: by worker, row -> [D]."""
        for worker, gradient in zip(self.workers, gradients, strict=True):
            for row in worker.current.reading:
                self.all_updates[row].add((worker.rank, step))
            worker.commit(step, gradient)

    def flush(self):
        """The end: every update is in its master, once."""
        self.serve([worker.pending() for worker in self.workers])
        for row, master in self.masters.items():
            assert master.updates == self.all_updates[row]
