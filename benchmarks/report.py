"""Medians of quiet windows, and the table of ratios against the goals."""

import statistics
from collections.abc import Mapping, Sequence

from quiet import QUIET, Window

ENOUGH = 3  # quiet windows a figure needs
LOOPS = ("fused", "dmp")
GOALS = {"dense": {512: 1.35, 4096: 1.10}, "deepctr_fit": {512: 2.5, 4096: 1.5}}


def quiet_windows(windows: Sequence[Window]) -> list[Window]:
    """The first ENOUGH quiet windows; where there are fewer, the quietest ones."""
    quiet = [w for w in windows if w.foreign <= QUIET]
    return quiet[:ENOUGH] if len(quiet) >= ENOUGH else sorted(windows, key=lambda w: w.foreign)[:ENOUGH]


def figure(windows: Sequence[Window]) -> dict[str, float | None]:
    """Examples per second: median, lowest and highest of the windows taken, and the worst foreign share in them."""
    taken = quiet_windows(windows)
    rates = [w.rate for w in taken]
    per_cpu_s = [w.examples / w.cpu_s for w in windows if w.cpu_s]
    return {
        "examples_per_s": round(statistics.median(rates), 1),
        "low": round(min(rates), 1),
        "high": round(max(rates), 1),
        "foreign": round(max(w.foreign for w in taken), 3),
        "windows": len(windows),
        "examples_per_cpu_s": round(statistics.median(per_cpu_s), 1) if per_cpu_s else None,
    }


def table(rows: Sequence[Mapping]) -> str:
    """Markdown: one line per (model, batch, hetrain mode). `*` marks figures from windows that were not quiet.

    Goals are judged only where every figure of the cell is quiet.
    """
    cells: dict[tuple, dict[str, Mapping]] = {}
    for row in rows:
        cells.setdefault((row["model"], row["batch_size"]), {})[row["contender"]] = row
    head = ["model", "batch", "dense", "dense+Adam", "loop fused", "loop DMP", "deepctr fit", "mode", "hetrain train"]
    head += ["dense/ours", "dense+Adam/ours", "ours/best loop", "ours/deepctr"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for (model, batch), found in cells.items():
        ours = [name for name in found if name.startswith("hetrain_")] or [""]
        lines += ["| " + " | ".join(_line(model, batch, found, name)) + " |" for name in ours]
    return "\n".join(lines)


def _line(model: str, batch: int, found: Mapping[str, Mapping], ours: str) -> list[str]:
    rate = {name: row["examples_per_s"] for name, row in found.items()}
    shown = [model, str(batch)]
    shown += [_shown(found.get(name)) for name in ("dense", "dense_adam", *LOOPS, "deepctr_fit")]
    shown += [ours.removeprefix("hetrain_"), _shown(found.get(ours))]
    loop = max((rate[name] for name in LOOPS if name in rate), default=None)
    mine = rate.get(ours)
    quiet = all(row["foreign"] <= QUIET for row in found.values())
    limit, rival = (GOALS[name].get(batch) if quiet else None for name in ("dense", "deepctr_fit"))
    shown.append(_ratio(rate.get("dense"), mine, limit, most=True))
    shown.append(_ratio(rate.get("dense_adam"), mine))
    shown.append(_ratio(mine, loop, 1.0 if quiet else None))
    shown.append(_ratio(mine, rate.get("deepctr_fit"), rival))
    return shown


def _shown(row: Mapping | None) -> str:
    return "" if row is None else f"{row['examples_per_s']:,.0f}{'*' if row['foreign'] > QUIET else ''}"


def _ratio(a: float | None, b: float | None, goal: float | None = None, *, most: bool = False) -> str:
    if a is None or b is None:
        return ""
    ratio = a / b
    if goal is None:
        return f"{ratio:.2f}"
    met = ratio <= goal if most else ratio >= goal
    return f"{ratio:.2f} ({'goal met' if met else 'goal missed'}: {'<=' if most else '>='} {goal})"
