"""One training step, for each way of keeping embeddings.

torchrec_engine.py trains `bsp`; store_engine.py the workers of `het`, and server_engine.py the servers that they may
have; async_engine.py trains `asp` and `ssp`. The trainer calls their `step`; build.py makes them from recipe.py.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from hetrain.data.batch import Batch
from hetrain.tables import Table


@dataclass
class StepOutput:
    """What one step on one rank leaves for the log. Padding (weight 0) is already taken out."""

    loss: Tensor  # [] sum of this rank's example losses, detached
    logits: Tensor  # [B] detached
    labels: Tensor  # [B]
    examples: int  # B
    global_size: int  # examples of all ranks in this step
    wait_comm_s: float  # seconds this rank waited for other ranks


@dataclass
class TablePiece:
    """Rows `first_row .. + n` and columns `first_column .. + D` of one table, as views of the engine's own memory."""

    first_row: int
    value: Tensor  # [n, D] float32, D below the table's where it is cut by columns
    optimizer: dict[str, Tensor]  # name -> [n] or [n, D] float32; [n] of whole rows only
    first_column: int = 0


@dataclass
class SeenRows:
    """Some rows of one table that are no longer what they started as."""

    table: str
    ids: Tensor  # [n] int64, distinct
    value: Tensor  # [n, D] float32
    optimizer: dict[str, Tensor]  # name -> [n] or [n, D] float32


@dataclass(frozen=True)
class Origin:
    """What rows start as: a row that was never seen is in no memory and in no checkpoint."""

    seed: int
    row_optimizer: str
    tables: Sequence[Table]  # in model order


def _owns_all(table: str, first_row: int, rows: int) -> bool:
    return True


@dataclass
class EngineState:
    """What a checkpoint holds. Tables are logical: by name, whatever plan, mode and world size."""

    step: int  # optimizer steps taken
    dense: dict[str, Tensor]  # parameters and buffers by name, equal on all workers; a server has none
    dense_optimizer: dict[str, Any]  # torch optimizer state_dict, equal on all workers; {} on a server
    # table name -> this rank's pieces; where only rows seen are held, none but those of replicated tables
    tables: dict[str, list[TablePiece]]
    replicated: frozenset[str]  # tables every rank holds whole
    private: dict[str, Any]  # this rank's cache, pending updates, clocks: tensors and numbers
    layout: dict[str, Any]  # mode, world size, plan, capacity: `private` fits only an equal layout
    origin: Origin | None = None  # None: rows are whatever `tables` holds
    # Where only rows seen are held: those of this rank, to save; `restore` takes what a checkpoint has put here, other
    # ranks' rows among them. None: `tables` holds all rows.
    seen: Iterable[SeenRows] | None = None
    dense_pending: dict[str, Tensor] = field(default_factory=dict)  # by parameter, gradients that all ranks hold back
    owns: Callable[[str, int, int], bool] = field(default=_owns_all)  # any of rows first_row .. + rows of a table?


class Engine(Protocol):
    """The trainer's whole view of a consistency mode. In lockstep modes every method is collective."""

    def step(self, batches: Iterator[Batch]) -> StepOutput | None:
        """Train on the next batch; None when the iterator is exhausted."""
        ...

    def finish(self) -> None:
        """Flush held-back updates, once, at the end of training."""
        ...

    def evaluating(self) -> AbstractContextManager[None]:
        """Around many `predict`s: held-back updates are made visible once; closing it leaves training as it was."""
        ...

    def predict(self, batch: Batch) -> Tensor:
        """Logits [B] of a batch, every held-back update included; changes nothing."""
        ...

    def snapshot(self) -> AbstractContextManager["EngineState"]:
        """State to save from, or to load into in place; held-back updates are merged while it is open."""
        ...

    def restore(self, state: "EngineState", private: dict[str, Any] | None) -> None:
        """Take up what was loaded in place; `private` is this rank's own saved part, when it fits this run."""
        ...

    def report(self) -> dict[str, Any]:
        """Counters for the summary: cache, observed staleness; summed or maximised over ranks by the caller."""
        ...
