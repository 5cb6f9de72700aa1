import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hetrain.store.messages import Reply, Request
from hetrain.store.route import split
from tests.store.loopback import DIM, Loopback, Setup

rows = st.lists(st.integers(0, 29), unique=True, max_size=12)


def request_of(push, fetch, check):
    def ints(values):
        return torch.tensor(values, dtype=torch.int64)

    value = ints(push)[:, None] * torch.ones(DIM) + 0.5
    state = ints(push)[:, None] * torch.ones(1)
    return Request(
        ints(push), value, state, ints(push) + 100, ints(push) + 1, ints(fetch), ints(check), ints(check) * 2
    )


@settings(max_examples=60, deadline=None)
@given(rows, rows, rows, st.integers(1, 4), st.integers(0, 99))
def test_split_and_merge(push, fetch, check, world, seed):
    placement = Loopback(Setup(world=world, tables=(13, 17), seed=seed)).placement
    request = request_of(push, fetch, check)
    routed = split(request, placement)
    replies = []
    for rank, part in enumerate(routed.requests):
        for part_rows in (part.push_rows, part.fetch_rows, part.check_rows):
            assert (placement.owner_of(part_rows) == rank).all()
        assert torch.equal(part.push_value[:, 0], part.push_rows + 0.5)
        assert torch.equal(part.push_clock, part.push_rows + 100)
        assert torch.equal(part.check_clock, part.check_rows * 2)
        odd = torch.nonzero(part.check_rows % 2 == 1).flatten()
        wrong = part.check_rows[odd]
        replies.append(
            Reply(
                part.fetch_rows[:, None] * torch.ones(DIM),
                part.fetch_rows[:, None] * torch.ones(1),
                part.fetch_rows,
                torch.empty(0, dtype=torch.int64),
                odd,
                wrong[:, None] * torch.ones(DIM),
                wrong[:, None] * torch.ones(1),
                wrong,
                torch.empty(0, dtype=torch.int64),
            )
        )
    assert sorted(r for part in routed.requests for r in part.push_rows.tolist()) == sorted(push)
    whole = routed.merge(replies)
    assert whole.clock.tolist() == fetch
    assert whole.value[:, 0].tolist() == fetch
    assert whole.invalid.tolist() == [i for i, row in enumerate(check) if row % 2]
    assert whole.invalid_clock.tolist() == [row for row in check if row % 2]
    assert whole.invalid_value[:, 0].tolist() == whole.invalid_clock.tolist()


def test_fields_there_and_back():
    request = request_of([1, 2], [3], [4, 5, 6])
    again = Request.from_fields([tensor for _, tensor in request.fields()])
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(request.fields(), again.fields(), strict=True))
    assert [channel for channel, _ in request.fields()] == [
        "ids", "rows_push", "rows_push", "clocks", "clocks", "ids", "ids", "clocks",
    ]  # fmt: skip
