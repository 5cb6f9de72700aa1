"""`store.index=hash`: the numbers of a run that holds every row, its checkpoints, and tables no memory could hold."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.zipf_data import write as write_zipf
from hetrain.checkpoint import complete, folder
from hetrain.checkpoint.rows import fill_tables
from hetrain.config import RunConfig
from hetrain.engine import SeenRows, TablePiece
from hetrain.errors import CheckpointError
from tests import small_run
from tests.ranks import run_ranks
from tests.small_run import QUALITY, config, evaluate_run, newest, same, taken_up, train_with_signal

HASH = {"store__index": "hash"}
Held = dict[str, Any]  # tables of one rank by name: ids, values, state; the dense part


@pytest.fixture
def cfg_of(cfg_of: Any) -> Any:
    return partial(cfg_of, "het")


def held_by(engine: Any) -> Held:
    """What this rank holds, the same for either index: whole tables, other ranks' rows as they start."""
    with engine.snapshot() as state:
        dense = {name: value.clone().numpy() for name, value in state.dense.items()}
        rows = list(state.seen) if state.seen is not None else []
        for name, pieces in state.tables.items():
            for piece in pieces if name not in state.replicated else pieces[:1]:
                ids = torch.arange(piece.first_row, piece.first_row + len(piece.value))
                optimizer = {key: value.clone() for key, value in piece.optimizer.items()}
                rows.append(SeenRows(name, ids, piece.value.clone(), optimizer))
        positions = [g.owner.memory.rows().numpy() for g in getattr(engine, "_groups", getattr(engine, "_parts", []))]
        plain = [
            (r.table, r.ids.numpy(), r.value.numpy(), {k: v.numpy() for k, v in r.optimizer.items()}) for r in rows
        ]
        return {"dense": dense, "rows": plain, "origin": state.origin, "positions": positions}


def whole(ranks: list[Held]) -> dict[str, np.ndarray]:
    """Tables and their optimizer state from the rows of all ranks, and the dense part."""
    tables = ranks[0]["origin"].tables
    pieces = {t.name: [TablePiece(0, torch.empty(t.rows, t.dim), {"sum": torch.empty(t.rows)})] for t in tables}
    state: Any = type("State", (), {"origin": ranks[0]["origin"], "tables": pieces})()
    tensor = torch.from_numpy
    fill_tables(
        state,
        [
            SeenRows(name, tensor(ids), tensor(value), {k: tensor(v) for k, v in optimizer.items()})
            for rank in ranks
            for name, ids, value, optimizer in rank["rows"]
        ],
    )
    found = {name: piece.value.numpy() for name, (piece,) in pieces.items()}
    found |= {f"{name}.sum": piece.optimizer["sum"].numpy() for name, (piece,) in pieces.items()}
    return found | ranks[0]["dense"]


def train(rank: int, world_size: int, cfg: RunConfig) -> tuple[dict[str, Any], Held]:
    trainer = small_run.make(cfg, rank, world_size)
    summary = trainer.run()
    return summary, held_by(trainer.setup.engine)


def held_when_taken_up(rank: int, world_size: int, cfg: RunConfig) -> Held:
    return held_by(taken_up(rank, world_size, cfg))


@pytest.mark.parametrize(("servers", "capacity"), [(0, 0.0), (0, 0.3), (1, 0.3)])
def test_a_hashed_run_is_the_run_with_every_row(cfg_of: Any, servers: int, capacity: float) -> None:
    changes = {"consistency__cache__capacity": capacity, "train__eval_every": 7, "telemetry__audit_every": 4}
    changes["cluster__servers"] = servers
    array = run_ranks(2 + servers, train, cfg_of(name="array", **changes))
    hashed = run_ranks(2 + servers, train, cfg_of(name="hash", **changes, **HASH))
    same(whole([held for _, held in hashed]), whole([held for _, held in array]))
    for key in (*QUALITY, "missed_updates_max", "bytes"):
        assert hashed[0][0][key] == array[0][0][key], key
    memory = hashed[0][0]["memory"]
    assert memory["owner_rows_max"] > 0 == memory["predicted"]["owner_at_start_max"]
    assert (memory["worker_rss_max"] > 1 << 26) == (memory.get("server_rss_max", 1 << 27) > 1 << 26)
    seen = sum(len(ids) for _, held in hashed for _, ids, _, _ in held["rows"])
    assert 0 < seen < 500 + 300 + 40 + 9 + 200 + 3


@pytest.mark.parametrize(("servers", "threshold"), [(0, None), (1, None), (1, 8 * 300)])
def test_resumed_after_sigterm_equals_uninterrupted(cfg_of: Any, servers: int, threshold: int | None) -> None:
    changes = changed("het", "hash", servers, threshold)
    uncut = run_ranks(2 + servers, train, cfg_of(name="whole", **changes))
    cfg = cfg_of(name="cut", **changes)
    assert run_ranks(2 + servers, train_with_signal, cfg, 7, 0)[0]["interrupted"]
    assert (newest(cfg) / "rows_replicated.bin").is_file() == (threshold is not None)
    resumed = run_ranks(2 + servers, train, cfg)
    same(whole([held for _, held in resumed]), whole([held for _, held in uncut]))
    for (summary, held), (whole_summary, whole_held) in zip(resumed, uncut, strict=True):
        assert all(summary[key] == whole_summary[key] for key in (*QUALITY, "bytes"))
        for mine, other in zip(held["positions"], whole_held["positions"], strict=True):
            np.testing.assert_array_equal(mine, other)


def changed(mode: str, index: str, servers: int, threshold: int | None = None) -> dict[str, Any]:
    found = {"consistency__mode": mode, "store__index": index, "cluster__servers": servers}
    whole = {"planner__name": "hierarchical", "planner__data_parallel_threshold": threshold}
    return found | (whole if threshold else {})


ARRAY, HASHED, SERVED, BSP = ("het", "array", 0), ("het", "hash", 0), ("het", "hash", 1), ("bsp", "array", 0)
WHOLE = 8 * 300  # elements: all but the first table are replicated
WHOLE_ARRAY, WHOLE_HASHED, WHOLE_SERVED = (*ARRAY, WHOLE), (*HASHED, WHOLE), (*SERVED, WHOLE)


AFTER = [
    (HASHED, HASHED, 1),
    (HASHED, SERVED, 3),
    (SERVED, HASHED, 2),
    (HASHED, ARRAY, 2),
    (SERVED, BSP, 2),
    (HASHED, BSP, 1),
    (ARRAY, SERVED, 3),
    (BSP, HASHED, 2),
    (BSP, HASHED, 1),
    (WHOLE_ARRAY, WHOLE_SERVED, 3),
    (WHOLE_ARRAY, ARRAY, 1),
    (WHOLE_HASHED, BSP, 2),
    (ARRAY, WHOLE_HASHED, 2),
    (HASHED, WHOLE_SERVED, 3),
]


@pytest.fixture(scope="module")
def trained(sample: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Runs of 5 steps, one for every way of holding rows: where they lie, and what they held."""
    found: dict[Any, tuple[Path, dict[str, np.ndarray]]] = {}
    folder = tmp_path_factory.mktemp("trained")

    def of(before: Any) -> tuple[Path, dict[str, np.ndarray]]:
        if before not in found:
            changes = {"data__path": str(sample), "train__max_steps": 5, **changed(*before)}
            cfg = config(folder, "het", name="-".join(map(str, before)), **changes)
            held = [held for _, held in run_ranks(2 + before[2], train, cfg)]
            found[before] = Path(cfg.runs) / str(cfg.name), whole(held)
        return found[before]

    return of


@pytest.mark.parametrize(("before", "after", "ranks"), AFTER)
def test_any_index_and_ranks_read_what_others_wrote(
    cfg_of: Any, trained: Any, before: Any, after: Any, ranks: int
) -> None:
    start, expected = trained(before)
    cfg = cfg_of(name="second", train__max_steps=6, checkpoint__resume=str(start), **changed(*after))
    found = run_ranks(ranks, held_when_taken_up, cfg) if ranks > 1 else [held_when_taken_up(0, 1, cfg)]
    same(whole(found), expected)
    if after[1] == "hash":  # no more than what was trained
        assert sum(len(positions) for held in found for positions in held["positions"]) < 1052


def test_rows_never_saved_are_made_from_the_checkpoints_seed(cfg_of: Any) -> None:
    first = cfg_of(name="first", train__max_steps=2, **HASH)
    small_run.make(first).run()
    for key, value, message in [
        ("seed", 7, r"seed=7: expected 1, as in .*step_2, which holds only the rows seen"),
        ("store__init_bound", 0.5, r"table 'C1': bound 0\.01 in .*step_2 and 0\.5 in this run"),
        ("model", {**first.model, "embedding_dim": 4}, "table 'C1': model.embedding_dim 8 in .*step_2 and 4 in this"),
    ]:
        second = cfg_of(name="second", checkpoint__resume=f"{first.runs}/first", **{key: value}, **HASH)
        with pytest.raises(CheckpointError, match=message):
            small_run.make(second)
    second = cfg_of(name="second", checkpoint__resume=f"{first.runs}/first", **HASH)
    second.optimizer.rows.name = "adagrad"
    with pytest.raises(CheckpointError, match=r"optimizer\.rows\.name=adagrad: expected rowwise_adagrad"):
        small_run.make(second)


def test_damaged_rows_are_found(cfg_of: Any) -> None:
    cfg = cfg_of(train__max_steps=2, **HASH)
    small_run.make(cfg).run()
    ((_, path),) = complete(Path(cfg.runs) / cfg.name / "checkpoints")
    assert not (path / "tables").exists()
    file = path / "rows_0.bin"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"rows_0\.bin is damaged"):
        folder.check_files(path, folder.read_meta(path), small_run.ranks_of())


@pytest.mark.parametrize("servers", [0, 1])
def test_a_table_of_ten_billion_rows(tmp_path: Path, servers: int) -> None:
    write_zipf(tmp_path / "zipf", (10**10, 1000), 2000, 500, 1.1, 3)
    changes: dict[str, Any] = {"data__path": str(tmp_path / "zipf"), "data__name": "zipf", "cluster__servers": servers}
    changes |= {"consistency__cache__capacity": 1000, "train__batch_size": 50, **HASH}
    uncut = run_ranks(2 + servers, train, config(tmp_path, "het", name="whole", **changes))
    cfg = config(tmp_path, "het", name="cut", **changes)
    assert run_ranks(2 + servers, train_with_signal, cfg, 9, 1)[0]["interrupted"]
    resumed = run_ranks(2 + servers, train, cfg)
    for (summary, held), (whole_summary, whole_held) in zip(resumed, uncut, strict=True):
        assert all(summary[key] == whole_summary[key] for key in (*QUALITY, "bytes"))
        for one, other in zip(held["rows"], whole_held["rows"], strict=True):
            assert one[0] == other[0]
            np.testing.assert_array_equal(one[1], other[1])
            np.testing.assert_array_equal(one[2], other[2])
    assert max(ids.max() for _, held in uncut for _, ids, _, _ in held["rows"]) > 1 << 32
    assert run_ranks(2 + servers, evaluate_run, cfg)[0] == uncut[0][0]["test"]
