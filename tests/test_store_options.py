"""Every option of the store, from the config down to what it sets."""

from pathlib import Path
from typing import Any

import pytest

from hetrain.store.capacity import slot_bytes
from tests.small_run import config, make

ROWS = 500 + 300 + 40 + 9 + 200 + 3


def group_of(folder: Path, **changes: Any) -> Any:
    return make(config(folder, "het", **changes)).setup.engine._groups[0]


def overlapped(folder: Path, **changes: Any) -> bool:
    return bool(make(config(folder, "het", **changes)).setup.engine._settings.overlapped)


@pytest.mark.parametrize("name", ["lru", "lfu", "light_lfu"])
def test_policy(tmp_path: Path, name: str) -> None:
    policy = group_of(tmp_path, consistency__cache__policy=name).cache._policy
    assert name.split("_")[-1] == type(policy).__name__.lower()[-3:]
    assert (getattr(policy, "_limit", None) == 64) == (name == "light_lfu")


def test_validation(tmp_path: Path) -> None:
    directory, clock = (
        group_of(tmp_path / name, consistency__validation=name, name=name) for name in ("directory", "clock")
    )
    assert directory.cache._directory
    assert directory.owner._directory.notices_sent
    assert not clock.cache._directory
    assert not clock.owner._directory.notices_sent


def test_prefetch(tmp_path: Path) -> None:
    assert overlapped(tmp_path / "1")
    assert not overlapped(tmp_path / "2", consistency__prefetch=False)
    assert not overlapped(tmp_path / "3", consistency__staleness=0)
    assert not overlapped(tmp_path / "4", consistency__cache__capacity=0)
    assert not overlapped(tmp_path / "5", consistency__cache__capacity="0MB")


@pytest.mark.parametrize(("capacity", "rows"), [(0, 0), (0.5, ROWS // 2), (1, ROWS), (77, 77), ("0.25", ROWS // 4)])
def test_capacity_in_rows(tmp_path: Path, capacity: float | str, rows: int) -> None:
    assert group_of(tmp_path, consistency__cache__capacity=capacity).capacity_rows == rows


@pytest.mark.parametrize("index", ["array", "hash"])
def test_capacity_in_bytes(tmp_path: Path, index: str) -> None:
    cost = slot_bytes(8, 1, "lfu", index, directory=True)
    changes: dict[str, Any] = {"consistency__cache__policy": "lfu", "store__index": index}
    assert group_of(tmp_path, consistency__cache__capacity=f"{100 * cost}B", **changes).capacity_rows == 100


@pytest.mark.parametrize("index", ["array", "hash"])
def test_index(tmp_path: Path, index: str) -> None:
    group = group_of(tmp_path, store__index=index)
    kinds = type(group.owner.memory).__name__, type(group.cache.slots._index).__name__
    assert kinds == (f"{index.title()}Memory", f"{index.title()}Index")
