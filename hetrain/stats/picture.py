"""stats.html: the curves and the table of `hetrain stats` as one page that needs nothing else."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

from hetrain.data.schema import STATS_FILES
from hetrain.durable import write_text
from hetrain.stats.chart import Line, line_chart
from hetrain.stats.measure import Stats

MOST_LINES = 40  # of single columns, those with the most lookups
STYLE = """\
body{font:15px/1.45 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem;color:#1c2430}
svg{max-width:44rem;width:100%;height:auto;display:block}svg text{font-size:12px;fill:#4a5565}
.grid{stroke:#e3e7ee;fill:none}table{border-collapse:collapse;font-variant-numeric:tabular-nums}
th,td{text-align:right;padding:.15rem .7rem;border-bottom:1px solid #e3e7ee}
th:first-child,td:first-child{text-align:left}
p{max-width:44rem}"""
ROW_SHARES = [(0.001, "0.1%"), (0.01, "1%"), (0.1, "10%"), (0.5, "50%")]


def draw(path: Path, stats: Stats, head: Sequence[str], rows: Sequence[Sequence[str]]) -> Path:
    """Write stats.html beside the data; `head` and `rows` are the table shown on the screen."""
    batches = [int(batch) for batch in stats["all"]["unique"]]
    wide = [(batch, f"{batch:,}") for batch in batches[::3]]
    body = [
        f"<h1>{escape(str(path))}</h1>",
        f"<p>{stats['examples']:,} examples of {stats['split']}, {stats['all']['lookups']:,} lookups in "
        f"{len(stats['columns'])} tables with {stats['all']['rows']:,} rows.</p>",
        "<h2>What a cache of rows answers</h2>",
        line_chart(_cache_lines(stats), ROW_SHARES, "share of all rows kept", "share of lookups"),
        "<p>Grey: single tables, their hottest rows. Least recently used is computed for ids that come "
        "independently of each other (Che's approximation); ids that come in bursts fare better.</p>",
        "<h2>What is left of a batch without its repeated ids</h2>",
        line_chart(_unique_lines(stats), wide, "examples of a batch", "distinct ids per lookup", falling=True),
        "<h2>Tables</h2>",
        _table(head, rows),
    ]
    page = f'<!doctype html><meta charset="utf-8"><title>{escape(str(path))}</title><style>{STYLE}</style>'
    file = path / STATS_FILES[1]
    write_text(file, page + "\n".join(body) + "\n")
    return file


def _busiest(stats: Stats) -> list[Stats]:
    return sorted(stats["columns"], key=lambda column: -column["lookups"])[:MOST_LINES]


def _cache_lines(stats: Stats) -> list[Line]:
    def curve(of: Stats, kind: str) -> list[tuple[float, float]]:
        return [(float(share), hits) for share, hits in of["cache"][kind].items()]

    return [
        *(Line(column["name"], curve(column, "share")) for column in _busiest(stats)),
        Line("all tables, the hottest rows", curve(stats["all"], "share"), "#1f6feb", strong=True),
        Line("all tables, least recently used", curve(stats["all"], "lru"), "#d1570a", dashed=True, strong=True),
    ]


def _unique_lines(stats: Stats) -> list[Line]:
    def curve(of: Stats) -> list[tuple[float, float]]:
        return [(int(batch), ids / (int(batch) * of["pooling"])) for batch, ids in of["unique"].items()]

    used = [column for column in _busiest(stats) if column["pooling"]]
    return [*(Line(c["name"], curve(c)) for c in used), Line("all tables", curve(stats["all"]), "#1f6feb", strong=True)]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        return f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"

    return f"<table>{row(head, 'th')}{''.join(row(cells, 'td') for cells in rows)}</table>"
