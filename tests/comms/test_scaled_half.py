"""16 bits a value, against float64 arithmetic: close, never clipped, and what is not finite stays so."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from hetrain.comms import scaled_half

UNIT = {"fp16": 2.0**-11, "bf16": 2.0**-8}


def through(values: torch.Tensor, name: str) -> torch.Tensor:
    message = scaled_half.encode(values, name)
    assert len(message) == scaled_half.nbytes(len(values))
    assert len(message) % 4 == 0
    assert len(message) <= 2 * len(values) + scaled_half.HEAD + 2
    return scaled_half.decode(message, len(values), name)


FLOATS = st.floats(-(2.0**126), 2.0**126, width=32)


@given(arrays.arrays(np.float32, st.integers(0, 9), elements=FLOATS), st.sampled_from(["fp16", "bf16"]))
def test_values_come_back_rounded(values: np.ndarray, name: str) -> None:
    got = through(torch.from_numpy(values), name).double().numpy()
    largest = np.abs(values).max(initial=0).astype(np.float64)
    least = largest * 2.0**-39 if name == "fp16" else 0.0  # steps of the smallest ones
    least = max(least, 2.0**-126)
    np.testing.assert_array_less(np.abs(got - values), UNIT[name] * np.abs(values.astype(np.float64)) + least)


@pytest.mark.parametrize("size", [1e-38, 1e-9, 1.0, 65_504.0, 1e9, 1e38])
def test_no_size_is_clipped_or_lost(size: float) -> None:
    values = size * torch.tensor([1.0, -0.3, 1e-4])
    torch.testing.assert_close(through(values, "fp16"), values, rtol=1e-3, atol=1e-40)


@pytest.mark.parametrize("name", ["fp16", "bf16"])
@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
def test_what_is_not_finite_stays_so(bad: float, name: str) -> None:
    got = through(torch.tensor([1.0, bad, -2.0]), name)
    torch.testing.assert_close(got, torch.tensor([1.0, bad, -2.0]), equal_nan=True)
