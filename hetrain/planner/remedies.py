"""What would make an impossible plan possible: each remedy is tried on the planner before it is named.

A number that is named was found enough; a few halvings keep it near the least that is.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from hetrain.planner.cluster import GIB, Cluster
from hetrain.planner.options import Options
from hetrain.planner.workload import TableLoad

GROWTH = (1.0, 1.05, 1.1, 1.2, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0, 100.0)  # of the least that could be enough
HALVINGS = 4
TRIED = 1500  # tables x ranks of which TorchRec's planner takes a second or two
MOST_RANKS = 2048  # of a remedy: nobody has more, and each try takes its time
PRESETS = 2  # named at most
OURS = "hierarchical"
TORCHREC = "torchrec"
BY_ROWS = ("row_wise", "table_row_wise")
MORE_MACHINES = "use {ranks:,} ranks (cluster.nodes={nodes})"
MORE_SERVERS = "use {nodes} servers (cluster.servers={nodes})"
MORE_PROCESSES = "use {ranks} ranks (launch.nproc={ranks})"
MORE_HOSTS = "train on {nodes} machines like this one, {ranks} ranks (torchrun --nnodes {nodes})"


@dataclass(frozen=True)
class Case:
    """What was asked of the planner."""

    strategy: str
    loads: tuple[TableLoad, ...]
    cluster: Cluster
    engine: str
    batch_size: int
    options: Options
    workers: int = 0  # of a store on servers: the ranks beside them that ask for rows


@dataclass(frozen=True)
class Ways:
    """What the one who asks can change."""

    more: str = MORE_MACHINES
    machines: Cluster | None = (
        None  # those described, where they are not the case's own: servers have machines of theirs
    )
    reserve: float = 0.0  # cluster.reserve
    embedding_dim: bool = False  # whether the width of all tables is model.embedding_dim
    presets: Callable[[], Sequence[tuple[str, Cluster]]] = tuple  # other machines, by their words


Fits = Callable[[Case], bool]


@dataclass(frozen=True)
class Memory:
    """What lacks: whether hbm and ddr of the ranks count, bytes that all ranks need at least, and have."""

    hbm: bool
    ddr: bool
    need: float
    there: int


def remedies(case: Case, memory: Memory, worst: int, fits: Fits, ways: Ways) -> Iterator[str]:
    """Every change of one setting, or of machines, that gives a plan; `worst`: the table that needs most of a rank."""
    if case.strategy != OURS and fits(replace(case, strategy=OURS)):
        yield f"set planner={OURS}, which chooses cuts and places by what is left"
    if not too_many(case):
        yield from _changes(case, memory, worst, fits, ways)
        return
    for text in _changes(replace(case, strategy=OURS), memory, worst, fits, ways):
        yield f"set planner={OURS} and {text}"


def too_many(case: Case) -> bool:
    """Whether TorchRec's planner would take minutes for each try."""
    return case.strategy == TORCHREC and len(case.loads) * case.cluster.world_size > TRIED


def _changes(case: Case, memory: Memory, worst: int, fits: Fits, ways: Ways) -> Iterator[str]:
    yield from _memory(case, memory, fits, ways)
    yield from _ranks(case, memory, fits, ways)
    yield from _presets(case, fits, ways)
    yield from _batch(case, fits)
    yield from _allowing(case, worst, fits)
    yield from _smaller(case, worst, fits, ways)


def _memory(case: Case, memory: Memory, fits: Fits, ways: Ways) -> Iterator[str]:
    cluster, machines = case.cluster, ways.machines or case.cluster
    of_device = memory.hbm or machines.kind == "cpu"
    now = cluster.hbm_bytes if memory.hbm else cluster.ddr_bytes
    # cluster.ddr_gib is of a whole machine, and a share of it is reserved
    unit = GIB if of_device else GIB * (1 - ways.reserve) / machines.ranks_per_node
    elsewhere = memory.there - now if memory.hbm and memory.ddr else 0

    def enough(gib: float) -> bool:
        size = int(gib * unit)
        enlarged = replace(cluster, hbm_bytes=size) if memory.hbm else replace(cluster, ddr_bytes=size)
        return fits(replace(case, cluster=enlarged))

    found = _least((memory.need - elsewhere) / unit, now / unit, enough, _round_up)
    if found is not None:
        key = "planner.memory_gib" if of_device else "cluster.ddr_gib"
        yield f"raise {key} from {gib_text(now / unit)} to at least {found:.10g}"


def _ranks(case: Case, memory: Memory, fits: Fits, ways: Ways) -> Iterator[str]:
    cluster = case.cluster
    processes = ways.more == MORE_PROCESSES  # of one machine
    now = cluster.ranks_per_node if processes else cluster.nodes
    each = cluster.world_size // now
    most = MOST_RANKS // each

    def enough(number: float) -> bool:
        n = int(number)
        larger = replace(cluster, ranks_per_node=n) if processes else replace(cluster, nodes=n)
        return n <= most and fits(replace(case, cluster=larger))

    start = min(now * memory.need / max(memory.there, 1), most)
    found = _least(max(start, now + 1), now, enough, math.ceil)
    if found is not None:
        yield ways.more.format(ranks=int(found) * each, nodes=int(found))


def _presets(case: Case, fits: Fits, ways: Ways) -> Iterator[str]:
    """Machines with a name of which the fewest are enough; one of those that have the same memory."""
    found: list[tuple[int, int, str]] = []
    seen = {_memories(case.cluster)}
    for words, cluster in ways.presets():
        if _memories(cluster) in seen:
            continue
        seen.add(_memories(cluster))
        each, most = cluster.ranks_per_node, MOST_RANKS // cluster.ranks_per_node
        held = sum(load.table.rows * load.row_bytes for load in case.loads) / each
        start = held / (cluster.hbm_bytes + cluster.ddr_bytes)

        def enough(number: float, cluster: Cluster = cluster, most: int = most) -> bool:
            return number <= most and fits(replace(case, cluster=replace(cluster, nodes=int(number))))

        nodes = _least(max(min(start, most), 1), 0, enough, math.ceil)
        if nodes is not None:
            found.append((int(nodes) * each, int(nodes), words))
    for ranks, nodes, words in sorted(found)[:PRESETS]:
        yield f"take other machines: {words} cluster.nodes={nodes} ({ranks:,} rank{'s' if ranks > 1 else ''})"


def _memories(cluster: Cluster) -> tuple[str, int, int, int]:
    return cluster.kind, cluster.ranks_per_node, cluster.hbm_bytes, cluster.ddr_bytes


def _batch(case: Case, fits: Fits) -> Iterator[str]:
    size = case.batch_size // 2
    while size and not fits(replace(case, batch_size=size)):
        size //= 2
    if not size:
        return
    low, high = size, min(2 * size, case.batch_size)  # enough, too many
    for _ in range(HALVINGS):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(replace(case, batch_size=middle)) else (low, middle)
    yield f"lower train.batch_size from {case.batch_size} to {low}"


def _allowing(case: Case, worst: int, fits: Fits) -> Iterator[str]:
    """Remedies that lift a limit of the user's."""
    options, name = case.options, case.loads[worst].table.name
    by_rows = ("row_wise",) if case.engine == "store" or case.strategy == TORCHREC else BY_ROWS
    lacking = [kind for kind in by_rows if kind not in options.sharding_types]
    types = (*options.sharding_types, *lacking)
    if lacking and fits(replace(case, options=replace(options, sharding_types=types))):
        yield f"allow {' and '.join(lacking)} (planner.sharding_types=[{','.join(types)}])"
    tiers = (*options.tiers, "ddr")
    on_device = case.engine == "torchrec" and case.cluster.kind == "cuda" and case.strategy != TORCHREC
    if on_device and "ddr" not in options.tiers and fits(replace(case, options=replace(options, tiers=tiers))):
        yield f"allow ddr in planner.tiers, the host's memory (planner.tiers=[{','.join(tiers)}])"
    if name in options.constraints:
        others = {table: rule for table, rule in options.constraints.items() if table != name}
        if fits(replace(case, options=replace(options, constraints=others))):
            yield f"take {name!r} out of planner.constraints"
    if case.engine == "store":
        yield "set store.index=hash to hold only the rows seen"


def _smaller(case: Case, worst: int, fits: Fits, ways: Ways) -> Iterator[str]:
    load = case.loads[worst]
    table = load.table
    half = replace(load, table=replace(table, rows=table.rows // 2), skew=None)
    if table.rows > 1 and fits(replace(case, loads=(*case.loads[:worst], half, *case.loads[worst + 1 :]))):
        how = " (data.min_count)" if ways.embedding_dim else ""
        yield f"halve the rows of {table.name!r} to {table.rows // 2}{how}"
    dim = table.dim // 8 * 4
    if ways.embedding_dim and dim:
        loads = tuple(replace(one, table=replace(one.table, dim=dim)) for one in case.loads)
        if fits(replace(case, loads=loads)):
            yield f"lower model.embedding_dim from {table.dim} to {dim}"


def _least(
    start: float, failing: float, enough: Callable[[float], bool], rounded: Callable[[float], float]
) -> float | None:
    """A value that is enough, little above the least one; None where none is found. `start`: below it none can be."""
    low = failing
    for factor in GROWTH:
        high = rounded(start * factor)
        if high > low:
            if enough(high):
                break
            low = high
    else:
        return None
    for _ in range(HALVINGS):
        middle = rounded((low + high) / 2)
        if not low < middle < high:
            break
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def _round_up(value: float) -> float:
    """Four digits, not less than `value`."""
    if value <= 0:
        return 0.0
    step = 10.0 ** (math.floor(math.log10(value)) - 3)
    return float(f"{math.ceil(value / step) * step:.4g}")


def gib_text(gib: float) -> str:
    """GiB for reading."""
    return f"{gib:.2f}" if gib >= 0.1 else f"{gib:.2g}"
