"""What one batch reads through the cache, and what it asks the owners for."""

from dataclasses import dataclass, field, replace

from torch import Tensor, from_numpy

from hetrain.store.index import Ints
from hetrain.store.messages import Reply, Request, no_flags


@dataclass
class Asked:
    """Rows whose copies are made, or found, valid in one exchange.

    `request` goes to the owners (split by route.py) and its reply to `Cache.admit`; only then may the rows be read.
    """

    request: Request  # staged and own-invalid pushes; fetches: missed, own-invalid, noticed rows; checks: doubted ones
    slots_asked: Ints  # [A] slots of all rows this is about, those found valid in silence included
    new_slots: Ints  # [m] where missed rows go
    stale_slots: Ints  # [k] of the cached rows that are fetched anew, the own-invalid ones first
    check_slots: Ints  # [C] of the checked rows
    own_invalid: int  # cached rows that hold back more than the bound: pushed and fetched again


@dataclass
class ReadPlan(Asked):
    """Made by `Cache.begin`, taken back by `admit` and `commit`. Suffixes: n lookups, U distinct rows."""

    slots: Tensor  # [n] int64, CPU: slot of every lookup
    rows: Tensor  # [U] int64: distinct rows, in the order of their last lookup
    touched: Ints  # [U] their slots
    late_slots: Ints  # [l] those that wait for the batch in flight: `Cache.begin_late` asks for them
    late: Tensor = field(default_factory=no_flags)  # [U] bool, with capacity 0: which they are; [0] where none wait

    def leave_late(self, late: Tensor) -> None:
        """With capacity 0, before `admit`: `late` [U] says which rows of the batch have to wait."""
        waits = late.numpy()
        self.late = late
        self.late_slots, self.new_slots = self.touched[waits], self.touched[~waits]
        self.slots_asked, self.request.fetch_rows = self.new_slots, self.rows[~late]

    def without_late(self, reply: Reply) -> Reply:
        """`reply`, which was asked for all rows, as one about those that do not wait."""
        return replace(reply, stored=reply.stored[~self.late]) if len(self.late) else reply

    @property
    def unique_slots(self) -> Tensor:
        """[U] int64: slots of `rows`."""
        return from_numpy(self.touched)
