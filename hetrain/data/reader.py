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

    In lockstep every rank yields the same number of batches; a rank whose lane ends early yields batches of 0
    examples, and one that computes nothing (`rank` None) never anything else. Otherwise a rank yields the batches of
    its own lane, however far the others are. `state` is what `state_dict()` gave, on any world size.
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
        lockstep: bool = True,
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
        self.carried = 0  # examples trained before, of a step of all ranks that was cut by the end of a sitting
        self.wait_s = 0.0  # seconds the consumer waited for batches
        self._columns = Columns(path, self.split, self.schema)
        self._batches = _BatchMaker(self.schema)
        self._batch_size, self._rank, self._world_size = batch_size, rank, world_size
        self._epochs, self._shuffle, self._seed = epochs, shuffle, seed
        self._window, self._prefetch, self._lockstep = shuffle_window, prefetch, lockstep
        self._fresh = fresh_lanes(self._columns.examples, world_size, shuffle_window)
        self._begun: dict[int, list[Lane]] = {}  # what is left of epochs begun before; of others all of _fresh
        self._first = self._epoch = self._step = 0  # the first epoch not trained to its end, at the start and now
        if state is not None:
            self._load(state)
        if not lockstep:
            self.trained(0)  # this rank may have nothing in the epoch that others are in

    @property
    def steps_per_epoch(self) -> int:
        """Batches of a whole epoch, on every rank."""
        return self._steps(self._fresh)

    @property
    def steps_left(self) -> int:
        """Steps of the run not yet reported as trained; not in lockstep: those of all ranks together, at the start."""
        if not self._lockstep:
            examples = max([0, *self.epoch_ends()[1]]) + self.carried
            return -(-examples // (self._batch_size * self._world_size)) - (self.carried > 0)
        return max(0, sum(self._steps(self._lanes(e)) for e in range(self._epoch, self._epochs)) - self._step)

    @property
    def epoch(self) -> int:
        """Epochs trained to their end; not in lockstep: by this rank."""
        return self._epoch

    def epoch_ends(self) -> tuple[int, list[int]]:
        """Epochs that every rank had ended at the start, and at how many examples of all ranks each of the others ends.

        By count, wherever ranks are: one that is ahead trains examples of the next epoch in place of those that
        another has left of this one. So a run that was cut has the ends of one that was not; some may lie behind it.
        """
        epochs = range(self._first, self._epochs)
        left = sum(lane_size(lane) for epoch in epochs for lane in self._lanes(epoch))
        return self._first, [left - (self._epochs - 1 - epoch) * self._columns.examples for epoch in epochs]

    @property
    def position(self) -> tuple[int, int]:
        """Epochs this rank has trained to their end, and batches of the next one."""
        return self._epoch, self._step

    def trained(self, batches: int = 1) -> None:
        """Move the position: the next `batches` batches were trained."""
        self._step += batches
        while self._epoch < self._epochs and self._step >= self._steps(self._lanes(self._epoch)):
            self._step -= self._steps(self._lanes(self._epoch))
            self._epoch += 1

    def state_dict(self, positions: Sequence[tuple[int, int]] | None = None, carried: int = 0) -> dict[str, Any]:
        """The position as trained, equal on all ranks; plain numbers and lists. `lanes` None: an epoch's start.

        `positions`: those of all ranks where they differ; None: they have this one's. `later`: what is left of the
        epochs that follow, as far as a rank has begun them, now or in a sitting before. `carried`: see there.
        """
        positions = positions or [self.position] * self._world_size
        first, last = min(p[0] for p in positions), max([*self._begun, *(p[0] for p in positions)])
        left = [self._left(epoch, positions) for epoch in range(first, last + 1)]
        more: dict[str, Any] = {"later": left[1:]} if len(left) > 1 else {}
        if carried:
            more["carried"] = [carried, self._batch_size * self._world_size]
        return {
            "examples": self._columns.examples,
            "epoch": first,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "lanes": left[0],
            **more,
        }

    def _left(self, epoch: int, positions: Sequence[tuple[int, int]]) -> list[list[list[int]]] | None:
        """What is left of `epoch`, packed; None: all of it."""
        if epoch not in self._begun and all(position <= (epoch, 0) for position in positions):
            return None
        return pack(
            [
                [] if ended > epoch else drop(lane, step * self._batch_size if ended == epoch else 0)
                for lane, (ended, step) in zip(self._lanes(epoch), positions, strict=True)
            ]
        )

    def _lanes(self, epoch: int) -> list[Lane]:
        """What was left of `epoch` at the start."""
        return self._begun.get(epoch, self._fresh)

    def _load(self, state: dict[str, Any]) -> None:
        if state["examples"] != self._columns.examples:
            raise CheckpointError(
                f"The checkpoint was trained on a split of {state['examples']} rows, this one ({self.split}) has "
                f"{self._columns.examples}. Give data.path the data set of that run, or set checkpoint.resume=never."
            )
        # The rest of an epoch is defined by the permutation it began with.
        self._epoch, self._seed, self._shuffle = state["epoch"], state["seed"], state["shuffle"]
        self._first = self._epoch
        carried, step_size = state.get("carried", (0, 0))
        self.carried = carried if step_size == self._batch_size * self._world_size and not self._lockstep else 0
        for epoch, left in enumerate([state["lanes"], *state.get("later", [])], self._epoch):
            if left is not None:
                lanes = unpack(left)
                self._begun[epoch] = lanes if self._are_fair(lanes) else redeal(lanes, self._world_size)

    def _are_fair(self, lanes: list[Lane]) -> bool:
        """Whether every rank has a lane, and in lockstep none, left by ranks that were apart, outlasts the others."""
        least = -(-sum(map(lane_size, lanes)) // (self._batch_size * self._world_size))
        return len(lanes) == self._world_size and not (self._lockstep and self._steps(lanes) > least)

    def _steps(self, lanes: list[Lane]) -> int:
        """Batches of an epoch with `lanes`, on this rank."""
        chosen = lanes if self._lockstep else [self._share(lanes, [])]
        return max(-(-lane_size(lane) // self._batch_size) for lane in chosen)

    def __iter__(self) -> Iterator[Batch]:
        return ahead(self._cut(), self._prefetch, self._waited) if self._prefetch else inline(self._cut(), self._waited)

    def _waited(self, seconds: float) -> None:
        self.wait_s += seconds

    def _plan(self) -> list[tuple[int, list[Lane]]]:
        """The epochs left and their lanes, from the position as trained."""
        if self._epoch >= self._epochs:
            return []
        now = [drop(lane, self._step * self._batch_size) for lane in self._lanes(self._epoch)]
        return [(self._epoch, now), *((epoch, self._lanes(epoch)) for epoch in range(self._epoch + 1, self._epochs))]

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
                    mine = self._share(here, 0)
                    yield self._batches.make(source.take(mine), sum(here) if self._lockstep else mine)


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
