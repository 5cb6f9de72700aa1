"""Batches of one split for one rank: sharded, shuffled, cut ahead on threads, resumable at any world size.

Two threads, one after the other: one decodes and permutes whole windows (pyarrow and numpy, which let
go of the interpreter lock), one cuts them into batches. So a new window costs no batch any delay.
numpy, not torch, does the gathering: torch would start a second team of compute threads.
"""

import logging
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hetrain.data.background import ahead, inline
from hetrain.data.batch import Batch
from hetrain.data.columns import Columns
from hetrain.data.lanes import Lane, block_order, drop, fresh_lanes, lane_size, pack, redeal, unpack, window_order
from hetrain.data.schema import DatasetSchema, load_schema
from hetrain.data.window import Window, empty_window, join
from hetrain.errors import CheckpointError, ConfigError

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Reader:
    """Iterates over the batches of all epochs that are left, from the position reported as trained.

    Every rank yields the same number of batches; a rank whose lane ends early yields batches of 0
    examples, and one that computes nothing (`rank` None) never anything else. `state` is what
    `state_dict()` gave, on any world size.
    """

    def __init__(
        self,
        path: str | Path,
        split: str,
        batch_size: int,
        rank: int | None,
        world_size: int,
        *,
        epochs: int = 1,
        shuffle: bool = False,
        seed: int = 0,
        shuffle_window: int = 65_536,
        prefetch: int = 4,
        state: dict[str, Any] | None = None,
    ) -> None:
        limits = [("batch_size", batch_size, 1), ("shuffle_window", shuffle_window, 1), ("prefetch", prefetch, 0)]
        for key, value, least in limits:
            if value < least:
                raise ConfigError(f"{key}={value}: expected a whole number of at least {least}.")
        self.schema: DatasetSchema = load_schema(path)
        self.split = self.schema.used_split(split)  # what is read: test where validation is empty
        if self.split != split and rank == 0:
            logger.warning("data.path=%s has no %s rows: reading %s instead", path, split, self.split)
        self.wait_s = 0.0  # seconds the consumer waited for batches
        self._columns = Columns(path, self.split, self.schema)
        self._batches = _BatchMaker(self.schema)
        self._batch_size, self._rank, self._world_size = batch_size, rank, world_size
        self._epochs, self._shuffle, self._seed = epochs, shuffle, seed
        self._window, self._prefetch = shuffle_window, prefetch
        self._fresh = fresh_lanes(self._columns.examples, world_size, shuffle_window)
        self._epoch, self._lanes, self._step = 0, self._fresh, 0
        if state is not None:
            self._load(state)

    @property
    def steps_per_epoch(self) -> int:
        """Batches of a whole epoch, on every rank."""
        return self._steps(self._fresh)

    @property
    def steps_left(self) -> int:
        """Batches not yet reported as trained."""
        if self._epoch >= self._epochs:
            return 0
        return self._steps(self._lanes) - self._step + (self._epochs - self._epoch - 1) * self.steps_per_epoch

    @property
    def epoch(self) -> int:
        """Epochs trained to their end."""
        return self._epoch

    def trained(self, batches: int = 1) -> None:
        """Move the position: the next `batches` batches were trained."""
        self._step += batches
        while self._epoch < self._epochs and self._step >= self._steps(self._lanes):
            self._step -= self._steps(self._lanes)
            self._epoch, self._lanes = self._epoch + 1, self._fresh

    def state_dict(self) -> dict[str, Any]:
        """The position as trained, equal on all ranks; plain numbers and lists. `lanes` None: an epoch's start."""
        lanes = None
        if self._step or self._lanes is not self._fresh:
            lanes = pack([drop(lane, self._step * self._batch_size) for lane in self._lanes])
        return {
            "examples": self._columns.examples,
            "epoch": self._epoch,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "lanes": lanes,
        }

    def _load(self, state: dict[str, Any]) -> None:
        if state["examples"] != self._columns.examples:
            raise CheckpointError(
                f"The checkpoint was trained on a split of {state['examples']} rows, this one ({self.split}) has "
                f"{self._columns.examples}. Give data.path the data set of that run, or set checkpoint.resume=never."
            )
        # The rest of an epoch is defined by the permutation it began with.
        self._epoch, self._seed, self._shuffle = state["epoch"], state["seed"], state["shuffle"]
        if state["lanes"] is not None:
            lanes = unpack(state["lanes"])
            self._lanes = lanes if len(lanes) == self._world_size else redeal(lanes, self._world_size)

    def _steps(self, lanes: list[Lane]) -> int:
        return max(-(-lane_size(lane) // self._batch_size) for lane in lanes)

    def __iter__(self) -> Iterator[Batch]:
        return ahead(self._cut(), self._prefetch, self._waited) if self._prefetch else inline(self._cut(), self._waited)

    def _waited(self, seconds: float) -> None:
        self.wait_s += seconds

    def _plan(self) -> list[tuple[int, list[Lane]]]:
        """The epochs left and their lanes, from the position as trained."""
        if self._epoch >= self._epochs:
            return []
        now = [drop(lane, self._step * self._batch_size) for lane in self._lanes]
        return [(self._epoch, now), *((epoch, self._fresh) for epoch in range(self._epoch + 1, self._epochs))]

    def _decode(self, plan: list[tuple[int, list[Lane]]]) -> Generator[Window]:
        """This rank's windows of all epochs."""
        for epoch, lanes in plan:
            blocks = block_order(len(self._columns.block_sizes), self._seed, epoch, self._shuffle)
            for piece in self._share(lanes, []):
                if self._shuffle:
                    order = window_order(piece, self._seed, epoch)
                    yield self._columns.read(blocks, piece.lo, piece.hi, order)
                else:
                    yield self._columns.read(blocks, piece.lo + piece.start, piece.lo + piece.stop, None)

    def _share(self, by_rank: Sequence[T], nothing: T) -> T:
        """What is this rank's."""
        return nothing if self._rank is None else by_rank[self._rank]

    def _cut(self) -> Generator[Batch]:
        """This rank's batches of all epochs, empty ones included."""
        plan = self._plan()
        decoded = self._decode(plan)
        with closing(ahead(decoded, 1) if self._prefetch else inline(decoded)) as windows:
            source = _Source(windows, self.schema)
            for _, lanes in plan:
                sizes = [lane_size(lane) for lane in lanes]
                for step in range(self._steps(lanes)):
                    here = [min(max(size - step * self._batch_size, 0), self._batch_size) for size in sizes]
                    yield self._batches.make(source.take(self._share(here, 0)), sum(here))


class _Source:
    """A stream of windows from which any number of examples can be taken."""

    def __init__(self, windows: Iterator[Window], schema: DatasetSchema) -> None:
        multi_hot = sum(column.multi_hot for column in schema.sparse)
        self._empty = empty_window(len(schema.dense), len(schema.sparse) - multi_hot, multi_hot)
        self._windows = windows
        self._now, self._at = self._empty, 0

    def take(self, examples: int) -> Window:
        parts = []
        while examples:
            if self._at == self._now.size:
                self._now, self._at = next(self._windows), 0
            stop = min(self._at + examples, self._now.size)
            parts.append(self._now.cut(self._at, stop))
            examples -= stop - self._at
            self._at = stop
        return join(parts) if parts else self._empty


class _BatchMaker:
    """Turns windows into batches; what depends on B alone is made once per B."""

    def __init__(self, schema: DatasetSchema) -> None:
        self._keys = [column.name for column in schema.sparse]
        self._index = {name: at for at, name in enumerate(self._keys)}
        self._multi_hot = [column.multi_hot for column in schema.sparse]
        self._constants: dict[int, dict[str, Any]] = {}

    def make(self, window: Window, global_size: int) -> Batch:
        sparse = self._mixed(window) if any(self._multi_hot) else self._one_hot(window)
        dense = torch.from_numpy(window.dense)
        return Batch(dense, sparse, torch.from_numpy(window.labels), global_size)

    def _one_hot(self, window: Window) -> KeyedJaggedTensor:
        constants = self._constants.get(window.size)
        if constants is None:
            if len(self._constants) > 64:  # a caller with ever new sizes must not fill the memory
                self._constants.clear()
            constants = self._constants[window.size] = self._constants_of(window.size)
        values = torch.from_numpy(window.one_hot.ravel())  # ravel copies a strided cut: key-major [F * B]
        return KeyedJaggedTensor(keys=self._keys, values=values, **constants)

    def _constants_of(self, size: int) -> dict[str, Any]:
        """Everything of a one-hot KJT but its values, so that TorchRec computes none of it again."""
        features = len(self._keys)
        return {
            "lengths": torch.ones(features * size, dtype=torch.int32),
            "offsets": torch.arange(features * size + 1),  # int64, as the kernels want them
            "stride": size,
            "length_per_key": [size] * features,
            "offset_per_key": [size * key for key in range(features + 1)],
            "index_per_key": self._index,
        }

    def _mixed(self, window: Window) -> KeyedJaggedTensor:
        ones = np.ones(window.size, np.int32)
        one_hot, multi_hot = iter(window.one_hot), iter(window.multi_hot)
        values, lengths = [], []
        for is_multi_hot in self._multi_hot:
            if is_multi_hot:
                column = next(multi_hot)
                values.append(column.values)
                lengths.append(np.diff(column.offsets).astype(np.int32))
            else:
                values.append(next(one_hot))
                lengths.append(ones)
        return KeyedJaggedTensor(
            keys=self._keys,
            values=torch.from_numpy(np.concatenate(values)),
            lengths=torch.from_numpy(np.concatenate(lengths)),
            stride=window.size,
            length_per_key=[len(ids) for ids in values],
            index_per_key=self._index,
        )
