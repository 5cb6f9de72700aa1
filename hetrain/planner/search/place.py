"""Where parts lie: ranks' milliseconds and bytes, and placing the largest parts first on the least loaded."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hetrain.planner.cut import ALL, NODE, Cut
from hetrain.planner.search.arrays import Floats, Ints
from hetrain.planner.search.menu import Menu

NONE, UNEQUAL = -1, -2  # in place of a cut's number: not placed, in strips of unequal widths
Kept = tuple[int, list[int], list[Cut]]


class Layout:
    """The load of every rank, and the cut of every table with the node or rank of each part."""

    def __init__(self, menu: Menu) -> None:
        self.menu = menu
        cluster = menu.cluster
        self.world, self.local = cluster.world_size, cluster.ranks_per_node
        self.ms: Floats = np.zeros(self.world)
        self.held: NDArray[np.int64] = np.zeros((2, self.world), dtype=np.int64)  # hbm, ddr
        self.limit = np.array([[cluster.hbm_bytes], [cluster.ddr_bytes]], dtype=np.int64)
        self.cut: Ints = np.full(len(menu.loads), NONE)
        self.places: list[list[int]] = [[] for _ in menu.loads]
        self.parts: list[list[Cut]] = [[] for _ in menu.loads]  # at each of the places
        self.on: list[set[int]] = [set() for _ in range(self.world)]  # tables that load each rank

    @property
    def slowest(self) -> float:
        """Milliseconds of the slowest rank."""
        return float(self.ms.max())

    @property
    def crowded(self) -> float:
        """The share of the mean rank's memory that is used, of devices or of hosts: the larger of both."""
        used: Floats = self.held.mean(1) / np.maximum(self.limit[:, 0], 1)
        return float(used.max())

    @property
    def kinds(self) -> frozenset[str]:
        """Sharding types in use."""
        return frozenset(self.of(table).kind for table in range(len(self.places)))

    @property
    def types_ms(self) -> float:
        """Milliseconds that every rank spends on the sharding types in use, beside those of `ms`."""
        return self.menu.cluster.piece_costs.types_ms(self.kinds)

    def of(self, table: int) -> Cut:
        """The cut of a table; of strips of unequal widths the first."""
        number = int(self.cut[table])
        return self.parts[table][0] if number == UNEQUAL else self.menu.cuts[int(self.menu.kind_of[table])][number]

    def span(self, cut: Cut, place: int) -> slice:
        """The ranks that a part at `place` loads."""
        if cut.place == ALL:
            return slice(0, self.world)
        return slice(place * self.local, (place + 1) * self.local) if cut.place == NODE else slice(place, place + 1)

    def add(self, table: int, place: int, part: Cut | None = None) -> None:
        """Load the ranks of one part, of the table's cut unless another is given."""
        part = part or self.of(table)
        for held in self.on[self._load(part, place, 1)]:
            held.add(table)
        self.places[table].append(place)
        self.parts[table].append(part)

    def take(self, table: int, place: int) -> Cut:
        """Unload the ranks of one part, which is returned."""
        at = self.places[table].index(place)
        part = self.parts[table].pop(at)
        del self.places[table][at]
        for held in self.on[self._load(part, place, -1)]:
            held.discard(table)
        return part

    def _load(self, part: Cut, place: int, sign: int) -> slice:
        ranks = self.span(part, place)
        self.ms[ranks] += sign * part.cost
        self.ms += sign * part.shared_ms
        self.held[0, ranks] += sign * part.hbm
        self.held[1, ranks] += sign * part.ddr
        return ranks

    def remove(self, table: int) -> None:
        """Take a table off all its ranks."""
        for place in list(self.places[table]):
            self.take(table, place)
        self.cut[table] = NONE

    def kept(self, table: int) -> Kept:
        """What `restore` needs to give a table the cut and places that it has now."""
        return int(self.cut[table]), list(self.places[table]), list(self.parts[table])

    def restore(self, table: int, kept: Kept) -> None:
        """Give a table the cut and places it had."""
        if self.cut[table] != NONE:
            self.remove(table)
        cut, places, parts = kept
        self.cut[table] = cut
        for place, part in zip(places, parts, strict=True):
            self.add(table, place, part)

    def copy(self) -> list[Kept]:
        """What `restore_all` needs to make the layout what it is now."""
        return [self.kept(table) for table in range(len(self.places))]

    def restore_all(self, kept: Sequence[Kept]) -> None:
        """Give all tables the cuts and places they had."""
        for table, was in enumerate(kept):
            self.restore(table, was)

    def put_strips(self, table: int, strips: Sequence[Cut], ranks: Sequence[int]) -> None:
        """Place a table in strips of unequal widths, each on a rank of its own."""
        self.cut[table] = UNEQUAL
        for strip, rank in zip(strips, ranks, strict=True):
            self.add(table, rank, strip)

    def put(self, table: int, cut: int, lean: float = 0.0) -> bool:
        """Place a table with cut number `cut`, each part on the least loaded place with room; False if there is none.

        `lean` weighs the share of memory used against the share of the slowest rank's milliseconds.
        """
        self.cut[table] = cut
        chosen = self.of(table)
        for _ in range(chosen.parts):
            place = self._least(chosen, self.places[table], lean)
            if place < 0:
                self.remove(table)
                return False
            self.add(table, place)
        return True

    def _least(self, cut: Cut, taken: Sequence[int], lean: float) -> int:
        """The place with the least load that has room for a part, none of `taken`; -1: there is none."""
        need = np.array([[cut.hbm], [cut.ddr]])
        full: NDArray[np.bool_] = np.any(self.held + need > self.limit, axis=0)
        score = self.ms
        if lean:
            used = ((self.held + need) / np.maximum(self.limit, 1)).max(0)
            score = score / max(self.slowest, cut.cost) + lean * used
        if cut.place == ALL:
            return -1 if full.any() else 0
        if cut.place == NODE:
            full = np.any(full.reshape(-1, self.local), axis=1)
            score = score.reshape(-1, self.local).max(1)
        score = np.where(full, np.inf, score)
        score[list(taken)] = np.inf
        best = int(score.argmin())
        return best if np.isfinite(score[best]) else -1


def place(menu: Menu, choice: Ints, *, by_memory: bool = False, lean: float = 0.0) -> Layout | None:
    """Place every table with its chosen cut [tables], the largest parts first; None where memory does not suffice.

    Parts on every rank go first, then those of nodes, then those of ranks, which even out what the others left.
    With `by_memory` the largest are those of most bytes.
    """
    layout = Layout(menu)
    chosen = [menu.cuts[kind][cut] for kind, cut in zip(menu.kind_of, choice, strict=True)]
    limit = np.maximum(layout.limit[:, 0], 1)

    def size(table: int) -> tuple[float, float]:
        cut = chosen[table]
        memory = max(cut.hbm / limit[0], cut.ddr / limit[1])
        return (-memory, -cut.cost) if by_memory else (-cut.cost, -memory)

    for table in sorted(range(len(chosen)), key=lambda t: (chosen[t].place, *size(t))):
        if not layout.put(table, int(choice[table]), lean):
            return None
    return layout
