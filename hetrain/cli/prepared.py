"""What `hetrain prepare` says when the data set is there."""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

RAW_ALONE = ("data.raw=", "data.min_count=", "data.split", "data.on_bad_row=")  # training does not look at them


def in_words(report: Mapping[str, Any], following: str) -> list[str]:
    """The lines for a report of `prepare`; `following`: the command to run next."""
    rows, positives = report["rows"], report["positives"]
    where = report["path"] if report["made"] else f"{report['path']} (was there already, made with the same settings)"
    lines = [("data set", where)]
    for split, count in rows.items():
        share = f", {positives[split]:,} positive ({positives[split] / count:.1%})" if count else ""
        lines.append((split, f"{count:>{len(f'{max(rows.values()):,}')},} rows{share}"))
    if report.get("bad_rows"):
        lines.append(("left out", f"{report['bad_rows']:,} bad, first {_without_remedy(report)}"))
    lines.append(("tables", f"{len(report['cardinalities'])} with {report['table_rows']:,} rows together"))
    if report["made"]:
        lines.append(("took", f"{report['seconds']:,.1f} s, {report['rows_per_s']:,.0f} rows/s"))
    lines.append(("next", following))
    return [f"{label:<12}{text}" for label, text in lines]


def _without_remedy(report: Mapping[str, Any]) -> str:
    """The first bad row's message without its advice, which was taken."""
    text: str = report["first_bad_row"]
    return text.partition(". Mend the line")[0]


def next_command(overrides: Sequence[str], config_dir: str | None, *, from_raw: bool) -> str:
    """The training on what `hetrain prepare` made with `overrides`. A sample of other settings would be made anew."""
    words = [word for word in overrides if not (from_raw and word.startswith(RAW_ALONE))]
    if not any(word.lstrip("+").startswith("experiment=") for word in words):
        words.insert(0, "+experiment=criteo_het")
    return shlex.join(["hetrain", "train", *(["--config-dir", config_dir] if config_dir else []), *words])
