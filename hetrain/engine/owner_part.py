"""What a rank that owns rows and dense parameters has where ranks step at their own pace, and how others look at it."""

import io
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hetrain.engine.owned import make_owned
from hetrain.engine.recipe import Recipe
from hetrain.engine.store_settings import StoreSettings
from hetrain.roles import Roles
from hetrain.store.dense_shard import DenseShard, State
from hetrain.store.meetings import Meetings
from hetrain.store.service import OwnerService, Parked
from hetrain.store.space import Placement
from hetrain.store.worker_clocks import WorkerClocks
from hetrain.transport.rpc import Reply, RpcTransport


class OwnerPart:
    """Rows, dense shard, worker clocks, and on the first owner the run's count of examples."""

    def __init__(
        self,
        recipe: Recipe,
        settings: StoreSettings,
        placements: Sequence[Placement],
        roles: Roles,
        rank: int,
        dense: Tensor,
        factor: Callable[[int], float],
        *,
        copies: bool,
    ) -> None:
        """`dense` [P]: this owner's slice, as it starts. `factor`, `copies`: see OwnerService."""
        self.rows = [make_owned(recipe, settings, placement, rank, held_back=False) for placement in placements]
        self.dense = DenseShard(dense, recipe.dense_optimizer)
        self.clocks: WorkerClocks[Parked] = WorkerClocks(roles.workers)
        first = rank == roles.owners[0]
        self.meetings = Meetings(roles.world_size, roles.workers) if first else None
        self.service = OwnerService(
            [part.owner for part in self.rows],
            self.dense,
            self.clocks,
            factor,
            copies=copies,
            audit=settings.audit_every > 0,
            meetings=self.meetings,
        )

    def answer(self, transport: RpcTransport) -> None:
        """Beside Asks, from now on."""
        transport.handle("withdraw", self._withdraw)
        transport.handle("clocks", self._clocks)
        transport.handle("dense", self._dense)

    def _withdraw(self, message: Tensor, reply: Reply) -> None:
        self.service.withdraw(*message.tolist())
        reply(message)

    def _clocks(self, _: Tensor, reply: Reply) -> None:
        with self.service.lock:
            clocks = self.clocks.clocks
        reply(torch.tensor(clocks))

    def _dense(self, _: Tensor, reply: Reply) -> None:
        with self.service.lock:
            whole = {"value": self.dense.value, "state": self.dense.state()}
        file = io.BytesIO()
        torch.save(whole, file)
        reply(torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8))

    def restart(self, dense: Tensor, state: State) -> None:
        """Take up the dense shard; rows count as touched where they are not what they start as; clocks from 0."""
        with self.service.lock:
            self.dense.load(dense, state)
            for part in self.rows:
                part.owner.load_state_dict(None)
        self.service.restart()
        if self.meetings is not None:
            self.meetings.plan()

    def report(self) -> dict[str, Any]:
        """What was measured here, by the names of Engine.report."""
        first_end = self.meetings and self.meetings.first_end
        return {
            "missed_pushes_max": self.service.missed_pushes_max,
            "missed_updates_max": self.service.missed_updates_max,
            "lead_max": self.clocks.lead_max,
            "first_end": None if not first_end else {"examples": first_end[0], "seconds": first_end[1]},
            "owner_rows_max": sum(part.owner.memory.nbytes_used for part in self.rows),
        }


def read_dense(transport: RpcTransport, owners: Sequence[int]) -> tuple[list[Tensor], list[State]]:
    """Values and optimizer state of all dense shards, asked of their owners."""
    pending = [transport.call(owner, "dense", torch.empty(0)) for owner in owners]
    shards = [torch.load(io.BytesIO(bytes(transport.wait(p).numpy())), weights_only=True) for p in pending]
    return [shard["value"] for shard in shards], [shard["state"] for shard in shards]
