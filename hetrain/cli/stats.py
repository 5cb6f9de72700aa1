"""`hetrain stats`: counts the data set, saves and draws what it found, and shows it as a table."""

import logging
import sys
from functools import partial
from pathlib import Path

from hetrain.cli.table import show
from hetrain.config import DataConfig
from hetrain.stats.measure import TOP, Stats, measure, save
from hetrain.stats.picture import draw

logger = logging.getLogger(__name__)
SHOWN = 40  # tables on the screen, those with the most rows; the files have all
HEAD = ("table", "rows", "seen", "missing", "ids/example", *(f"top {share:.1%}" for share in TOP))
HEAD += ("distinct in 512", "in 8,192", "in 65,536", "cache 10%", "LRU 10%")


def run(cfg: DataConfig) -> int:
    """Measure the training rows at `data.path`; the sample is made where there is no data, and never made anew."""
    from hetrain.launch.quiet import show_our_own

    show_our_own()
    path = Path(cfg.path)
    _hold(cfg, path)
    stats = measure(path)
    rows = [_row(column) for column in stats["columns"]]
    whole = _row({"name": "all", **stats["all"]})
    files = save(path, stats), draw(path, stats, HEAD, [*rows, whole])
    largest = sorted(range(len(rows)), key=lambda i: -stats["columns"][i]["rows"])[:SHOWN]
    show(HEAD, [*(rows[i] for i in sorted(largest)), whole])
    print("\n".join(_words(stats, len(rows) - len(largest), files)))
    return 0


def _hold(cfg: DataConfig, path: Path) -> None:
    """Keep the data there as it is while it is counted. To look at a sample of other settings must not replace it."""
    from hetrain.data.hold import hold
    from hetrain.data.sample import differences, ensure_sample, made_from
    from hetrain.data.schema import is_prepared, load_schema

    if cfg.name == "sample" and not is_prepared(path):
        ensure_sample(cfg, keep=True, say=partial(print, file=sys.stderr))
        return
    hold(path)
    if cfg.name == "sample" and (there := load_schema(path).made_from) != made_from(cfg):
        other = f"a sample of other settings ({differences(there, made_from(cfg))})"
        what = other if there.get("kind") == "sample" else "a data set that is no sample"
        logger.warning("data.path=%s: holds %s, which is counted as it is", path, what)


def _row(column: Stats) -> tuple[str, ...]:
    lookups, pooling = column["lookups"] or 1, column["pooling"] or 1

    def left(batch: int) -> str:
        return f"{column['unique'][str(batch)] / (batch * pooling):.1%}"

    return (
        column["name"],
        f"{column['rows']:,}",
        f"{column['distinct']:,}",
        f"{column['missing'] / lookups:.1%}",
        f"{column['pooling']:.4g}",
        *(f"{column['top'][str(share)]:.1%}" for share in TOP),
        *(left(batch) for batch in (512, 8192, 65_536)),
        f"{column['cache']['share']['0.1']:.1%}",
        f"{column['cache']['lru']['0.1']:.1%}",
    )


def _words(stats: Stats, hidden: int, files: tuple[Path, ...]) -> list[str]:
    """What the columns mean, and where the rest is."""
    lines = [
        "",
        f"of {stats['examples']:,} {stats['split']} examples. seen: ids looked up at all; missing: lookups of id 0; "
        "top: share of lookups that the hottest ids get;",
        "distinct in B: ids left of a batch of B examples when repeated ones are dropped; cache 10%: lookups that the "
        "hottest tenth of the rows answers,",
        "and those that a least-recently-used cache of that size would.",
    ]
    if hidden:
        lines.append(f"{hidden:,} smaller tables are in the files alone.")
    return [*lines, f"saved       {files[0]} (read by `hetrain plan`)", f"picture     {files[1]}"]
