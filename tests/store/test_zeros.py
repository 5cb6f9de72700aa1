"""Zeroed memory: what it holds, and that it takes none before it is written."""

import re
from pathlib import Path

import pytest
import torch

from hetrain.store.zeros import LINE, lazy_zeros

STATUS = Path("/proc/self/status")


def resident() -> int:
    found = re.search(r"VmRSS:\s+(\d+) kB", STATUS.read_text())
    assert found is not None
    return int(found[1]) * 1024


@pytest.mark.parametrize("shape", [(0,), (7,), (3, 0), (5, 4), (100, 3, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
def test_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    zeros = lazy_zeros(shape, dtype, torch.device("cpu"))
    assert (zeros.dtype, tuple(zeros.shape), zeros.is_contiguous()) == (dtype, shape, True)
    assert not zeros.any()
    assert zeros.numel() == 0 or zeros.data_ptr() % LINE == 0


@pytest.mark.skipif(not STATUS.exists(), reason="needs /proc")
def test_memory_is_taken_when_it_is_written() -> None:
    before = resident()
    zeros = lazy_zeros((1 << 26,), torch.float32, torch.device("cpu"))  # 256 MiB
    assert resident() - before < 1 << 26
    zeros[: 1 << 25] = 1
    assert resident() - before > 1 << 26
