"""Values and positions as bytes: they come back, and positions take the fewer bytes of two ways."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hetrain.comms import scaled_half
from hetrain.comms.sparse_message import HEAD, Sparse, length, pack, unpack

CPU = torch.device("cpu")


def check(whole: int, positions: list[int], elements: int) -> torch.Tensor:
    values = torch.arange(1, whole + len(positions) + 1, dtype=torch.float32)  # float16 holds whole numbers to 2048
    message = pack(Sparse(whole, torch.tensor(positions, dtype=torch.int64), values), elements)
    assert message.dtype == torch.uint8
    assert len(message) % 4 == 0
    assert length(torch.cat([message, torch.full((9,), 7, dtype=torch.uint8)])) == len(message)
    got = unpack(message, elements, CPU)
    assert got.whole == whole
    assert got.positions.tolist() == positions
    torch.testing.assert_close(got.values, values, rtol=2**-11, atol=0)
    return message


def check_values(positions: torch.Tensor, elements: int) -> torch.Tensor:
    """A message of ones, which come back where they were."""
    message = pack(Sparse(0, positions, torch.ones(len(positions))), elements)
    assert torch.equal(unpack(message, elements, CPU).positions, positions)
    return message


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_round_trip(data: st.DataObject) -> None:
    elements = data.draw(st.integers(0, 300))
    whole = data.draw(st.integers(0, elements))
    free = elements - whole
    positions = sorted(data.draw(st.sets(st.integers(0, free - 1), max_size=free) if free else st.just(set())))
    check(whole, positions, elements)


@pytest.mark.parametrize(
    ("whole", "positions", "elements"),
    [
        (0, [], 0),
        (0, [], 5),
        (0, [0], 1),
        (3, [], 3),
        (0, list(range(64)), 64),
        (2, list(range(62)), 64),
        (0, [2**31 - 2], 2**31 - 1),
        (5, [0, 70_000, 2**30], 2**31 - 1),
    ],
)
def test_edges(whole: int, positions: list[int], elements: int) -> None:
    check(whole, positions, elements)


@pytest.mark.parametrize("share", [0.0005, 0.01, 0.1, 0.3, 0.5])
def test_positions_take_little_more_than_they_must(share: float) -> None:
    """At most a fifth above the entropy of which ones are sent."""
    elements = 20_000
    flags = torch.rand(elements, generator=torch.Generator().manual_seed(3)) < share
    positions = flags.nonzero()[:, 0]
    message = check_values(positions, elements)
    nbytes = len(message) - HEAD - scaled_half.nbytes(len(positions))
    p = len(positions) / elements
    entropy = -elements * (p * np.log2(p) + (1 - p) * np.log2(1 - p)) / 8
    assert nbytes <= 1.2 * entropy + 16


@pytest.mark.parametrize("share", [0.5, 0.6, 0.7])
def test_positions_never_take_more_than_a_bit_per_value(share: float) -> None:
    elements = 20_000
    flags = torch.rand(elements, generator=torch.Generator().manual_seed(4)) < share
    positions = flags.nonzero()[:, 0]
    message = check_values(positions, elements)
    assert len(message) - HEAD - scaled_half.nbytes(len(positions)) <= elements // 8 + 3


def test_added_in_place() -> None:
    total = torch.arange(6, dtype=torch.float32)
    sparse = Sparse(2, torch.tensor([0, 3]), torch.tensor([1.0, 2.0, 3.0, 4.0]))
    sparse.add_to(total)
    assert total.tolist() == [1, 3, 5, 3, 4, 9]
    sparse.add_to(total, -1.0)
    assert total.tolist() == [0, 1, 2, 3, 4, 5]
