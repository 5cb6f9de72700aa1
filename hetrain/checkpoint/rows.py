"""Rows seen, on disk: what a checkpoint holds where owners keep only the rows that training has met.

Each rank writes one file of blocks, and the first another of the tables that all workers hold: a line of JSON (table,
rows, widths), then ids, values and optimizer state as they lie in memory. Rows that are in no file are what they
started as, so the checkpoint also says what that was (meta.json, `origin`). Blocks are read one at a time, by any
number of ranks, each of which takes the rows it owns.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hetrain.checkpoint.checksum import Sum, writing
from hetrain.engine import EngineState, Origin, SeenRows
from hetrain.engine.table_memory import fill
from hetrain.errors import CheckpointError

PREFIX, SUFFIX = "rows_", ".bin"
WHOLE = f"{PREFIX}replicated{SUFFIX}"  # beside the rows seen: tables that every worker holds whole, written once


def rows_file(rank: int) -> str:
    """The file that `rank` writes."""
    return f"{PREFIX}{rank}{SUFFIX}"


def origin_json(origin: Origin) -> dict[str, Any]:
    """What rows start as, for meta.json."""
    return {
        "seed": origin.seed,
        "row_optimizer": origin.row_optimizer,
        "tables": {
            table.name: {"index": index, "rows": table.rows, "dim": table.dim, "init_bound": table.init_bound}
            for index, table in enumerate(origin.tables)
        },
    }


def check_origin(saved: Mapping[str, Any], origin: Origin, folder: Path) -> None:
    """Raise CheckpointError where rows that the checkpoint does not hold would start as others in this run."""
    mine = origin_json(origin)
    for key, name in (("seed", "seed"), ("row_optimizer", "optimizer.rows.name")):
        if saved[key] != mine[key]:
            raise CheckpointError(
                f"{name}={mine[key]}: expected {saved[key]}, as in {folder}, which holds only the rows seen and makes "
                "all others anew. Set it to that, or start anew with checkpoint.resume=never."
            )
    keys = {"index": "place among the columns", "rows": "rows", "dim": "model.embedding_dim", "init_bound": "bound"}
    for table in dict.fromkeys([*saved["tables"], *mine["tables"]]):
        there, here = saved["tables"].get(table), mine["tables"].get(table)
        if there is None or here is None:
            where = "this run" if here is None else str(folder)
            raise CheckpointError(f"{where} has no table {table!r}; this run's data or model is another one.")
        for key, name in keys.items():
            if there[key] != here[key]:
                raise CheckpointError(
                    f"table {table!r}: {name} {there[key]} in {folder} and {here[key]} in this run; the data set, "
                    "model.embedding_dim and store.init_bound must be those of the checkpoint."
                )


# -- files ----------------------------------------------------------------------------------------


def write_rows(rows: Iterable[SeenRows], file: Path, sums: dict[Path, Sum]) -> None:
    """Write `file`; `sums` gets its sum. Raises OSError."""
    with writing(file, sums) as f:
        for some in rows:
            parts = {"ids": some.ids, "value": some.value, **{f"optimizer.{k}": v for k, v in some.optimizer.items()}}
            shapes = {name: list(tensor.shape) for name, tensor in parts.items()}
            f.write(json.dumps({"table": some.table, "shapes": shapes}).encode() + b"\n")
            for tensor in parts.values():
                f.write(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)


def read_rows(folder: Path, names: Iterable[str]) -> Iterator[SeenRows]:
    """All blocks of the files `names` of a checkpoint, whose sums were checked."""
    for name in names:
        with (folder / name).open("rb") as f:
            while line := f.readline():
                head = json.loads(line)
                parts = {}
                for part, shape in head["shapes"].items():
                    kind = torch.int64 if part == "ids" else torch.float32
                    size = kind.itemsize * int(torch.Size(shape).numel())
                    data = bytearray(f.read(size))
                    if len(data) < size:
                        raise CheckpointError(f"{folder / name} ends too early. Use an older checkpoint.")
                    parts[part] = torch.frombuffer(data, dtype=kind).view(shape) if size else torch.empty(shape)
                ids, value = parts.pop("ids"), parts.pop("value")
                optimizer = {part.removeprefix("optimizer."): tensor for part, tensor in parts.items()}
                yield SeenRows(head["table"], ids, value, optimizer)


def whole_rows(state: EngineState) -> Iterator[SeenRows]:
    """All rows of the replicated tables of an engine that else holds rows seen."""
    for name in state.replicated:
        for piece in state.tables[name]:
            yield SeenRows(name, torch.arange(len(piece.value)), piece.value, piece.optimizer)


def files_of(rank: int, meta: Mapping[str, Any]) -> list[str]:
    """What `rank` needs of a checkpoint of its own layout: what it wrote, and tables that all hold."""
    return [rows_file(rank), *(name for name in meta["files"] if name == WHOLE)]


def saved_files(meta: Mapping[str, Any]) -> list[str]:
    """The files of rows seen of a checkpoint."""
    return [name for name in meta["files"] if name.startswith(PREFIX)]


# -- into tables ----------------------------------------------------------------------------------


def fill_tables(state: EngineState, rows: Iterable[SeenRows]) -> None:
    """Make the pieces of `state.tables` what they start as, then write those of `rows` that lie in them."""
    for _ in beside_tables(state, rows):
        pass


def beside_tables(state: EngineState, rows: Iterable[SeenRows]) -> Iterator[SeenRows]:
    """What `fill_tables` does, while the rows of other tables than those of `state.tables` are taken from here."""
    assert state.origin is not None
    origin = state.origin
    for index, table in enumerate(origin.tables):
        for piece in state.tables.get(table.name, ()):
            fill(piece, origin.seed, index, table.init_bound)
            for tensor in piece.optimizer.values():
                tensor.zero_()
    for some in rows:
        if some.table not in state.tables:
            yield some
        for piece in state.tables.get(some.table, ()):
            at = some.ids - piece.first_row
            inside = (at >= 0) & (at < len(piece.value))
            if inside.any():
                _put(piece.value, at[inside], some.value[inside], piece.first_column)
                for name, tensor in piece.optimizer.items():
                    _put(tensor, at[inside], some.optimizer[name][inside], piece.first_column)


def _put(out: Tensor, at: Tensor, value: Tensor, first_column: int) -> None:
    """Write rows [n] or [n, D] at `at` of `out`, which may hold fewer columns, from `first_column` on."""
    if out.dim() > 1:
        value = value[:, first_column : first_column + out.shape[1]]
    with torch.no_grad():
        out.index_copy_(0, at.to(out.device), value.to(out.device).reshape(len(at), *out.shape[1:]))
