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
        push_rows=ints(push),
        push_value=value,
        push_state=state,
        push_clock=ints(push) + 100,
        push_updates=ints(push) + 1,
        fetch_rows=ints(fetch),
        fetch_again=ints(fetch) % 5 == 0,
        check_rows=ints(check),
        check_clock=ints(check) * 2,
    )


def answer(part, rank, carry_clocks):
    """A reply whose fields tell the rows: those that 3 divides are not stored, odd ones are invalid when checked."""
    stored = part.fetch_rows % 3 != 0
    sent = part.fetch_rows[stored]
    odd = torch.nonzero(part.check_rows % 2 == 1).flatten()
    wrong = part.check_rows[odd]
    nothing = torch.empty(0, dtype=torch.int64)
    return Reply(
        stored=stored,
        value=sent[:, None] * torch.ones(DIM),
        state=sent[:, None] * torch.ones(1),
        clock=sent if carry_clocks else nothing,
        applied=nothing,
        invalid=odd,
        invalid_value=wrong[:, None] * torch.ones(DIM),
        invalid_state=wrong[:, None] * torch.ones(1),
        invalid_clock=wrong,
        invalid_applied=nothing,
        notice_rows=torch.full((rank,), rank),
        notice_clock=torch.full((rank,), rank + 50),
    )


@settings(max_examples=100, deadline=None)
@given(rows, rows, rows, st.integers(1, 4), st.integers(1, 3), st.integers(0, 99), st.booleans())
def test_split_and_merge(push, fetch, check, world, blocks, seed, carry_clocks):
    placement = Loopback(Setup(world=world, tables=(13, 17), seed=seed)).placement
    request = request_of(push, fetch, check)
    if not carry_clocks:
        request.push_clock = request.push_updates = torch.empty(0, dtype=torch.int64)
    routed = split(request, placement, blocks)
    parts = [(block, rank, routed.requests[block][rank]) for block in range(blocks) for rank in range(world)]
    replies = [[] for _ in range(blocks)]
    for block, rank, part in parts:
        for part_rows in (part.push_rows, part.fetch_rows, part.check_rows):
            assert (placement.owner_of(part_rows) == rank).all()
            assert (part_rows % blocks == block).all()
            assert torch.equal(part_rows, part_rows.sort().values)
        assert torch.equal(part.push_value[:, 0], part.push_rows + 0.5)
        assert torch.equal(part.push_state[:, 0], part.push_rows.float())
        assert part.push_clock.tolist() == [row + 100 for row in part.push_rows.tolist() if carry_clocks]
        assert part.push_updates.tolist() == [row + 1 for row in part.push_rows.tolist() if carry_clocks]
        assert torch.equal(part.fetch_again, part.fetch_rows % 5 == 0)
        assert torch.equal(part.check_clock, part.check_rows * 2)
        replies[block].append(answer(part, rank, carry_clocks))
    assert sorted(r for *_, part in parts for r in part.push_rows.tolist()) == sorted(push)
    whole = routed.merge(replies)
    assert whole.stored.tolist() == [row % 3 != 0 for row in fetch]
    sent = [row for row in fetch if row % 3]
    assert whole.value[:, 0].tolist() == whole.state[:, 0].tolist() == sent
    assert whole.clock.tolist() == (sent if carry_clocks else [])
    assert whole.applied.tolist() == whole.invalid_applied.tolist() == []
    assert whole.invalid.tolist() == [i for i, row in enumerate(check) if row % 2]
    assert whole.invalid_clock.tolist() == [row for row in check if row % 2]
    assert whole.invalid_value[:, 0].tolist() == whole.invalid_state[:, 0].tolist() == whole.invalid_clock.tolist()
    noticed = [rank for rank in range(world) for _ in range(rank * blocks)]
    assert sorted(whole.notice_rows.tolist()) == noticed
    assert torch.equal(whole.notice_clock, whole.notice_rows + 50)


@settings(max_examples=50, deadline=None)
@given(rows, rows, st.integers(1, 4), st.integers(0, 99))
def test_flags_of_an_announcement(before, now, world, seed):
    placement = Loopback(Setup(world=world, tables=(13, 17), seed=seed)).placement
    first, second = (split(request_of([], fetch, []), placement) for fetch in (before, now))
    replies = [
        Reply.flags(DIM, 0, new.fetch_rows % 7 == 0, old.fetch_rows % 11 == 0)
        for old, new in zip(first.requests[0], second.requests[0], strict=True)
    ]
    late, hot = second.flags(replies, first)
    assert late.tolist() == [row % 7 == 0 for row in now]
    assert hot.tolist() == [row % 11 == 0 for row in before]


def test_fields_there_and_back():
    request = request_of([1, 2], [3], [4, 5, 6])
    again = Request.from_fields([tensor for _, tensor in request.fields()])
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(request.fields(), again.fields(), strict=True))
    assert [channel for channel, _ in request.fields()] == [
        "ids", "rows_push", "rows_push", "clocks", "clocks", "ids", "ids", "ids", "clocks",
    ]  # fmt: skip
