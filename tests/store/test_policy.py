"""Victims against sorting everything by hand, over long traces, with sparing and saving in between."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetrain.errors import ConfigError
from hetrain.store import policy
from hetrain.store.policy import make_policy

SLOTS = 40
NAMES = ["lru", "lfu", "light_lfu"]


class Oracle:
    """Every use of every slot since it came, and a sort at every eviction."""

    def __init__(self, name, hot):
        self.name, self.hot, self.uses, self.now = name, hot, {}, 0

    def used(self, slots):
        for slot in slots:
            self.uses.setdefault(slot, []).append(self.now)
            self.now += 1

    def order(self):
        def key(slot):
            uses = self.uses[slot]
            if self.name == "lru":
                return uses[-1]
            count = min(len(uses), self.hot) if self.name == "light_lfu" else len(uses)
            return count, uses[count - 1]

        return sorted(self.uses, key=key)

    def victims(self, count, spared=()):
        leaving = [slot for slot in self.order() if slot not in spared][:count]
        for slot in leaving:
            del self.uses[slot]
        return leaving


def mask(slots):
    spared = np.zeros(SLOTS, np.bool_)
    spared[list(slots)] = True
    return spared


def ints(slots):
    return np.array(slots, dtype=np.int64)


def reloaded(name, tested):
    again = make_policy(name, SLOTS)
    again.used(ints([5, 7]))
    again.load_state_dict(tested.state_dict())
    return again


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("hot", [1, 5, 64])
@pytest.mark.parametrize("seed", range(4))
def test_victims_in_order_over_long_traces(monkeypatch, name, hot, seed):
    monkeypatch.setattr(policy, "HOT", hot)
    rng = np.random.default_rng(seed)
    tested, oracle = make_policy(name, SLOTS), Oracle(name, hot)
    weight = 1 / np.arange(1, SLOTS + 1)
    for step in range(400):
        slots = rng.choice(SLOTS, rng.integers(0, 12), replace=False, p=weight / weight.sum())
        tested.used(slots)
        oracle.used(slots.tolist())
        if step % 7 == 3:
            tested = reloaded(name, tested)
        count = int(rng.integers(0, 4)) if len(oracle.uses) > 20 else 0
        spared = set(rng.choice(SLOTS, 8, replace=False).tolist()) if step % 3 else set()
        victims = tested.victims(count, mask(spared)) if spared else tested.victims(count)
        assert victims.tolist() == oracle.victims(count, spared)
    assert tested.victims(SLOTS).tolist() == oracle.victims(SLOTS)


SOME = st.lists(st.integers(0, SLOTS - 1), unique=True, max_size=15)


@given(st.data(), st.sampled_from(NAMES), st.integers(1, 6))
@settings(max_examples=200, deadline=None)
def test_against_the_oracle(data, name, hot):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy, "HOT", hot)
        tested = make_policy(name, SLOTS)
        oracle = Oracle(name, hot)
        for _ in range(data.draw(st.integers(1, 15))):
            slots, spared = data.draw(SOME), data.draw(SOME)
            tested.used(ints(slots))
            oracle.used(slots)
            if data.draw(st.booleans()):
                tested = reloaded(name, tested)
            count = data.draw(st.integers(0, 10))
            assert tested.victims(count, mask(spared)).tolist() == oracle.victims(count, spared)
        assert tested.victims(10**9).tolist() == oracle.victims(SLOTS)


@pytest.mark.parametrize("name", NAMES)
def test_clear_forgets(name):
    tested = make_policy(name, 5)
    tested.used(np.array([3, 1]))
    tested.used(np.array([3]))
    tested.clear()
    tested.used(np.array([1, 3]))
    assert tested.victims(1).tolist() == [1]
    assert tested.victims(2).tolist() == [3]
    assert tested.victims(2).tolist() == []


def test_a_hot_row_of_light_lfu_keeps_its_place(monkeypatch):
    """Slot 0 became hot first; however often 1 is used after it, 0 leaves before 1, and both after all others."""
    monkeypatch.setattr(policy, "HOT", 3)
    tested = make_policy("light_lfu", 4)
    for slots in ([0, 1], [0, 1], [0], [1], [0], [0], [2], [2, 3]):
        tested.used(ints(slots))
    assert tested.victims(2, np.array([False, False, True, False])).tolist() == [3, 0]
    assert tested.victims(4).tolist() == [2, 1]


def test_a_count_beyond_hot_still_counts_for_lfu():
    tested = make_policy("lfu", 2)
    for _ in range(policy.HOT + 6):
        tested.used(ints([0]))
    for _ in range(policy.HOT + 5):
        tested.used(ints([1]))
    assert tested.victims(2).tolist() == [1, 0]


@pytest.mark.parametrize("name", ["lfu", "light_lfu"])
def test_places_for_counts_are_taken_again(name):
    """However often rows of many counts leave, there is one place per count that occurs at a time."""
    tested = make_policy(name, SLOTS)
    for _ in range(20):
        for count in range(SLOTS):
            tested.used(np.arange(count, SLOTS))
        assert tested.victims(SLOTS).tolist() == list(range(SLOTS))
    assert tested._unused[1] <= len(tested._groups)


@pytest.mark.parametrize("name", NAMES)
def test_state_is_tensors_and_the_whole_of_it(name):
    tested = make_policy(name, SLOTS)
    rng = np.random.default_rng(1)
    for _ in range(30):
        tested.used(rng.choice(SLOTS, 9, replace=False))
        tested.victims(3)
    saved, again = tested.state_dict(), reloaded(name, tested).state_dict()
    assert saved.keys() == again.keys()
    for key, value in saved.items():
        assert value.dtype == again[key].dtype
        assert value.equal(again[key])


def test_unknown_policy_names_the_key():
    with pytest.raises(ConfigError, match=r"consistency\.cache\.policy=fifo: expected lru, lfu or light_lfu"):
        make_policy("fifo", 5)
