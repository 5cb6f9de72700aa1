"""Tables on disk through torch.distributed.checkpoint: one logical tensor per table, whatever plan cut it.

A rank writes its own pieces, ranges of rows and of columns, and reads those it needs; DCP finds the overlaps, so any
plan and world size can read what another wrote. Row ranges may be uneven, which TorchRec's own ShardedTensors cannot
express.
"""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from hetrain.checkpoint.checksum import Sum, SummedFileSystem
from hetrain.engine import EngineState, Origin, SeenRows, TablePiece
from hetrain.errors import CheckpointError
from hetrain.ranks import Ranks

WEIGHT = "weight"


@dataclass(frozen=True)
class _Rows:
    """The part of the logical tensor `name` that begins at `first`, a view of the engine's memory."""

    name: str
    first: tuple[int, ...]  # row, or row and column
    value: Tensor  # [n] or [n, D]

    @property
    def chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size(self.first), self.value.shape)

    @property
    def end(self) -> list[int]:
        return [first + size for first, size in zip(self.first, self.value.shape, strict=True)]


def _rows_of(table: str, pieces: list[TablePiece]) -> Iterator[_Rows]:
    for piece in pieces:
        if piece.value.shape[0]:
            for key, value in {WEIGHT: piece.value, **piece.optimizer}.items():
                yield _Rows(f"{table}.{key}", (piece.first_row, piece.first_column)[: value.dim()], value)


def _all_rows(state: EngineState) -> list[_Rows]:
    return [rows for table, pieces in state.tables.items() for rows in _rows_of(table, pieces)]


def _logical_sizes(rows: list[_Rows], ranks: Ranks) -> dict[str, list[int]]:
    """The shape of each logical tensor: the highest ends of any rank's pieces."""
    merged: dict[str, list[int]] = {}
    for other in ranks.gather([(r.name, r.end) for r in rows]):
        for name, end in other:
            merged[name] = [max(ends) for ends in zip(merged.get(name, end), end, strict=True)]
    return merged


class _Save(DefaultSavePlanner):
    """Plans one write per piece."""

    def __init__(self, rows: list[_Rows], logical_sizes: dict[str, list[int]]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._rows = {(r.name, r.first): r for r in rows}
        self._logical_sizes = logical_sizes

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """The pieces are known already."""
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        """This rank's pieces."""
        self.plan = SavePlan([self._item(r) for r in self._rows.values()])
        return self.plan

    def _item(self, rows: _Rows) -> WriteItem:
        size = torch.Size(self._logical_sizes[rows.name])
        data = TensorWriteData(rows.chunk, TensorProperties.create_from_tensor(rows.value), size)
        return WriteItem(MetadataIndex(rows.name, rows.chunk.offsets), WriteItemType.SHARD, tensor_data=data)

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """The piece a planned write is about."""
        offset = write_item.index.offset
        assert offset is not None  # set by _item
        return self._rows[write_item.index.fqn, tuple(offset)].value


class _Load(DefaultLoadPlanner):
    """Plans the reads that fill this rank's pieces in place."""

    def __init__(self, rows: list[_Rows]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._rows = {(r.name, r.first): r for r in rows}

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """The pieces are known already."""
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> LoadPlan:
        """One read per overlap of a piece with what was written."""
        assert self.metadata is not None  # the reader found it
        items: list[ReadItem] = []
        for r in self._rows.values():
            saved = self.metadata.state_dict_metadata[r.name]
            assert isinstance(saved, TensorStorageMetadata)  # tables are tensors, checked in load_tables
            items += create_read_items_for_chunk_list(r.name, saved, [r.chunk])
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """The piece a planned read is about."""
        assert index.offset is not None
        return self._rows[index.fqn, tuple(index.offset)].value


def save_tables(state: EngineState, folder: Path, ranks: Ranks, sums: dict[Path, Sum]) -> None:
    """Write every table's weights and row-optimizer state; `sums` gets those of this rank's files. Collective.

    Replicated tables are written by rank 0 alone. Raises CheckpointException on every rank when one failed.
    """
    rows = [
        r
        for table, pieces in state.tables.items()
        if ranks.first or table not in state.replicated
        for r in _rows_of(table, pieces)
    ]
    planner = _Save(rows, _logical_sizes(rows, ranks))
    writer = FileSystemWriter(folder, sync_files=True)
    writer.fs = SummedFileSystem(sums)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # "torch.distributed is disabled": true at one rank
        save(
            {},
            storage_writer=writer,
            planner=planner,
            process_group=ranks.group,
            no_dist=ranks.group is None,
        )


def load_tables(state: EngineState, folder: Path, ranks: Ranks) -> None:
    """Fill the pieces of `state` in place. Collective.

    Raises CheckpointError naming the table when its rows, width or optimizer state are not those of this run, and
    when a file is damaged.
    """
    rows = _all_rows(state)
    reader = FileSystemReader(folder)
    logical = _logical_sizes(rows, ranks)
    ranks.together(lambda: _check_fits(rows, logical, _metadata(reader, folder), folder))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            load({}, storage_reader=reader, planner=_Load(rows), process_group=ranks.group, no_dist=ranks.group is None)
    except CheckpointException as e:
        reasons = "; ".join(f"rank {rank}: {failure[0]}" for rank, failure in e.failures.items())
        raise CheckpointError(f"{folder} is damaged ({reasons}). Use an older checkpoint.") from e


def read_as_seen(state: EngineState, folder: Path) -> Iterator[SeenRows]:
    """All rows of the saved tables, one saved range at a time; ranges of which this rank owns nothing are left out.

    Local. A saved piece is read whole: it takes its size in memory twice while it is read. Raises CheckpointError as
    `load_tables` does.
    """
    assert state.origin is not None
    saved = _metadata(FileSystemReader(folder), folder)
    for index, table in enumerate(state.origin.tables):
        optimizer = _saved_optimizer(saved, state.origin, index, folder)
        weight = saved.state_dict_metadata[f"{table.name}.{WEIGHT}"]
        assert isinstance(weight, TensorStorageMetadata)  # as _saved_optimizer found
        edges = {edge for c in weight.chunks for edge in (c.offsets[0], c.offsets[0] + c.sizes[0])}
        for first, end in pairwise(sorted(edges)):  # of all columns, however those were cut
            rows = end - first
            if state.owns(table.name, first, rows):
                value = torch.empty(rows, table.dim)
                sums = {name: torch.empty(rows, *shape) for name, shape in optimizer.items()}
                _read(list(_rows_of(table.name, [TablePiece(first, value, sums)])), folder)
                yield SeenRows(table.name, torch.arange(first, first + rows), value, sums)


def _saved_optimizer(saved: Metadata, origin: Origin, index: int, folder: Path) -> dict[str, list[int]]:
    """Name and shape per row of a table's saved optimizer state; raises where they are not this run's."""
    table = origin.tables[index]
    shapes: dict[str, list[int]] = {}
    if origin.row_optimizer != "sgd":
        shapes["sum"] = [table.dim] if origin.row_optimizer == "adagrad" else []
    like = TablePiece(0, torch.empty(1, table.dim), {name: torch.empty(1, *shape) for name, shape in shapes.items()})
    rows = list(_rows_of(table.name, [like]))
    _check_fits(rows, {r.name: [table.rows, *r.value.shape[1:]] for r in rows}, saved, folder)
    return shapes


def _read(rows: list[_Rows], folder: Path) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            load({}, storage_reader=FileSystemReader(folder), planner=_Load(rows), no_dist=True)
    except CheckpointException as e:
        raise CheckpointError(f"{folder} is damaged ({e}). Use an older checkpoint.") from e


def _metadata(reader: FileSystemReader, folder: Path) -> Metadata:
    try:
        return reader.read_metadata()
    except Exception as e:
        # a damaged pickle raises whatever its bytes lead to
        raise CheckpointError(f"{folder}/.metadata is damaged ({e}). Use an older checkpoint.") from e


def _check_fits(rows: list[_Rows], sizes: dict[str, list[int]], saved: Metadata, folder: Path) -> None:
    for r in rows:
        table, _, part = r.name.rpartition(".")
        found = saved.state_dict_metadata.get(r.name)
        if not isinstance(found, TensorStorageMetadata):
            if part == WEIGHT:
                raise CheckpointError(f"{folder} has no table {table!r}; this run's data or model is another one.")
            raise CheckpointError(
                f"{folder} has no optimizer state {part!r} of table {table!r}: it was written with another "
                "optimizer.rows.name. Use that one, or start anew with checkpoint.resume=never."
            )
        expected = torch.Size(sizes[r.name])
        if found.size != expected:
            raise CheckpointError(
                f"{part} of table {table!r} is {list(found.size)} in {folder} and {list(expected)} in this run; "
                "data.path (its columns), model.embedding_dim and optimizer.rows.name must be those of the checkpoint."
            )
