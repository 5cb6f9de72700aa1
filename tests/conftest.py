"""Fixtures shared by all tests."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# A busy machine may take any time over an example; what counts is whether it holds.
settings.register_profile("hetrain", deadline=None)
settings.load_profile("hetrain")

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def criteo_rows() -> Path:
    """60,000 real Criteo rows, which are not part of the repository."""
    path = Path(os.environ.get("HETRAIN_CRITEO", ROOT.parent / "shared" / "data" / "criteo_60k.tsv.gz"))
    if not path.exists():
        pytest.skip(f"real Criteo rows not found at {path}; set HETRAIN_CRITEO")
    return path


@pytest.fixture(scope="session")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data set of small_run.py, made once; a test that changes it takes a copy."""
    from hetrain.data.sample import ensure_sample  # what tests of the command alone need not wait for
    from tests.small_run import config

    folder = tmp_path_factory.mktemp("data")
    ensure_sample(config(folder, "het").data)
    return folder / "sample"


@pytest.fixture
def cfg_of(sample: Path, tmp_path: Path) -> Callable[..., Any]:
    """cfg_of(mode, **changes): small_run.config in a folder of the test's own, on the shared data."""
    from tests.small_run import config

    return lambda mode, **changes: config(tmp_path, mode, **{"data__path": str(sample), **changes})
