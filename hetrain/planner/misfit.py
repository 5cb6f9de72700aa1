"""The error for tables that do not fit: which, what is needed, what there is, and what to change, in numbers."""

import math
from dataclasses import dataclass

import numpy as np

from hetrain.errors import ConfigError
from hetrain.planner.cluster import GIB
from hetrain.planner.cut import Cut
from hetrain.planner.menu import Menu
from hetrain.planner.options import Options

ROOM = 1.05  # of what the mean rank needs, as parts do not fill ranks to the last byte


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

    def weights(self, menu: Menu) -> float:
        """Bytes of rows and state on the mean rank; none where they may all lie in the hosts' memory instead."""
        elsewhere = not self.counted[1] and any(cut.ddr for row in menu.cuts for cut in row)
        held = sum(load.table.rows * load.row_bytes for load in menu.loads) / menu.cluster.world_size
        return 0.0 if elsewhere else held

    def lacks(self, menu: Menu) -> bool:
        return max(self.mean(menu), max(self.need(menu, k) for k in range(len(menu.cuts)))) > self.there


def misfit(menu: Menu, options: Options, batch_size: int, engine: str, table: int = -1) -> ConfigError:
    """The error; `table` is the one that a strategy could not place, -1 finds the one that needs most of a rank."""
    memory = _lacking(menu)
    needs = [memory.need(menu, kind) for kind in range(len(menu.cuts))]
    worst = int(np.argmax([needs[kind] for kind in menu.kind_of])) if table < 0 else table
    load, need = menu.loads[worst], needs[menu.kind_of[worst]]
    mean = memory.mean(menu)
    words = (
        f"no plan fits: table {load.table.name!r} ({load.table.rows:,} x {load.table.dim}, "
        f"{_gib(load.table.rows * load.row_bytes)} GiB) needs {_gib(need)} GiB of {memory.name} on each rank "
        f"that holds a part of it, in the cut that needs least, and all tables {_gib(mean)} GiB of the mean rank, "
        f"which has {_gib(memory.there)} GiB"
    )
    remedies = _remedies(menu, options, batch_size, engine, memory, worst)
    if table >= 0 and not memory.lacks(menu):
        words += ". All of it would fit, but not in the places that this strategy gives"
        remedies.insert(0, "set planner=hierarchical, which chooses cuts and places by what is left")
    return ConfigError("\n  ".join([f"{words}. Choose one:", *(f"({k}) {text}" for k, text in enumerate(remedies, 1))]))


def _gib(size: float) -> str:
    gib = size / GIB
    return f"{gib:.2f}" if gib >= 0.1 else f"{gib:.2g}"


def _lacking(menu: Menu) -> _Memory:
    cluster = menu.cluster
    if cluster.kind == "cpu" or all(cut.hbm == 0 for row in menu.cuts for cut in row):
        return _Memory("memory", (0, 1), cluster.ddr_bytes)
    hbm = _Memory("hbm", (1, 0), cluster.hbm_bytes)
    used_ddr = any(cut.ddr for row in menu.cuts for cut in row)
    return hbm if hbm.lacks(menu) or not used_ddr else _Memory("hbm and ddr", (1, 1), hbm.there + cluster.ddr_bytes)


def _remedies(menu: Menu, options: Options, batch_size: int, engine: str, memory: _Memory, worst: int) -> list[str]:
    cluster, mean = menu.cluster, memory.mean(menu)
    key, now = (
        ("planner.memory_gib", cluster.device_bytes) if engine == "torchrec" else ("the ranks' memory", memory.there)
    )
    need = memory.need(menu, int(menu.kind_of[worst]))
    lack = max(need, mean) * ROOM - memory.there
    found = [f"raise {key} from {_gib(now)} to at least {_gib(now + max(lack, memory.there * 0.1))}"]
    weights = memory.weights(menu)
    buffers = max(0.0, mean - weights)
    if memory.there > buffers and mean > buffers and need <= max(memory.there, mean * ROOM):
        ranks = max(math.ceil(cluster.world_size * weights * ROOM / (memory.there - buffers)), cluster.world_size + 1)
        nodes = math.ceil(ranks / cluster.ranks_per_node)
        found.append(f"use {nodes * cluster.ranks_per_node} ranks (cluster.nodes={nodes})")
    fit = int(batch_size * (memory.there - min(mean, weights)) / buffers / ROOM) if buffers > 0 else 0
    if 0 < fit < batch_size:
        found.append(f"lower train.batch_size from {batch_size} to {fit}")
    return found + _allowing(menu, options, engine, worst)


def _allowing(menu: Menu, options: Options, engine: str, worst: int) -> list[str]:
    """Remedies that lift a limit of the user's."""
    load, found = menu.loads[worst], []
    by_rows = ("row_wise",) if engine == "store" else ("row_wise", "table_row_wise")
    lacking = [kind for kind in by_rows if kind not in options.sharding_types]
    if lacking:
        found.append(f"allow {' and '.join(lacking)} in planner.sharding_types")
    if engine == "torchrec" and menu.cluster.kind == "cuda" and "ddr" not in options.tiers:
        found.append("allow ddr in planner.tiers, the host's memory")
    if load.table.name in options.constraints:
        found.append(f"take {load.table.name!r} out of planner.constraints")
    if engine == "store":
        found.append("set store.index=hash to hold only the rows seen")
    found.append(f"halve the rows or the width of {load.table.name!r} (data.min_count, model.embedding_dim)")
    return found
