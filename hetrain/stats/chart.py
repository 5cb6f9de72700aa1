"""A line chart as SVG text: a logarithmic x axis, y from 0 to 100%. No library, no script, nothing to load."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 360, 52, 16, 12, 44


@dataclass(frozen=True)
class Line:
    """Points (x > 0, y from 0 to 1) in order of x; `name` is shown on hovering, and in the legend for strong lines."""

    name: str
    points: Sequence[tuple[float, float]]
    color: str = "#b8c0cc"
    dashed: bool = False
    strong: bool = False


def line_chart(
    lines: Sequence[Line], ticks: Sequence[tuple[float, str]], x_title: str, y_title: str, *, falling: bool = False
) -> str:
    """An <svg> element.

    ticks: marks of the x axis, which spans from the first to the last of them.
    falling: the lines leave the corner at the top right free for the legend, not that at the bottom.
    """
    low, high = math.log(ticks[0][0]), math.log(ticks[-1][0])

    def at(x: float, y: float) -> tuple[float, float]:
        across = (math.log(x) - low) / (high - low)
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - y * (HEIGHT - TOP - BOTTOM)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(y_title)}">']
    for share in (0, 0.25, 0.5, 0.75, 1):
        (x0, y), (x1, _) = at(ticks[0][0], share), at(ticks[-1][0], share)
        parts.append(f'<path class="grid" d="M{x0:.1f} {y:.1f}H{x1:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{share:.0%}</text>')
    for value, label in ticks:
        x, y = at(value, 0)
        parts.append(f'<path class="grid" d="M{x:.1f} {y:.1f}V{TOP}"/>')
        parts.append(f'<text x="{x:.1f}" y="{y + 16:.1f}" text-anchor="middle">{escape(label)}</text>')
    parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x_title)}</text>')
    for line in sorted(lines, key=lambda line: line.strong):
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in (at(*point) for point in line.points))
        dash = ' stroke-dasharray="6 4"' if line.dashed else ""
        width = 2.5 if line.strong else 1
        parts.append(
            f'<path d="M{path}" fill="none" stroke="{line.color}" stroke-width="{width}"{dash}>'
            f"<title>{escape(line.name)}</title></path>"
        )
    for number, line in enumerate([line for line in lines if line.strong]):
        y = TOP + 16 + 18 * number if falling else HEIGHT - BOTTOM - 14 - 18 * number
        dash = ' stroke-dasharray="6 4"' if line.dashed else ""
        parts.append(f'<path d="M{WIDTH - 292} {y}h28" stroke="{line.color}" stroke-width="2.5"{dash}/>')
        parts.append(f'<text x="{WIDTH - 258}" y="{y + 4}">{escape(line.name)}</text>')
    return "".join([*parts, "</svg>"])
