"""What an engine holds, taken out as a checkpoint takes it, and put back."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hetrain.data.batch import Batch
from hetrain.engine import Engine
from tests.engine.store_cases import train


def tables_of(engine: Engine) -> dict[str, Any]:
    """This rank's pieces, with held-back updates, as numpy: TABLE.KEY@FIRST_ROW; and the dense part by name."""
    with engine.snapshot() as state:
        return {
            f"{name}.{key}@{piece.first_row}": tensor.numpy().copy()
            for name, pieces in state.tables.items()
            for piece in pieces
            for key, tensor in {"value": piece.value, **piece.optimizer}.items()
        } | {name: value.numpy().copy() for name, value in state.dense.items()}


def whole_tables(ranks: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """Tables and their optimizer state from the pieces of all ranks, and the dense part of rank 0."""
    whole = {name: value for name, value in ranks[0].items() if "@" not in name}
    for name in sorted({name.split("@")[0] for rank in ranks for name in rank if "@" in name}):
        pieces = {int(n.split("@")[1]): v for rank in ranks for n, v in rank.items() if n.startswith(f"{name}@")}
        whole[name] = np.concatenate([pieces[first] for first in sorted(pieces)])
    return whole


def _copied(state: Any) -> Any:
    if isinstance(state, Tensor):
        return state.clone()
    if isinstance(state, dict):
        return {key: _copied(value) for key, value in state.items()}
    return [_copied(value) for value in state] if isinstance(state, list) else state


def save(engine: Engine) -> dict[str, Any]:
    """A copy of the fields of EngineState; `tables`: [value, optimizer] per piece."""
    with engine.snapshot() as state:
        tables = {name: [[p.value, p.optimizer] for p in pieces] for name, pieces in state.tables.items()}
        return _copied({**vars(state), "tables": tables})


def load(engine: Engine, saved: dict[str, Any], *, exact: bool) -> None:
    """As a checkpoint does it: fill in place, close, restore."""
    with engine.snapshot() as state:
        assert state.layout == saved["layout"]
        for name, value in saved["dense"].items():
            state.dense[name].copy_(value)
        for name, pieces in saved["tables"].items():
            for piece, (value, optimizer) in zip(state.tables[name], pieces, strict=True):
                piece.value.copy_(value)
                for key, tensor in optimizer.items():
                    piece.optimizer[key].copy_(tensor)
        state.dense_optimizer, state.step = saved["dense_optimizer"], saved["step"]
        state.dense_pending = saved["dense_pending"]
    engine.restore(state, saved["private"] if exact else None)


def reproducible(engine: Engine) -> dict[str, Any]:
    """What the engine reports, but for the memory that its process happened to take at most."""
    report = engine.report()
    memory = {name: size for name, size in report["memory"].items() if not name.endswith("_rss_max")}
    return {**report, "memory": memory}


def same_rows(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two results of `save` have the same pieces with the same values."""
    return one["tables"].keys() == other["tables"].keys() and all(
        torch.equal(a, b)
        for name, pieces in one["tables"].items()
        for (a, _), (b, _) in zip(pieces, other["tables"][name], strict=True)
    )


def gone_on(make: Callable[[], Engine], data: Sequence[Batch], cut: int) -> dict[str, Any]:
    """Train, save after `cut` batches, load into an engine that was in use, go on; load without what is private."""
    first, second = make(), make()
    losses = train(first, iter(data[:cut]))
    saved = save(first)
    rest = train(first, iter(data[cut:]))
    train(second, iter(data[3:]))
    load(second, saved, exact=True)
    again = train(second, iter(data[cut:]))
    ends = [tables_of(first), tables_of(second)]
    reports = [reproducible(first), reproducible(second)]
    load(second, saved, exact=False)
    return {
        "losses": losses + rest,
        "resumed": (rest, again),
        "same": all(np.array_equal(value, ends[1][name]) for name, value in ends[0].items()),
        "reports": reports,
        "folded": same_rows(saved, save(second)),
        "tables": ends[0],
    }


def check_gone_on(rank: dict[str, Any]) -> None:
    """What `gone_on` found of a rank: bit for bit the same, and every row of it where what is private is folded in."""
    assert rank["resumed"][0] == rank["resumed"][1]
    assert rank["same"]
    assert rank["reports"][0] == rank["reports"][1]
    assert rank["folded"]
