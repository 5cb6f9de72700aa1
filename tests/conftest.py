"""Fixtures shared by all tests."""

import os
from pathlib import Path

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
