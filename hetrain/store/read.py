"""What one batch reads through the cache."""

from dataclasses import dataclass

from torch import Tensor, from_numpy

from hetrain.store.index import Ints
from hetrain.store.messages import Request


@dataclass
class ReadPlan:
    """Made by `Cache.begin`, taken back by `admit` and `commit`. Suffixes: n lookups, U distinct rows.

    `request` goes to the owners (split by route.py) and its reply to `Cache.admit`; only then may the
    slots be read.
    """

    slots: Tensor  # [n] int64, CPU: slot of every lookup
    rows: Tensor  # [U] int64: distinct rows, in the order of their last lookup
    touched: Ints  # [U] their slots
    request: Request  # staged and own-invalid pushes; fetches: missed, own-invalid, noticed rows; checks: doubted ones
    new_slots: Ints  # [m] where missed rows go
    stale_slots: Ints  # [k] of the cached rows that are fetched anew, the own-invalid ones first
    check_slots: Ints  # [C] of the checked rows
    own_invalid: int  # cached rows that hold back more than the bound: pushed and fetched again

    @property
    def unique_slots(self) -> Tensor:
        """[U] int64: slots of `rows`."""
        return from_numpy(self.touched)
