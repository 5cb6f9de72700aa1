"""plan.html: the pieces on the ranks and what they cost, as one page that needs nothing else."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from html import escape

from hetrain.planner.cluster import Cluster
from hetrain.planner.piece import SHARDING_TYPES
from hetrain.planner.planned import Planned
from hetrain.planner.report import milliseconds, size_text
from hetrain.planner.workload import TableLoad

COLORS = dict(
    zip(SHARDING_TYPES, ("#9aa5b1", "#1f6feb", "#2da44e", "#d1570a", "#0f9d9d", "#c13d8f", "#8256d0"), strict=True)
)
SEGMENTS = 6000  # drawn in all: each rank's largest pieces one by one, the rest of a sharding type as one
MOST_TABLES = 500  # listed, those with the most bytes
LEFT, BAR, WIDTH = 74, 780, 1000
STYLE = """\
body{font:15px/1.45 system-ui,sans-serif;max-width:66rem;margin:2rem auto;padding:0 1rem;color:#1c2430}
svg{width:100%;height:auto;display:block}svg text{font-size:11px;fill:#4a5565}
rect.piece{stroke:#fff;stroke-width:.6}rect.room{fill:#f1f3f6}.bound{stroke:#c00;stroke-dasharray:4 3}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}
th,td{text-align:right;padding:.1rem .7rem;border-bottom:1px solid #e3e7ee}
th:first-child,td:first-child{text-align:left}i{display:inline-block;width:.8em;height:.8em;margin:0 .3em 0 1em}"""

Segment = tuple[str, str, float]  # sharding type, what it is, bytes


def page(title: str, lines: Sequence[tuple[str, str]], planned: Planned, loads: Sequence[TableLoad], c: Cluster) -> str:
    """The whole page; `lines`: what the screen shows, as pairs of a label and a text."""
    words = "".join(f"<tr><td>{escape(label)}</td><td>{escape(text)}</td></tr>" for label, text in lines)
    used = [kind for kind in SHARDING_TYPES if kind in planned.plan.sharding.values()]
    legend = "".join(f'<i style="background:{COLORS[kind]}"></i>{kind}' for kind in used)
    return "\n".join(
        [
            f'<!doctype html><meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}',
            ".words td{text-align:left}</style>",
            f'<h1>{escape(title)}</h1><table class="words">{words}</table>',
            f"<h2>What each rank holds</h2><p>{legend}</p>",
            _held(planned, loads, c),
            '<h2>What each rank takes</h2><p><i style="background:#1f6feb"></i>compute '
            '<i style="background:#d1570a"></i>communication '
            '<i style="background:#9aa5b1"></i>fixed, by count of pieces and sharding types; red: the lower bound</p>',
            _taken(planned),
            "<h2>Tables</h2>",
            _tables(planned, loads),
            "",
        ]
    )


def _segments(planned: Planned, loads: Sequence[TableLoad]) -> list[list[Segment]]:
    """Of every rank, its pieces from the largest on."""
    by_name = {load.table.name: load for load in loads}
    ranks: list[list[Segment]] = [[] for _ in planned.ranks]
    plan, first = planned.plan, planned.ranks[0].rank
    for piece in plan.pieces:
        load, kind = by_name[piece.table], plan.sharding[piece.table]
        size = piece.rows * load.row_bytes * piece.columns / load.table.dim
        last_row, last_column = piece.first_row + piece.rows - 1, piece.first_column + piece.columns - 1
        what = f"{piece.table}: rows {piece.first_row:,} to {last_row:,}, columns {piece.first_column} to {last_column}"
        ranks[piece.rank - first].append((kind, f"{what}, {piece.tier}, {size_text(size)}", size))
    for name in sorted(plan.replicated):
        size = by_name[name].table.rows * by_name[name].row_bytes
        for held in ranks[: planned.workers]:
            held.append(("data_parallel", f"{name}: all rows, replicated, {size_text(size)}", size))
    most = max(2, SEGMENTS // len(ranks))
    return [list(_drawn(sorted(held, key=lambda s: (s[0], -s[2])), most)) for held in ranks]


def _drawn(held: Sequence[Segment], most: int) -> Iterator[Segment]:
    """The `most` largest, and what is left of each sharding type as one segment beside them."""
    least = sorted((size for *_, size in held), reverse=True)[most - 1] if len(held) > most else 0
    rest: dict[str, list[float]] = defaultdict(list)
    for kind, what, size in held:
        if size > least or not least:
            yield kind, what, size
        else:
            rest[kind].append(size)
    for kind, sizes in rest.items():
        yield kind, f"{len(sizes):,} smaller pieces, {kind}, {size_text(sum(sizes))}", sum(sizes)


def _held(planned: Planned, loads: Sequence[TableLoad], c: Cluster) -> str:
    room = (c.hbm_bytes if c.kind == "cuda" else 0) + c.ddr_bytes
    segments = _segments(planned, loads)
    fullest = max(1.0, *(sum(size for *_, size in held) for held in segments))
    scale = BAR / min(room or fullest, 1.1 * fullest)
    rows: list[str] = []
    for at, held in enumerate(segments):
        x, y, parts = float(LEFT), _y(at, planned), []
        for kind, what, size in held:
            width = size * scale
            parts.append(
                f'<rect class="piece" x="{x:.1f}" y="{y}" width="{max(width, 0.2):.1f}" height="12" '
                f'fill="{COLORS[kind]}"><title>{escape(what)}</title></rect>'
            )
            x += width
        rows.append(_rank(at, planned, parts, size_text(sum(size for *_, size in held))))
    return _svg(rows, planned)


def _taken(planned: Planned) -> str:
    scale = BAR / max(planned.slowest_ms, planned.lower_bound_ms, 1e-9)
    rows = []
    for at, cost in enumerate(planned.ranks):
        x, y, parts = float(LEFT), _y(at, planned), []
        for color, ms in (("#1f6feb", cost.compute_ms), ("#d1570a", cost.comm_ms), ("#9aa5b1", cost.fixed_ms)):
            parts.append(f'<rect x="{x:.1f}" y="{y}" width="{ms * scale:.1f}" height="12" fill="{color}"/>')
            x += ms * scale
        rows.append(_rank(at, planned, parts, f"{milliseconds(cost.total_ms)} ms"))
    bound = LEFT + planned.lower_bound_ms * scale
    return _svg([*rows, f'<path class="bound" d="M{bound:.1f} 0V{_y(len(rows), planned)}"/>'], planned)


def _per_node(planned: Planned) -> int:
    return planned.plan.ranks_per_node or len(planned.ranks)


def _y(at: int, planned: Planned) -> int:
    """Ranks below each other, with a gap between machines."""
    return 4 + at * 15 + at // _per_node(planned) * 8


def _rank(at: int, planned: Planned, parts: Sequence[str], text: str) -> str:
    """The line of one rank: its name, its bar on the room there is, and a figure."""
    rank, y = planned.ranks[at].rank, _y(at, planned)
    name = f"rank {rank}" if _per_node(planned) == len(planned.ranks) else f"{at // _per_node(planned)} / rank {rank}"
    return "".join(
        [
            f'<text x="{LEFT - 6}" y="{y + 10}" text-anchor="end">{name}</text>',
            f'<rect class="room" x="{LEFT}" y="{y}" width="{BAR}" height="12"/>',
            *parts,
            f'<text x="{LEFT + BAR + 8}" y="{y + 10}">{text}</text>',
        ]
    )


def _svg(rows: Sequence[str], planned: Planned) -> str:
    height = _y(len(planned.ranks), planned) + 4
    return "\n".join([f'<svg viewBox="0 0 {WIDTH} {height}" role="img">', *rows, "</svg>"])


def _tables(planned: Planned, loads: Sequence[TableLoad]) -> str:
    by_size = sorted(loads, key=lambda load: -load.table.rows * load.row_bytes)
    head = ("table", "rows", "dim", "lookups per example", "size", "cut as", "pieces")
    rows = ["".join(f"<th>{cell}</th>" for cell in head)]
    for load in by_size[:MOST_TABLES]:
        table = load.table
        cells = (
            *(escape(table.name), f"{table.rows:,}", f"{table.dim}", f"{load.pooling:g}"),
            size_text(table.rows * load.row_bytes),
            planned.plan.sharding[table.name],
            "on every rank" if table.name in planned.plan.replicated else f"{len(planned.plan.of_table(table.name)):,}",
        )
        rows.append("".join(f"<td>{cell}</td>" for cell in cells))
    left = len(loads) - MOST_TABLES
    more = f"<p>and {left:,} smaller ones</p>" if left > 0 else ""
    return f"<table>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>{more}"
