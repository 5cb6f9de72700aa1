"""The rows that a rank owns where ranks step together: workers and servers show, save and take them up alike."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from hetrain.engine import EngineState
from hetrain.engine.owned import OwnedPart
from hetrain.engine.owned_tables import owned_tables, owns, rows_of, seen_rows, take_up_rows
from hetrain.engine.recipe import Recipe
from hetrain.engine.store_settings import StoreSettings
from hetrain.transport.collective import CollectiveTransport


class LockstepRows:
    """A rank's own rows, by embedding dim, and how far its steps are.

    `step`: those taken. `is_read`: whether the rows of the batch to come were. `missed_updates_max`: found by audits.
    """

    def __init__(
        self, recipe: Recipe, settings: StoreSettings, parts: Sequence[OwnedPart], layout: dict[str, Any]
    ) -> None:
        """`layout`: see EngineState."""
        self.step, self.is_read, self.missed_updates_max = 0, False, 0
        self.shown = False  # whether owners show every held-back update, and nothing can change
        self._recipe, self._parts, self._layout = recipe, parts, layout
        self._hashed = settings.index == "hash"  # memory, and checkpoints, hold the rows seen
        self._overwritten: list[tuple[Tensor, Tensor, Tensor]] = []

    def begin_step(self) -> None:
        """Owners get the rate of the step whose gradients come next; what was loaded in place has been taken up."""
        self._overwritten = []
        self.set_rates(self.step - 1)

    def set_rates(self, step: int) -> None:
        """The rate of `step`, whose gradients come next."""
        rate = self._recipe.row_rate(max(step, 0))
        for part in self._parts:
            part.owner.learning_rate = rate

    @contextmanager
    def showing(self, push: Callable[[], None]) -> Iterator[None]:
        """While open, owners show every held-back update, once `push` has brought it. Not while it is open."""
        self.shown = True
        self.set_rates(self.step - 1)
        try:
            with ExitStack() as stack:
                stack.enter_context(self._recipe.traffic.set_aside())
                for part in self._parts:
                    stack.enter_context(part.owner.view())
                push()
                yield
        finally:
            self.shown = False

    @contextmanager
    def saving(self, groups: Sequence[dict[str, Any]]) -> Iterator[EngineState]:
        """Inside `showing`: the state of a rank that has these rows and no network. `groups`: private, one per part."""
        yield EngineState(
            step=self.step,
            dense={},
            dense_optimizer={},
            tables={} if self._hashed else owned_tables(self._parts),
            replicated=frozenset(),
            private={
                "step": self.step,
                "is_read": self.is_read,
                "missed_updates_max": self.missed_updates_max,
                "groups": groups,
            },
            layout=self._layout,
            origin=self._recipe.origin,
            seen=seen_rows(self._parts) if self._hashed else None,
            owns=partial(owns, self._parts),
        )
        # Rows loaded in place are lost where closing the view undoes them: `take_up` writes them once more.
        if not self._hashed:
            self._overwritten = [
                rows_of(part.owner, group["owner"]["rows"]) for part, group in zip(self._parts, groups, strict=True)
            ]

    def take_up(self, state: EngineState, private: dict[str, Any] | None) -> None:
        """Rows loaded in place, and how far steps were; clocks are up to the caller. See Engine.restore."""
        for part, (rows, value, optimizer_state) in zip(self._parts, self._overwritten, strict=not self._hashed):
            part.owner.value.index_copy_(0, rows, value)
            part.owner.state.index_copy_(0, rows, optimizer_state)
        self._overwritten = []
        if self._hashed:
            owners = None if private is None else [group["owner"] for group in private["groups"]]
            take_up_rows(self._parts, state, owners)
        self.step = state.step if private is None else int(private["step"])
        self.is_read = private is not None and bool(private["is_read"])
        self.missed_updates_max = 0 if private is None else int(private["missed_updates_max"])


def lockstep_rounds(
    recipe: Recipe, settings: StoreSettings, parts: Sequence[OwnedPart], group: dist.ProcessGroup | None
) -> CollectiveTransport:
    """What exchanges the rows of `parts`, equally on workers and servers."""

    def widths(part: OwnedPart) -> tuple[int, int]:
        dim = part.placement.space.dim
        return dim, recipe.row_optimizer.state_width(dim) if part.owner.held_back else 0

    return CollectiveTransport(
        [part.owner for part in parts],
        [widths(part) for part in parts],
        recipe.traffic,
        timeout_s=settings.timeout_s,
        group=group,
        device=recipe.device,
        servers=settings.servers,
        blocks=max(1, settings.late_blocks),
        rows=settings.rows,
    )
