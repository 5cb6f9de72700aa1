"""Every option of the store, from the config down to what it sets."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from hetrain.errors import ConfigError
from hetrain.store.capacity import slot_bytes
from hetrain.store.threshold import Dct
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
    assert overlapped(tmp_path / "6", consistency__staleness=0, consistency__late_leg=True)
    assert overlapped(tmp_path / "7", consistency__cache__capacity=0, consistency__late_leg=True)
    assert not overlapped(tmp_path / "8", consistency__late_leg=True, consistency__prefetch=False)


@pytest.mark.parametrize(("capacity", "rows"), [(0, 0), (0.5, ROWS // 2), (1, ROWS), (77, 77), ("0.25", ROWS // 4)])
def test_capacity_in_rows(tmp_path: Path, capacity: float | str, rows: int) -> None:
    assert group_of(tmp_path, consistency__cache__capacity=capacity).capacity_rows == rows


@pytest.mark.parametrize("index", ["array", "hash"])
def test_capacity_in_bytes(tmp_path: Path, index: str) -> None:
    cost = slot_bytes(8, 1, "lfu", index)
    changes: dict[str, Any] = {"consistency__cache__policy": "lfu", "store__index": index}
    assert group_of(tmp_path, consistency__cache__capacity=f"{100 * cost}B", **changes).capacity_rows == 100


@pytest.mark.parametrize("index", ["array", "hash"])
def test_index(tmp_path: Path, index: str) -> None:
    group = group_of(tmp_path, store__index=index)
    kinds = type(group.owner.memory).__name__, type(group.cache.slots._index).__name__
    assert kinds == (f"{index.title()}Memory", f"{index.title()}Index")


def test_memory_is_said_before_it_is_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The prediction's parts are what the owner and the cache then have."""
    engine = make(config(tmp_path, "het", consistency__cache__capacity=100)).setup.engine
    assert "memory: a worker's cache takes 0.1 MiB" in capsys.readouterr().out
    memory, group = engine.memory, engine._groups[0]
    assert memory.most.rows_at_start == group.owner.memory.nbytes_used
    assert memory.most.index == 4 * ROWS
    slots = len(group.cache.copies.value)
    assert memory.most.cache == slots * slot_bytes(8, 1, "lru", "array")
    assert engine.report()["memory"]["worker_rss_max"] > memory.most.cache


def test_too_little_memory_is_refused_before_any_is_taken(tmp_path: Path) -> None:
    cfg = config(tmp_path, "het", consistency__cache__capacity="1MiB")
    with (
        mock.patch("hetrain.engine.store_memory.available_bytes", return_value=50_000),
        mock.patch("hetrain.engine.store_engine.StoreEngine", side_effect=AssertionError),
        pytest.raises(ConfigError) as refusal,
    ):
        make(cfg)
    message = str(refusal.value)
    assert message.startswith("consistency.cache.capacity=1MiB, store.index=array: 1 process on this host would need")
    for part in ("can have 0.00 GiB", "'C1' with 500 rows of 8 values", "store.index=hash", "model.embedding_dim"):
        assert part in message


def test_thresholds_of_rows(tmp_path: Path) -> None:
    """A push out of a cache holds many updates, so that what waits of it goes with the next one."""

    def dct(**changes: Any) -> Dct | None:
        folder = tmp_path / "-".join(changes)
        found: Dct | None = group_of(folder, comms__rows="dct", **changes).cache._codec.dct
        return found

    assert dct() == Dct(sparsity=0.9, max_age=1, refresh_steps=1000, warmup_steps=0)
    assert dct(consistency__cache__capacity=0) == Dct(sparsity=0.9, max_age=16, refresh_steps=1000, warmup_steps=0)
    changed = {"rows_sparsity": 0.5, "max_age": 7, "refresh_steps": 30, "rows_warmup_steps": 4}
    assert dct(**{f"comms__dct__{key}": value for key, value in changed.items()}) == Dct(*[0.5, 7, 30, 4])


@pytest.mark.parametrize("mode", ["het", "asp"])
def test_what_rows_travel_as_decides_whether_caches_go_on(tmp_path: Path, mode: str) -> None:
    ways = [{}, {"comms__rows": "fp16"}, {"comms__rows": "dct"}, {"comms__rows": "dct", "comms__dct__max_age": 3}]
    layouts = [make(config(tmp_path / str(i), mode, **way)).setup.engine._layout for i, way in enumerate(ways)]
    assert all(one != other for i, one in enumerate(layouts) for other in layouts[:i])
