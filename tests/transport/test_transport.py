"""Messages cross real ranks unchanged, every byte sent is counted, a silent rank is named."""

import time
from typing import Any

import pytest
import torch
from torch import Tensor

from hetrain.errors import TrainingError
from hetrain.store.audit import AuditReport
from hetrain.store.messages import Part, Reply, Request
from hetrain.store.row_codec import RowCodec
from hetrain.telemetry import Traffic
from hetrain.transport.collective import CollectiveTransport
from hetrain.transport.compact import Writer, words_for
from hetrain.transport.leg import FIRST_ROOM, ShortLeg, SizedLeg
from hetrain.transport.wire import Codec, Layout, push_width, row_width
from tests.handed_to_gloo import handed_to_gloo
from tests.ranks import run_ranks

LAYOUT = Layout(("ids", "rows_push", "clocks", "rows_push"), (None, 4, None, 0))


def _fields(n: int, first: int, seed: int = 0) -> list[tuple[str, Tensor]]:
    g = torch.Generator().manual_seed(seed)
    return [
        ("ids", torch.arange(first, first + n)),
        ("rows_push", torch.randn(n, 4, generator=g)),
        ("clocks", torch.arange(n) * 3),
        ("rows_push", torch.empty(n, 0)),
    ]


@pytest.mark.parametrize("n", [0, 1, 2, 33])
@pytest.mark.parametrize("first", [0, (1 << 31) - 1, 1 << 40])
def test_pack_and_unpack(n: int, first: int) -> None:
    traffic = Traffic()
    codec = Codec([LAYOUT, LAYOUT], traffic)
    sent = [_fields(n, first, 1), _fields(n + 1, 5, 2)]
    buffer = codec.pack(sent)
    assert codec.length(buffer) == buffer.shape[0] == traffic.total
    room = torch.zeros(1 << 16, dtype=torch.uint8)
    room[: buffer.shape[0]] = buffer
    for got, want in zip(codec.unpack(room), sent, strict=True):
        assert all(
            torch.equal(g, w) and g.shape == w.shape and g.dtype == w.dtype for g, (_, w) in zip(got, want, strict=True)
        )
    assert traffic.bytes["rows_push"] == (2 * n + 1) * 16
    alone = Traffic()
    for ids, clocks in [(f[0][1], f[2][1]) for f in sent]:
        for channel, values in (("ids", ids), ("clocks", clocks)):
            writer = Writer(words_for([len(values)]))
            writer.integers(values.numpy())
            alone.add(channel, writer.nbytes)
    assert traffic.bytes["clocks"] == alone.bytes["clocks"]
    assert 0 < traffic.bytes["ids"] - alone.bytes["ids"] < 8 + 2 * 4 * 9 + 4


def _rows(travels: str, n: int, dim: int, seed: int, share: float = 1.0) -> tuple[RowCodec, Tensor]:
    """A codec, and `n` pushes as it has them, of which a `share` of the values is not zero."""
    g = torch.Generator().manual_seed(seed)
    codec = RowCodec(travels, dim)
    values = torch.randn(n, dim, generator=g)
    return codec, codec.pushes(values * (torch.rand(n, dim, generator=g) < share))


@pytest.mark.parametrize("travels", ["fp16", "bf16", "int8", "dct"])
@pytest.mark.parametrize("dim", [3, 16])
@pytest.mark.parametrize("n", [0, 1, 7, 40])
def test_coded_rows_keep_their_bytes_and_are_counted(travels: str, dim: int, n: int) -> None:
    """Whatever their size, fields behind them included; rows sent exact come back so."""
    traffic = Traffic()
    codec, rows = _rows(travels, n, dim, seed=n)
    layout = Layout(
        ("ids", "rows_push", "rows_pull", "rows_push", "clocks"),
        (None, push_width(codec), row_width(codec), 2, None),
    )
    wire = Codec([layout, layout], traffic)
    whole = codec.rows(torch.randn(n + 1, dim))
    exact, states = torch.randn(n + 2, dim), torch.randn(n, 2)
    sent = [
        [("", torch.arange(n)), ("", rows), ("", whole), ("", states), ("", torch.arange(3))],
        [("", torch.arange(n)), ("", exact), ("", exact), ("", states), ("", torch.arange(3))],
    ]
    buffer = wire.pack(sent)
    assert wire.length(buffer) == len(buffer) == traffic.total
    room = torch.zeros(1 << 16, dtype=torch.uint8)
    room[: len(buffer)] = buffer
    for got, want in zip(wire.unpack(room), sent, strict=True):
        for g, (_, w) in zip(got, want, strict=True):
            assert g.dtype == w.dtype
            assert torch.equal(g, w)
    each = {"fp16": 2 * dim, "bf16": 2 * dim, "int8": dim + -dim % 4 + 8, "dct": 2 * dim}[travels]
    assert traffic.bytes["rows_pull"] == (n + 1) * each + (n + 2) * dim * 4
    thin = 5 + n if travels == "dct" else 0  # what the head says of rows that might be thin
    assert 0 <= traffic.bytes["rows_push"] - (n * each + (n + 2) * dim * 4 + 2 * n * 8) <= thin


@pytest.mark.parametrize("share", [0.0, 0.02, 0.1, 0.5, 0.9, 1.0])
def test_thin_rows_travel_as_what_is_not_zero(share: float) -> None:
    """Where little is kept, for less than with bitmaps or 8-bit columns; else for about the least of these."""
    traffic, n, dim = Traffic(), 300, 128
    codec, rows = _rows("dct", n, dim, seed=1, share=share)
    wire = Codec([Layout(("rows_push",), (push_width(codec),))], traffic)
    ((got,),) = wire.unpack(wire.pack([[("", rows)]]))
    assert torch.equal(got.view(torch.float16), rows.view(torch.float16))
    kept = int((rows.view(torch.float16) != 0).sum())
    columns, bitmap = 3 * kept, 2 * kept + n * dim // 8
    least = min(columns, bitmap, 2 * n * dim)
    assert traffic.bytes["rows_push"] <= least * (1.05 if share >= 0.5 else 1) + n // 8 + 16
    assert traffic.bytes["rows_push"] >= 2 * kept
    if share == 1:  # a word or two says that all rows are whole
        assert traffic.bytes["rows_push"] <= 2 * n * dim + 16


class _Echo:
    """An owner that answers each fetched row with what identifies asker, row and push."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def serve(self, requests: list[Request], part: Part = Part.WHOLE, block: int = 0) -> list[Reply]:
        pushed = sum(float(r.push_value.sum()) for r in requests)
        none = torch.empty(0, dtype=torch.int64)
        return [
            Reply(
                r.fetch_rows % 3 == 0,
                r.fetch_rows[:, None].float().expand(-1, 3) + 1000 * asker,
                torch.full((len(r.fetch_rows), 1), pushed),
                r.fetch_rows + self.rank,
                none,
                torch.nonzero(r.check_clock > 5).flatten(),
                torch.ones(int((r.check_clock > 5).sum()), 3),
                torch.ones(int((r.check_clock > 5).sum()), 1),
                r.check_clock[r.check_clock > 5],
                none,
                r.push_rows,
                r.push_clock,
            )
            for asker, r in enumerate(requests)
        ]


def _request(rank: int, peer: int, group: int, n: int) -> Request:
    rows = torch.arange(n) + 10 * peer + 100 * rank + group
    return Request(
        rows,
        torch.ones(n, 3) * (rank + 1),
        torch.zeros(n, 1),
        rows,
        rows,
        rows,
        rows % 2 == 0,
        rows,
        torch.arange(n) % 8,
    )


def _check_answer(reply: Reply, asked: Request, rank: int, peer: int, pushed: float) -> None:
    """`reply` is what the _Echo on `peer` answers to `asked` of `rank`, where all ranks pushed values of that sum."""
    n = len(asked.fetch_rows)
    assert torch.equal(reply.value, asked.fetch_rows[:, None].float().expand(-1, 3) + 1000 * rank)
    assert torch.equal(reply.state, torch.full((n, 1), pushed))
    assert torch.equal(reply.clock, asked.fetch_rows + peer)
    assert torch.equal(reply.invalid, torch.nonzero(asked.check_clock > 5).flatten())
    assert reply.applied.shape == (0,)
    assert torch.equal(reply.stored, asked.fetch_rows % 3 == 0)
    assert torch.equal(reply.notice_rows, asked.push_rows)
    assert torch.equal(reply.notice_clock, asked.push_clock)


def _rounds(rank: int, world_size: int, sizes: list[int]) -> dict[str, Any]:
    traffic = Traffic()
    transport = CollectiveTransport([_Echo(rank), _Echo(rank)], [(3, 1), (3, 1)], traffic, timeout_s=30)

    def requests(n: int) -> list[list[Request]]:
        return [[_request(rank, peer, g, n) for g in range(2)] for peer in range(world_size)]

    with handed_to_gloo() as handed:
        for n in sizes:
            replies = transport.exchange(requests(n + rank))
            pushed = float(sum(3 * (r + 1) * (n + r) for r in range(world_size)))
            for peer, answers in enumerate(zip(replies, requests(n + rank), strict=True)):
                for reply, asked in zip(*answers, strict=True):
                    _check_answer(reply, asked, rank, peer, pushed)
        transport.drain()
        before = traffic.total
        with traffic.set_aside():
            transport.exchange(requests(3))
        transport.drain()
    assert traffic.total == before
    return {"sent": handed.nbytes, "counted": before + sum(traffic.aside.values()), "waited": transport.waited_s}


def test_rounds_of_any_size_on_two_ranks() -> None:
    sizes = [0, 1, 5, 4000, 4000, 0, 300_000, 300_000, 7, 12_000]
    for result in run_ranks(2, _rounds, sizes):
        assert result["sent"] == result["counted"]
        assert result["waited"] > 0


def test_rounds_on_three_ranks() -> None:
    for result in run_ranks(3, _rounds, [0, 3, 5000, 2]):
        assert result["sent"] == result["counted"]


def _served(rank: int, world_size: int, servers: int, sizes: list[int]) -> tuple[int, int]:
    """Bytes sent and counted of rounds in which the last `servers` ranks only answer."""
    traffic, workers = Traffic(), world_size - servers
    transport = CollectiveTransport([_Echo(rank)], [(3, 1)], traffic, timeout_s=30, servers=servers)
    with handed_to_gloo() as handed:
        for n in sizes:
            if rank >= workers:
                assert transport.exchange() == []
                received = transport.collect()
                assert [int(r[0].included.sum()) for r in received] == [(n + p) * (p + 1) for p in range(workers)]
                continue
            requests = [[_request(rank, peer, 0, n + rank)] for peer in range(world_size)]
            for peer, (reply,) in enumerate(transport.exchange(requests)):
                rows = requests[peer][0].fetch_rows if peer >= workers else torch.empty(0, dtype=torch.int64)
                assert torch.equal(reply.value, rows[:, None].float().expand(-1, 3) + 1000 * rank)
                assert torch.equal(reply.clock, rows + peer)
                assert reply.state.shape == (len(rows), 1)
            ones = torch.full((n + rank,), rank + 1)
            report = AuditReport(*[ones] * len(AuditReport.CHANNELS))
            assert transport.collect([[report] for _ in range(world_size)]) == []
        transport.drain()
    assert all((rank < workers) != (peer < workers) for peer in handed.peers)
    return handed.nbytes, traffic.total


@pytest.mark.parametrize(("world_size", "servers"), [(2, 1), (4, 2)])
def test_rounds_with_servers(world_size: int, servers: int) -> None:
    for sent, counted in run_ranks(world_size, _served, servers, [0, 1, 4000, 30_000, 5]):
        assert sent == counted > 0


def _sized(rank: int, world_size: int) -> None:
    leg = SizedLeg(torch.device("cpu"), 30)
    for n in (0, 3, FIRST_ROOM * 3):
        outgoing = [
            None if p == rank else torch.full((n + p,), 10 * rank + p, dtype=torch.uint8) for p in range(world_size)
        ]
        leg.post()
        leg.send(outgoing)
        for p, buffer in enumerate(leg.receive()):
            if p == rank:
                assert buffer is None
            else:
                assert buffer is not None
                assert torch.equal(buffer, torch.full((n + rank,), 10 * p + rank, dtype=torch.uint8))


def test_sized_leg() -> None:
    run_ranks(3, _sized)


def _silent(rank: int, world_size: int) -> str:
    if rank == 1:
        time.sleep(3)
        return ""
    leg = ShortLeg(lambda buffer: 0, 100, timeout_s=0.5)
    leg.post()
    with pytest.raises(TrainingError) as error:
        leg.receive()
    return str(error.value)


def test_a_silent_rank_is_named() -> None:
    message = run_ranks(2, _silent)[0]
    assert "waiting for rank 1 (" in message
    assert "launch.timeout_s=0.5" in message


def _silent_server(rank: int, world_size: int) -> str:
    if rank == 1:
        time.sleep(3)
        return ""
    transport = CollectiveTransport([_Echo(0)], [(3, 1)], Traffic(), timeout_s=0.5, servers=1)
    with pytest.raises(TrainingError) as error:
        transport.exchange([[_request(0, peer, 0, 3)] for peer in range(2)])
    return str(error.value)


def test_a_silent_server_is_called_one() -> None:
    assert "waiting for server rank 1 (" in run_ranks(2, _silent_server)[0]
