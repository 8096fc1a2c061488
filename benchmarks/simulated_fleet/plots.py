# SPDX-License-Identifier: Apache-2.0
"""Line charts as SVG, written without a library. Both axes are logarithmic."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 640, 340, 70, 190, 34, 46
# Okabe and Ito's palette, which is distinguishable with every type of colour vision.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000", "#999999")

Series = Mapping[str, Sequence[tuple[float, float]]]


def chart(title: str, unit: str, series: Series, target: float | None = None, floor: float = 1e-4) -> str:
    """Return a chart of values over the number of load balancers; `target` is a dashed line."""
    points = [(x, max(y, floor)) for values in series.values() for x, y in values]
    heights = [y for _, y in points] + ([target] if target else [])
    low, high = (10 ** fit(math.log10(end(heights))) for fit, end in ((math.floor, min), (math.ceil, max)))
    first, last = min(x for x, _ in points), max(x for x, _ in points)
    high = high if high > low else 10 * low

    def across(x: float) -> float:
        share = math.log(x / first) / math.log(last / first) if last > first else 0.5
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def down(y: float) -> float:
        share = math.log(max(y, floor) / low) / math.log(high / low)
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)

    parts = [_text(_LEFT, 20, title, "start", size=14, weight="bold")]
    for power in range(round(math.log10(low)), round(math.log10(high)) + 1):
        y = down(10.0**power)
        parts.append(_line(_LEFT, y, _WIDTH - _RIGHT, y, "#dddddd"))
        parts.append(_text(_LEFT - 6, y + 4, f"{10.0**power:g}", "end"))
    for x in sorted({x for x, _ in points}):
        parts.append(_line(across(x), _TOP, across(x), _HEIGHT - _BOTTOM, "#dddddd"))
        parts.append(_text(across(x), _HEIGHT - _BOTTOM + 16, f"{x:,.0f}", "middle"))
    parts.append(_text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 10, "load balancers", "middle"))
    parts.append(_text(_LEFT, _TOP - 4, unit, "start"))
    if target:
        parts.append(_line(_LEFT, down(target), _WIDTH - _RIGHT, down(target), "#555555", dashes="6 4"))
        parts.append(_text(_WIDTH - _RIGHT - 4, down(target) - 5, f"target {target:g}", "end"))
    for place, (name, values) in enumerate(series.items()):
        colour = _COLOURS[place % len(_COLOURS)]
        path = " ".join(f"{across(x):.1f},{down(y):.1f}" for x, y in values)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{across(x):.1f}" cy="{down(y):.1f}" r="3" fill="{colour}"/>' for x, y in values]
        y = _TOP + 10 + 18 * place
        parts.append(_line(_WIDTH - _RIGHT + 12, y - 4, _WIDTH - _RIGHT + 30, y - 4, colour, width=3))
        parts.append(_text(_WIDTH - _RIGHT + 36, y, name, "start"))
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        f'font-size="11" role="img" aria-label="{escape(title)}">\n<rect width="100%" height="100%" fill="white"/>\n'
        f"{body}\n</svg>\n"
    )


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, *, width: int = 1, dashes: str = "") -> str:
    dash = f' stroke-dasharray="{dashes}"' if dashes else ""
    where = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {where} stroke="{colour}" stroke-width="{width}"{dash}/>'


def _text(x: float, y: float, text: str, anchor: str, *, size: int = 11, weight: str = "normal") -> str:
    where = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" font-weight="{weight}"'
    return f"<text {where}>{escape(text)}</text>"
