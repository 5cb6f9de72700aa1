"""Victims against sorting everything, over long traces, and bounded queues."""

import numpy as np
import pytest

from hetrain.errors import ConfigError
from hetrain.store import policy
from hetrain.store.policy import make_policy

SLOTS = 40


def order_of(name, history, hot):
    """Slots in the order they must leave; `history`: slot -> [(step, position), ...] since it came."""

    def key(slot):
        uses = history[slot]
        if name == "lru":
            return uses[-1]
        return min(len(uses), hot), uses[min(len(uses), hot) - 1]

    return sorted(history, key=key)


@pytest.mark.parametrize("name", ["lru", "lfu"])
@pytest.mark.parametrize("hot", [1, 5, 64])
@pytest.mark.parametrize("seed", range(4))
def test_victims_in_order(monkeypatch, name, hot, seed):
    monkeypatch.setattr(policy, "HOT", hot)
    monkeypatch.setattr(policy, "SCAN", 3)
    rng = np.random.default_rng(seed)
    tested, history = make_policy(name, SLOTS), {}
    for step in range(300):
        slots = rng.choice(SLOTS, rng.integers(0, 12), replace=False, p=_skew())
        tested.used(slots)
        for position, slot in enumerate(slots.tolist()):
            history.setdefault(slot, []).append((step, position))
        assert sum(q.entries for q in tested._queues) <= 2 * SLOTS
        if step % 7 == 3:
            again = make_policy(name, SLOTS)
            again.load_state_dict(tested.state_dict())
            tested = again
        count = int(rng.integers(0, 4)) if len(history) > 20 else 0
        victims = tested.victims(count)
        assert victims.tolist() == order_of(name, history, hot)[:count]
        for slot in victims.tolist():
            del history[slot]
    assert tested.victims(len(history)).tolist() == order_of(name, history, hot)


def _skew():
    weight = 1 / np.arange(1, SLOTS + 1)
    return weight / weight.sum()


@pytest.mark.parametrize("name", ["lru", "lfu"])
def test_clear_forgets(name):
    tested = make_policy(name, 5)
    tested.used(np.array([3, 1]))
    tested.clear()
    tested.used(np.array([1]))
    assert tested.victims(1).tolist() == [1]
    with pytest.raises(RuntimeError, match="no use"):
        tested.victims(1)


def test_unknown_policy_names_the_key():
    with pytest.raises(ConfigError, match=r"consistency\.cache\.policy=fifo"):
        make_policy("fifo", 5)
