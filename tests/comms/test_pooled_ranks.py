"""The exchange of pooled embeddings between real ranks, against plain torch on all ranks' rows."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.comm_ops import set_gradient_division
from torchrec.distributed.sharding.dp_sharding import DpPooledEmbeddingDist
from torchrec.distributed.sharding.grid_sharding import GridPooledEmbeddingDist
from torchrec.distributed.sharding.tw_sharding import TwPooledEmbeddingDist
from torchrec.distributed.sharding.twrw_sharding import TwRwPooledEmbeddingDist

from hetrain.codec import OPTIONS
from hetrain.comms.columns import Columns
from hetrain.comms.pooled import PooledExchange
from hetrain.comms.pooled_codec import CHUNK, PooledComms, exact_codec
from hetrain.comms.pooled_dists import exchange_with
from hetrain.config import DctConfig
from hetrain.errors import ConfigError
from hetrain.telemetry import Traffic
from hetrain.value_codec import value_codec
from tests.ranks import run_ranks

SPARSITY, EXAMPLES, SCALE = 0.75, 1000, 1024.0
PAIRS = [(f, b) for f in OPTIONS for b in OPTIONS if (f, b) != ("none", "none") and (b != "dct" or f == "dct")]
BATCHES = (5, 1, 0)


def exchange(forward: str, backward: str) -> tuple[PooledExchange, Traffic]:
    traffic = Traffic()
    codec = PooledComms(forward, backward, DctConfig(pooled_sparsity=SPARSITY)).codec(EXAMPLES)
    assert codec is not None
    return PooledExchange(codec, traffic), traffic


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.1


def kept(rows: Tensor, dims: Sequence[int]) -> Tensor:
    """1 where a value is among the quarter of its column that is largest, by a full sort."""
    masks = [torch.zeros_like(rows[:, :0])]
    for part in rows.split(list(dims), 1) if dims else ():
        order = part.abs().argsort(1, descending=True)[:, : -(-part.shape[1] // 4)]
        masks.append(torch.zeros_like(part).scatter_(1, order, 1.0))
    return torch.cat(masks, 1)


def rounded(rows: Tensor, name: str) -> Tensor:
    """What arrives of `rows`, no value left out."""
    if name == "int8":
        codec = value_codec("int8")
        parts = [codec.decode(codec.encode(part), part.shape[1]) for part in rows.split(CHUNK, 1) if part.numel()]
        return torch.cat(parts, 1) if parts else rows
    return {"none": rows, "bf16": rows.bfloat16().float()}.get(name, rows.half().float())


def forward_of(rows: Tensor, dims: Sequence[int], name: str) -> Tensor:
    return rounded(rows, "fp16") * kept(rows, dims) if name == "dct" else rounded(rows, name)


def backward_of(gradient: Tensor, rows: Tensor, dims: Sequence[int], forward: str, backward: str) -> Tensor:
    scale = SCALE if backward in ("fp16", "int8", "dct") else 1.0
    if forward != "dct" or not rows.numel():
        return rounded(gradient * scale, backward) / scale
    places = kept(rows, dims).nonzero()[:, 1].view(len(rows), -1)
    values = rounded(gradient.gather(1, places) * scale, backward) / scale
    return torch.zeros_like(rows).scatter_(1, places, values)


@contextmanager
def handed_over(rank: int) -> Iterator[list[int]]:
    """Bytes given to collectives for other ranks, one number per collective."""
    found: list[int] = []
    all_to_all, gather = dist.all_to_all_single, dist.all_gather_into_tensor

    def counted_all_to_all(into: Tensor, data: Tensor, taken: Any, given: Any, *args: Any, **kwargs: Any) -> Any:
        assert sum(given) == data.numel()
        found.append((data.numel() - given[rank]) * data.element_size())
        return all_to_all(into, data, taken, given, *args, **kwargs)

    def counted_gather(into: Tensor, data: Tensor, *args: Any, **kwargs: Any) -> Any:
        found.append((into.numel() - data.numel()) * data.element_size())
        return gather(into, data, *args, **kwargs)

    with (
        mock.patch.object(dist, "all_to_all_single", counted_all_to_all),
        mock.patch.object(dist, "all_gather_into_tensor", counted_gather),
    ):
        yield found


def side_by_side(rank: int, world_size: int, dims: list[list[int]]) -> None:
    """Every rank's columns, as for table-wise tables; a rank may hold none."""
    columns, widths = [Columns(tuple(each)) for each in dims], [sum(each) for each in dims]
    for case, (forward, backward) in enumerate(PAIRS):
        for batch in BATCHES:
            e, traffic = exchange(forward, backward)
            rows = [draw(world_size * batch, width, seed=10 * case + r) for r, width in enumerate(widths)]
            gradients = [draw(batch, sum(widths), seed=1000 + 10 * case + r) for r in range(world_size)]
            mine = rows[rank].clone().requires_grad_()
            with handed_over(rank) as handed:
                found = e.all_to_all(mine, columns, dist.group.WORLD).wait()
                found.backward(gradients[rank])
            at = slice(rank * batch, (rank + 1) * batch)
            assert torch.equal(
                found.detach(),
                torch.cat([forward_of(block[at], held, forward) for block, held in zip(rows, dims, strict=True)], 1),
            )
            expected = torch.cat([g.split(widths, 1)[rank] for g in gradients])
            assert mine.grad is not None
            assert torch.equal(mine.grad, backward_of(expected, rows[rank], dims[rank], forward, backward))
            assert handed == [traffic.bytes["pooled_fwd"], traffic.bytes["pooled_bwd"]]
            assert traffic.total == sum(handed)
            assert e.take_wait_s() > 0
            assert e.take_wait_s() == 0


def summed(rank: int, world_size: int, dims: list[int]) -> None:
    """Partial sums of the same columns, as for row-wise tables."""
    width = sum(dims)
    for case, (forward, backward) in enumerate(PAIRS):
        for batch in BATCHES:
            e, traffic = exchange(forward, backward)
            rows = [draw(world_size * batch, width, seed=10 * case + r) for r in range(world_size)]
            gradients = [draw(batch, width, seed=1000 + 10 * case + r) for r in range(world_size)]
            mine = rows[rank].clone().requires_grad_()
            with handed_over(rank) as handed:
                found = e.reduce_scatter(mine, Columns(tuple(dims)), dist.group.WORLD).wait()
                found.backward(gradients[rank])
            at = slice(rank * batch, (rank + 1) * batch)
            total = torch.zeros(batch, width)
            for block in rows:
                total += forward_of(block[at], dims, forward)
            assert torch.equal(found.detach(), total)
            assert mine.grad is not None
            assert torch.equal(mine.grad, backward_of(torch.cat(gradients), rows[rank], dims, forward, backward))
            assert handed == [traffic.bytes["pooled_fwd"], traffic.bytes["pooled_bwd"]]


def two_ranks(rank: int, world_size: int) -> None:
    side_by_side(rank, world_size, [[16] * 9, [32, 32, 6]])
    summed(rank, world_size, [16] * 8 + [12, 4])


def test_two_ranks_equal_plain_torch() -> None:
    run_ranks(2, two_ranks)


def through(output: nn.Module, rows: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    mine = rows.clone().requires_grad_()
    found = output(mine).wait()
    found.backward(gradient)
    assert mine.grad is not None
    return found.detach(), mine.grad


def four_ranks(rank: int, world_size: int) -> None:
    set_gradient_division(False)  # as the engine does
    side_by_side(rank, world_size, [[16], [], [64, 8], [8]])
    summed(rank, world_size, [8, 8, 8])
    within = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][rank // 2]
    across = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])][rank % 2]
    widths, batch = [8, 24], 3
    rows, gradient = draw(world_size * batch, widths[rank // 2], seed=rank), draw(batch, 32, seed=50 + rank)

    def on_two_nodes(kind: type[nn.Module]) -> Any:
        given = {"rank": rank, "cross_pg": across, "intra_pg": within}
        turned = {"callbacks": [lambda t: t.roll(3, 1)]} if kind is GridPooledEmbeddingDist else {}
        return kind(**given, dim_sum_per_node=widths, emb_dim_per_node_per_feature=[[8], [16, 8]], **turned)

    for kind in (TwRwPooledEmbeddingDist, GridPooledEmbeddingDist):
        theirs = through(on_two_nodes(kind), rows, gradient)
        ours = on_two_nodes(kind)
        exchange_with(PooledExchange(exact_codec(), Traffic()), [ours])
        for a, b in zip(theirs, through(ours, rows, gradient), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-7)  # gloo adds in another order
        rough, traffic = exchange("bf16", "bf16")
        coarse = on_two_nodes(kind)
        exchange_with(rough, [coarse])
        for a, b in zip(theirs, through(coarse, rows, gradient), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=3 * 2**-9 * float(a.abs().max()))
        mine = widths[rank // 2]
        assert traffic.bytes["pooled_fwd"] == 2 * (2 * batch * mine + batch * mine)  # within the node, then across
        assert traffic.bytes["pooled_bwd"] == 2 * (batch * (32 - mine) + 2 * batch * mine)
    turned = TwPooledEmbeddingDist(dist.group.WORLD, [8] * 4, [[8]] * 4, callbacks=[lambda t: t.flip(1)])
    plain = TwPooledEmbeddingDist(dist.group.WORLD, [8] * 4, [[8]] * 4)
    block = draw(world_size * batch, 8, seed=rank)
    exchange_with(PooledExchange(exact_codec(), Traffic()), [turned])
    assert torch.equal(turned(block).wait().flip(1), plain(block).wait())


def test_four_ranks_and_both_hops_of_two_nodes() -> None:
    run_ranks(4, four_ranks)


def test_what_stays_on_a_rank_is_thinned_alike() -> None:
    e, _ = exchange("dct", "none")
    output_dists: list[nn.Module] = [DpPooledEmbeddingDist()]
    exchange_with(e, output_dists, [[8, 24]])
    rows, gradient = draw(5, 32, seed=1).requires_grad_(), draw(5, 32, seed=2)
    found = output_dists[0](rows).wait()
    found.backward(gradient)
    mask = kept(rows.detach(), [8, 24])
    assert torch.equal(found.detach(), rows.detach() * mask)
    assert rows.grad is not None
    assert torch.equal(rows.grad, gradient * mask)
    e.exact = True
    assert torch.equal(output_dists[0](rows).wait(), rows)
    e, _ = exchange("int8", "int8")
    assert e.thinned(rows, Columns((8, 24))) is rows


def test_what_is_not_known_is_refused_by_name() -> None:
    e, _ = exchange("fp16", "fp16")
    with pytest.raises(ConfigError, match=r"Identity can only travel as float32\. Set comms\.pooled_forward=none"):
        exchange_with(e, [nn.Identity()])
