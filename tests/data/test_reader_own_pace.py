"""Readers whose ranks are each where they are: nothing is read twice or left out, however often the run is cut."""

from collections import Counter

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hetrain.data.reader import Reader
from tests.data.sets import write_set
from tests.data.test_reader import numbers

EXAMPLES, EPOCHS = 83, 3


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_set(tmp_path_factory.mktemp("set") / "d", EXAMPLES)


def readers(path, world_size, batch_size, state, epochs=EPOCHS, lockstep=False):
    more = {"shuffle": True, "seed": 3, "shuffle_window": 16, "prefetch": 0, "lockstep": lockstep, "state": state}
    return [Reader(path, "train", batch_size, rank, world_size, epochs=epochs, **more) for rank in range(world_size)]


def sitting(path, world_size, batch_size, steps, state, trained):
    """Rank r trains its next `steps[r]` batches, as far as there are any; what a checkpoint then says.

    Checks on the way that ranks end an epoch by count where a run that was never cut does.
    """
    ranks = readers(path, world_size, batch_size, state)
    before = sum(trained.values())
    first, ends = ranks[0].epoch_ends()
    assert [before + end for end in ends] == [EXAMPLES * (epoch + 1) for epoch in range(first, EPOCHS)]
    assert all(reader.epoch_ends() == (first, ends) for reader in ranks)
    for reader, count in zip(ranks, steps, strict=True):
        train(reader, count, trained)
    return ranks[0].state_dict([reader.position for reader in ranks])


def train(reader, batches, trained):
    for _, batch in zip(range(batches), reader, strict=False):
        trained.update(numbers(batch))
        reader.trained()


def lockstep_sitting(path, world_size, batch_size, steps, state, trained):
    """All ranks train `steps` batches; what a checkpoint then says."""
    ranks = readers(path, world_size, batch_size, state, lockstep=True)
    left, step_size = EPOCHS * EXAMPLES - sum(trained.values()), world_size * batch_size
    if state is None or "later" not in state:  # what was left is dealt out evenly, whoever was ahead
        last_epochs = (left - 1) // EXAMPLES if left else 0
        expected = -(-(left - last_epochs * EXAMPLES) // step_size) + last_epochs * -(-EXAMPLES // step_size)
        assert ranks[0].steps_left == expected
    for reader in ranks:
        train(reader, steps, trained)
    assert all(reader.state_dict() == ranks[0].state_dict() for reader in ranks)
    return ranks[0].state_dict()


STEPS = st.lists(st.integers(0, 12), min_size=1, max_size=4)  # of every rank


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(1, 9), STEPS, st.booleans()), min_size=1, max_size=4), st.integers(1, 3))
@example([(5, [0, 10], False), (1, [0], False)], 1)  # the second sitting is cut before it comes to what the first began
@example([(5, [0, 10], False), (1, [0], True)], 2)
@example([(5, [0, 4], False), (5, [0, 0], True)], 2)  # rank 0 has 41 left, rank 1 has 22
def test_every_example_once_per_epoch_whatever_the_cuts(path, sittings, last):
    """Sittings in lockstep among those at everyone's own pace, on any number of ranks."""
    trained, state = Counter(), None
    for batch_size, steps, lockstep in sittings:
        if lockstep:
            state = lockstep_sitting(path, len(steps), batch_size, steps[0], state, trained)
        else:
            state = sitting(path, len(steps), batch_size, steps, state, trained)
    assert max(trained.values(), default=0) <= EPOCHS
    sitting(path, last, 7, [10**6] * last, state, trained)
    assert trained == Counter(dict.fromkeys(trained, EPOCHS))
    assert len(trained) == EXAMPLES


def test_fewer_epochs_than_were_begun_leave_the_rest_of_those_asked_for(path):
    """Rank 1 is an epoch ahead of rank 0 when the run goes on with fewer epochs."""
    trained = Counter()
    state = sitting(path, 2, 5, [2, 14], None, trained)
    left = readers(path, 2, 5, state, epochs=1)
    assert left[0].epoch_ends()[1] == [31]
    assert [sum(batch.size for batch in reader) for reader in left] == [31, 0]
