"""The error for tables that do not fit: which, what is needed, what there is, and what to change, in numbers."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from hetrain.errors import ConfigError
from hetrain.planner.cluster import GIB
from hetrain.planner.cut import Cut
from hetrain.planner.remedies import Case, Fits, Memory, Ways, gib_text, remedies
from hetrain.planner.search.menu import Menu


class MisfitError(ConfigError):
    """No plan fits. `ways` may be set by who knows what can be changed; the text is made when it is read."""

    def __init__(self, case: Case, menu: Menu, fits: Fits, table: int = -1) -> None:
        """`fits`: whether a case has a plan; `table`: the one that a strategy could not place, -1: unknown."""
        super().__init__()
        self._case, self._menu, self._fits, self._table = case, menu, fits, table
        self.ways = Ways()

    def __str__(self) -> str:
        """The table, GiB needed, GiB there, numbered remedies that were tried."""
        return _text(self._case, self._menu, self._fits, self._table, self.ways)

    def __reduce__(self) -> tuple[type[ConfigError], tuple[str]]:
        """For other ranks: the text."""
        return ConfigError, (str(self),)


@dataclass(frozen=True)
class _Memory:
    """Memory that does not suffice: its name, whether hbm and ddr count, bytes of a rank."""

    name: str
    counted: tuple[int, int]
    there: int

    def of(self, cut: Cut) -> int:
        return self.counted[0] * cut.hbm + self.counted[1] * cut.ddr

    def need(self, menu: Menu, kind: int) -> int:
        """Least bytes on a rank that holds a part of a table."""
        return min(map(self.of, menu.cuts[kind]))

    def mean(self, menu: Menu) -> float:
        """Least bytes of all tables on the mean rank."""
        used = self.counted[0] * menu.hbm + self.counted[1] * menu.ddr
        return float(menu.copies @ np.where(menu.there, used, np.inf).min(1))

    def lacks(self, menu: Menu) -> bool:
        return max(self.mean(menu), max(self.need(menu, k) for k in range(len(menu.cuts)))) > self.there


def _text(case: Case, menu: Menu, fits: Fits, table: int, ways: Ways) -> str:
    memory = _lacking(menu)
    needs = [memory.need(menu, kind) for kind in range(len(menu.cuts))]
    worst = int(np.argmax([needs[kind] for kind in menu.kind_of])) if table < 0 else table
    load, need, mean = case.loads[worst], needs[menu.kind_of[worst]], memory.mean(menu)
    words = (
        f"no plan fits: table {load.table.name!r} ({load.table.rows:,} x {load.table.dim}, "
        f"{_gib(load.table.rows * load.row_bytes)} GiB) needs {_gib(need)} GiB of {memory.name} on each rank "
        f"that holds a part of it, in the cut that needs least, and all tables {_gib(mean)} GiB of the mean rank, "
        f"which has {_gib(memory.there)} GiB"
    )
    if not memory.lacks(menu):
        words += ". All of it would fit, but not in the places that this strategy gives"
    lack = Memory(bool(memory.counted[0]), bool(memory.counted[1]), max(need, mean), memory.there)
    return _numbered(words, remedies(case, lack, worst, fits, ways))


def _numbered(words: str, found: Iterable[str]) -> str:
    lines = [f"({k}) {text}" for k, text in enumerate(found, 1)]
    none = "No change of a single setting was found that is enough: make tables smaller and take more machines."
    return "\n  ".join([f"{words}. Choose one:", *lines] if lines else [f"{words}.", none])


def _gib(size: float) -> str:
    return gib_text(size / GIB)


def _lacking(menu: Menu) -> _Memory:
    cluster = menu.cluster
    if cluster.kind == "cpu" or all(cut.hbm == 0 for row in menu.cuts for cut in row):
        return _Memory("memory", (0, 1), cluster.ddr_bytes)
    alone = _Memory("hbm", (1, 0), cluster.hbm_bytes), _Memory("ddr", (0, 1), cluster.ddr_bytes)
    if not any(cut.ddr for row in menu.cuts for cut in row):
        return alone[0]
    both = _Memory("hbm and ddr", (1, 1), cluster.hbm_bytes + cluster.ddr_bytes)
    return next((memory for memory in alone if memory.lacks(menu)), both)
