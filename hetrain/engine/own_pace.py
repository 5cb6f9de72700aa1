"""The Accord of ranks that step at their own pace: one owner keeps the count of examples, the others ask it.

Nobody waits for anybody in a step. A meeting is called where the count reaches what the trainer wants ranks together
for, when a rank has caught a stop signal, and when no worker has anything left to train.
"""

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from signal import Signals
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hetrain.data.reader import Reader
from hetrain.engine import StepOutput
from hetrain.engine.accord import Met
from hetrain.errors import SilentPeerError
from hetrain.store.meetings import Meetings, Verdict
from hetrain.transport.rpc import Pending, Reply, RpcTransport


class OwnPace:
    """Implements Accord (hetrain/engine/accord.py). The engine sets `begun` whenever a step is granted."""

    def __init__(
        self,
        transport: RpcTransport,
        meetings: Meetings | None,
        lock: AbstractContextManager[Any] | None,
        batch_size: int,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """`meetings`, `lock`: on the rank that keeps the count, the first that owns rows."""
        self._transport, self._group, self._meetings = transport, group, meetings
        self._keeper = transport.roles.owners[0]
        self._step_size = batch_size * transport.roles.workers  # examples
        self._reader: Reader | None = None
        self._base = self._carried = 0  # whole steps before this sitting, and examples of the one that was cut
        self._epoch_ends: list[int] = []  # examples of this sitting
        self._epochs_before = 0
        self.begun = 0  # examples of this sitting that were granted, as this rank knows
        self.waited_s = 0.0
        if meetings is not None and lock is not None:
            _Keeper(meetings, lock, _Board()).answer(transport)

    def take_from(self, reader: Reader) -> None:
        """`reader` gives this rank its batches."""
        self._reader = reader

    @property
    def step(self) -> int:
        """Examples granted, in steps begun, those before this sitting included."""
        return self._base + -(-(self._carried + self.begun) // self._step_size)

    def step_of(self, examples: int) -> int:
        """Whole steps taken once `examples` of this sitting are trained, those before it included."""
        return self._base + (self._carried + examples) // self._step_size

    @property
    def examples(self) -> int:
        """Of all ranks in this sitting."""
        return self.begun

    @property
    def epoch(self) -> int:
        """Epochs that all ranks together have trained to their end."""
        return self._epochs_before + sum(end <= self.begun for end in self._epoch_ends)

    def restart(self, step: int) -> None:
        """`step` steps were taken before this sitting."""
        self._base, self._carried, self.begun = step, 0, 0

    def start(self, step: int, next_due: Callable[[int], int | None], *, epochs: bool) -> None:
        """See Accord."""
        self.restart(step)
        assert self._reader is not None
        if self._reader.carried:
            self._base, self._carried = step - 1, self._reader.carried
        self._epochs_before, self._epoch_ends = self._reader.epoch_ends()
        if self._meetings is not None:
            self._meetings.plan(lambda begun: self._next_meeting(begun, next_due, epochs=epochs))
        self._transport.barrier()

    def _next_meeting(self, begun: int, next_due: Callable[[int], int | None], *, epochs: bool) -> int | None:
        """Examples at which ranks meet next."""
        due = next_due(self.step_of(begun))
        found = [] if due is None else [(due - self._base) * self._step_size - self._carried]
        if epochs:
            found += [end for end in self._epoch_ends if end > begun]
        return min(found, default=None)

    def count(self, out: StepOutput) -> None:
        """The engine has set `begun`."""

    def meet(self, out: StepOutput | None) -> Met | None:
        """See Accord. Raises SilentPeerError naming the ranks that do not come."""
        if out is not None:
            return None
        start = time.perf_counter()
        pending = self._transport.call(self._keeper, "attend", torch.tensor([self._transport.rank]))
        self._await(pending)
        self.waited_s += time.perf_counter() - start
        self.begun, signal, ended = pending.value().tolist()
        return Met(Signals(signal) if signal else None, bool(ended))

    def _await(self, pending: Pending[Tensor]) -> None:
        """Wait for the meeting, as long as steps are begun anywhere."""
        before = -1
        while not pending.wait(self._transport.timeout_s):
            begun, *missing = self._transport.ask(self._keeper, "missing", torch.empty(0)).tolist()
            if not pending.there and (begun == before or not missing):  # they may have met meanwhile
                names = " and ".join(self._transport.roles.name(rank) for rank in missing)
                raise SilentPeerError(
                    f"gave up waiting for {names}, which began no step for launch.timeout_s="
                    f"{self._transport.timeout_s:g}. Look at the output there; raise launch.timeout_s if a step takes "
                    "that long."
                )
            before = begun

    def stop(self, number: int) -> None:
        """This rank has caught signal `number`: meet as soon as can be. From a signal handler: takes no lock here."""
        message = torch.tensor([number])
        threading.Thread(target=self._transport.call, args=(self._keeper, "stop", message), daemon=True).start()

    def total(self, sums: Tensor) -> Tensor:
        """See Accord: what ranks have told by now; other ranks than 0 get their own sums back."""
        first = torch.tensor([float(self._transport.rank == 0)], dtype=torch.float64)
        return self._transport.ask(self._keeper, "board", torch.cat([first, sums]))

    def position(self) -> dict[str, Any]:
        """See Accord."""
        assert self._reader is not None
        mine = self._reader.position
        every: list[Any] = [mine]
        if self._transport.world_size > 1:
            every = [None] * self._transport.world_size
            dist.all_gather_object(every, mine, group=self._group)
        carried = (self._carried + self.begun) % self._step_size
        return self._reader.state_dict(every[: self._transport.roles.workers], carried)


class _Board:
    """Sums that ranks have told since rank 0 asked last."""

    def __init__(self) -> None:
        self._sums: Tensor | None = None

    def tell(self, sums: Tensor, *, take: bool) -> Tensor:
        """Add `sums`; with `take`, return all and begin anew."""
        self._sums = sums if self._sums is None else self._sums + sums
        if not take:
            return sums
        taken, self._sums = self._sums, None
        return taken


class _Keeper:
    """What the rank that keeps the count answers."""

    def __init__(self, meetings: Meetings, lock: AbstractContextManager[Any], board: _Board) -> None:
        self._meetings, self._lock, self._sums = meetings, lock, board

    def answer(self, transport: RpcTransport) -> None:
        """From now on."""
        for name in ("attend", "missing", "stop", "board"):
            transport.handle(name, getattr(self, f"_{name}"))

    def _attend(self, message: Tensor, reply: Reply) -> None:
        def tell(verdict: Verdict) -> None:
            reply(torch.tensor([verdict.begun, verdict.signal, verdict.ended]))

        with self._lock:
            told = self._meetings.attend(int(message), tell)
        for one in told:
            one()

    def _missing(self, _: Tensor, reply: Reply) -> None:
        with self._lock:
            now = [self._meetings.begun, *self._meetings.missing]
        reply(torch.tensor(now))

    def _stop(self, message: Tensor, reply: Reply) -> None:
        with self._lock:
            self._meetings.stop(int(message))
        reply(message)

    def _board(self, message: Tensor, reply: Reply) -> None:
        with self._lock:
            sums = self._sums.tell(message[1:], take=bool(message[0]))
        reply(sums)
