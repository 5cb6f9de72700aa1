"""What a plan's pieces and sharding types cost a step beside the bytes that TorchRec's formulas count.

Every rank sends ids to each piece and takes pooled rows from it: index arithmetic, headers and calls that do not grow
with the width of a row. And every sharding type in use has an input and an output exchange of its own, and a kernel.
Measured by `hetrain plan --calibrate`; all are 0 where nothing was measured, and then prices are TorchRec's own.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from math import inf
from typing import Any

US_PER_MS, NS_PER_MS = 1e3, 1e6


@dataclass(frozen=True)
class PieceCosts:
    """What every rank spends in a step, at equal batches of all ranks."""

    type_us: float = 0.0  # on each sharding type in use, but data_parallel
    replicas_us: float = 0.0  # on data_parallel, where it is in use
    piece_us: float = 0.0  # on each piece, for each feature that reads it
    bag_ns: float = 0.0  # the same, for each example of the rank's batch
    id_ns: float = 0.0  # on each id of the rank's batch, for each piece that it goes to

    def part_ms(self, pieces: int, features: int, batch_size: int, ids: float) -> float:
        """Of `pieces` that go together, read by `features` each, to which `ids` of a rank's batch go in all."""
        each = self.piece_us / US_PER_MS + batch_size * self.bag_ns / NS_PER_MS
        return pieces * features * each + ids * self.id_ns / NS_PER_MS

    def types_ms(self, kinds: Iterable[str]) -> float:
        """Of the sharding types of a plan's tables."""
        return sum(self.replicas_us if k == "data_parallel" else self.type_us for k in set(kinds)) / US_PER_MS

    def least_types_ms(self, kinds: Iterable[str]) -> float:
        """What every plan of tables of these types spends at least: it uses one of them."""
        return min((self.types_ms([kind]) for kind in set(kinds)), default=0.0)

    def to_json(self) -> dict[str, float]:
        """As a profile holds it."""
        return asdict(self)

    @classmethod
    def from_json(cls, held: Mapping[str, Any]) -> "PieceCosts":
        """What `to_json` wrote; raises TypeError or ValueError otherwise."""
        found, names = dict(held), {field.name for field in fields(cls)}
        numbers = all(type(value) in (int, float) and 0 <= value < inf for value in found.values())
        if found.keys() != names or not numbers:
            raise ValueError(f"piece_costs {found}")
        return cls(**found)


NO_COSTS = PieceCosts()
