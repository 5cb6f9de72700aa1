"""Pooled rows as bytes: against plain torch, and the sizes that both ends work out without asking."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hetrain.codec import OPTIONS
from hetrain.comms.chunked import Chunked
from hetrain.comms.columns import Columns, Kept
from hetrain.comms.largest import largest
from hetrain.comms.pooled_codec import CHUNK, PooledCodec, PooledComms, exact_codec
from hetrain.comms.positions import pack_positions, position_bytes, unpack_positions
from hetrain.config import DctConfig
from hetrain.value_codec import value_codec


def rows(m: int, width: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(m, width, generator=torch.Generator().manual_seed(seed))


def columns(width: int, dim: int = 16) -> Columns:
    """Columns of `dim` values, and one of what is left."""
    return Columns((dim,) * (width // dim) + ((width % dim,) if width % dim else ()))


def codec(forward: str, backward: str, sparsity: float = 0.75, examples: int = 1000) -> PooledCodec:
    found = PooledComms(forward, backward, DctConfig(pooled_sparsity=sparsity)).codec(examples)
    return exact_codec() if found is None else found


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 5), st.integers(1, 70), st.floats(0.0, 1.0), st.integers(0, 2**31))
def test_largest_keeps_what_a_sort_keeps(m: int, width: int, share: float, seed: int) -> None:
    k = max(1, round(share * width))
    values = rows(m, width, seed)
    values[values.abs() < 0.3] = 0.5  # ties
    found = largest(values, k)
    assert found.shape == (m, k)
    assert bool((found[:, 1:] > found[:, :-1]).all())
    kept = values.abs().gather(1, found).sort(1).values
    assert torch.equal(kept, values.abs().sort(1).values[:, width - k :])


def test_largest_sees_every_bit_and_no_sign() -> None:
    one = np.float32(1.0)
    above = np.nextafter(one, np.float32(2))
    values = torch.tensor([[1.0, -float(above), 1.0, 0.0], [float("inf"), float("nan"), -9.0, 3e38], [0.0, -0.0, 0, 0]])
    assert largest(values, 1)[:, 0].tolist() == [1, 1, 0]
    assert largest(values, 2).tolist() == [[0, 1], [0, 1], [0, 1]]  # the first of equal ones


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 4), st.integers(1, 700), st.floats(0.0, 1.0), st.integers(0, 2**31))
def test_positions_come_back(m: int, width: int, share: float, seed: int) -> None:
    k = round(share * width)
    positions = torch.rand(m, width, generator=torch.Generator().manual_seed(seed)).argsort(1)[:, :k].sort(1).values
    data = pack_positions(positions, width)
    assert data.shape == (m, position_bytes(k, width))
    assert torch.equal(unpack_positions(data, k, width), positions)


@pytest.mark.parametrize(
    ("k", "width", "nbytes"),
    [
        (11, 208, 11),  # 8 bits each
        (30, 208, 26),  # a bitmap
        (256, 256, 0),  # all of them
        (20, 416, 40),  # 16 bits each
        (27, 416, 52),  # a bitmap
        (3, 70_000, 12),  # 32 bits each
        (3_500, 70_000, 8_750),  # a bitmap
    ],
)
def test_positions_take_the_smallest_of_their_forms(k: int, width: int, nbytes: int) -> None:
    assert position_bytes(k, width) == nbytes


def test_positions_of_32_bits_are_read_back() -> None:
    positions = torch.tensor([[0, 65_537, 69_999]])
    assert torch.equal(unpack_positions(pack_positions(positions, 70_000), 3, 70_000), positions)


@pytest.mark.parametrize("backward", OPTIONS)
@pytest.mark.parametrize("forward", OPTIONS)
@pytest.mark.parametrize(("m", "width"), [(6, 208), (1, 61), (5, 1), (0, 40), (3, 0)])
def test_sizes_follow_from_the_width(forward: str, backward: str, m: int, width: int) -> None:
    if backward == "dct" and forward != "dct":
        return  # refused by config.comms
    c = codec(forward, backward)
    values = rows(m, width)
    data, kept = c.encode(values, columns(width))
    assert (data.dtype, data.shape) == (torch.uint8, (m, c.row_bytes(columns(width))))
    decoded, kept_there = c.decode(data, columns(width))
    assert decoded.shape == values.shape
    assert (kept is None) == (kept_there is None)
    if kept is not None:
        assert kept_there is not None
        assert torch.equal(kept, kept_there)
    gradient = c.encode_gradient(values, kept)
    assert (gradient.dtype, gradient.shape) == (torch.uint8, (m, c.gradient_bytes(columns(width))))
    assert c.decode_gradient(gradient, columns(width), kept).shape == values.shape


@pytest.mark.parametrize(
    ("forward", "per_row"),
    [("none", 832), ("fp16", 416), ("bf16", 416), ("int8", 208 + 4 * 8), ("dct", 52 * 2 + 26)],
)
def test_bytes_of_a_row(forward: str, per_row: int) -> None:
    assert codec(forward, "none").row_bytes(columns(208)) == per_row


def test_goal_of_dct_at_95_percent() -> None:
    c = codec("dct", "dct", 0.95)
    for dim in (16, 64, 128):
        row = columns(13 * dim, dim)
        assert 8 * row.width > 20 * (c.row_bytes(row) + c.gradient_bytes(row))  # float32 both ways


@pytest.mark.parametrize(("name", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_16_bits_are_those_asked_for(name: str, dtype: torch.dtype) -> None:
    values = rows(7, 33)
    data, _ = codec(name, name).encode(values, columns(33))
    assert torch.equal(data.view(dtype), values.to(dtype))


def test_bf16_carries_what_fp16_cannot_and_fp16_counts_it() -> None:
    values = torch.tensor([[1e6, -3.0, 2.0, -1e30]])
    c = codec("bf16", "bf16")
    assert c.decode(c.encode(values, columns(4))[0], columns(4))[0] == pytest.approx(values, rel=2**-8)
    assert c.clipped == 0
    c = codec("fp16", "fp16")
    assert c.decode(c.encode(values, columns(4))[0], columns(4))[0].tolist() == [[65504, -3, 2, -65504]]
    assert c.clipped == 2
    c.encode_gradient(values, None)  # times 1024
    assert c.clipped == 4


@pytest.mark.parametrize("name", ["fp16", "bf16", "int8", "dct"])
def test_small_gradients_keep_their_digits(name: str) -> None:
    # of a mean over 8192 examples: float16's steps are 6e-8 there, and FBGEMM's 8-bit rows add 1e-8 to a row's range
    gradient = rows(50, 208) * 1e-7
    c = codec("dct" if name == "dct" else "none", name, 0.0, 8192)
    kept = c.encode(gradient, columns(208))[1]
    back = c.decode_gradient(c.encode_gradient(gradient, kept), columns(208), kept)
    error = (back - gradient).abs().max() / gradient.abs().max()
    assert error < {"fp16": 2**-11, "bf16": 2**-8, "int8": 1 / 200, "dct": 2**-11}[name]
    assert float(back.abs().sum()) == pytest.approx(float(gradient.abs().sum()), rel=1e-3)  # and are not shrunk


def test_int8_has_a_scale_per_chunk() -> None:
    values = torch.cat([rows(5, CHUNK) * 1e-3, rows(5, CHUNK), rows(5, 10) * 1e-2], 1)
    c = codec("int8", "none")
    row = columns(2 * CHUNK + 10)
    error = (c.decode(c.encode(values, row)[0], row)[0] - values).abs()
    for part in (slice(0, CHUNK), slice(CHUNK, 2 * CHUNK), slice(2 * CHUNK, None)):
        span = values[:, part].max(1).values - values[:, part].min(1).values
        assert bool((error[:, part] <= span[:, None] / 255 * 0.51).all())


@pytest.mark.parametrize("dim", [1, 2, 3, 4, 27])
def test_rows_of_8_bits_are_filled_up_as_on_cuda(dim: int) -> None:
    """FBGEMM's CUDA kernels read and write whole groups of 4 values; those of dct's masks are of any number."""
    inner, values = value_codec("int8"), rows(6, dim)
    data = inner.encode(values)
    assert data.shape == (6, inner.row_bytes(dim))
    assert data.shape[1] % 4 == 0
    back = inner.decode(data, dim)
    span = values.max(1).values - values.min(1).values
    assert back.shape == values.shape
    assert bool(((back - values).abs() <= span[:, None] / 255 * 0.51 + 1e-6).all())


@pytest.mark.parametrize("sparsity", [0.95, 1 - 1e-8])
def test_at_least_one_value_of_a_column_is_kept(sparsity: float) -> None:
    assert Kept(sparsity).of(4) == 1


def test_a_chunk_is_a_row_of_the_inner_codec() -> None:
    inner, values = value_codec("int8"), rows(3, CHUNK)
    assert torch.equal(Chunked(inner, CHUNK).encode(values), inner.encode(values))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("forward", OPTIONS)
def test_what_is_not_finite_stays_visible(forward: str, bad: float) -> None:
    if forward == "fp16" and bad == float("inf"):
        return  # clipped, and counted
    values = rows(4, 130)
    values[1, 100] = bad
    c = codec(forward, "none")
    back, _ = c.decode(c.encode(values, columns(130))[0], columns(130))
    assert bool(back[[0, 2, 3]].isfinite().all())
    assert forward == "dct" or not bool(back[1].isfinite().all())


def masked(values: torch.Tensor, dims: tuple[int, ...], share: float) -> torch.Tensor:
    """1 where a value is among the `share` of its column that is largest, by a full sort."""
    masks = []
    for part in values.split(dims, 1):
        k = int(np.ceil(round(share * part.shape[1], 6)))
        order = part.abs().argsort(1, descending=True)[:, :k]
        masks.append(torch.zeros_like(part).scatter_(1, order, 1.0))
    return torch.cat(masks, 1)


@pytest.mark.parametrize("sparsity", [0.95, 0.75, 0.5, 0.0])
@pytest.mark.parametrize("dims", [(16,) * 13, (128, 128, 300), (8, 24, 24, 4, 8)], ids=str)
def test_dct_is_a_masked_row_and_its_gradient(dims: tuple[int, ...], sparsity: float) -> None:
    row = Columns(dims)
    values, gradient = rows(40, row.width), rows(40, row.width, 1)
    c = codec("dct", "none", sparsity)
    data, kept = c.encode(values, row)
    mask = masked(values, dims, 1 - sparsity)
    assert torch.equal(c.decode(data, row)[0], values.half().float() * mask)
    assert torch.equal(c.decode_gradient(c.encode_gradient(gradient, kept), row, kept), gradient * mask)
    c = codec("dct", "dct", sparsity)
    back = c.decode_gradient(c.encode_gradient(gradient, kept), row, kept)
    assert torch.equal(back, (gradient * 1024).half().float() / 1024 * mask)  # scaled for 1,000 examples
