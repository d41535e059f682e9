"""Plots as SVG, which GitHub shows: bars, and lines over a number.

A library would take 40 MB for two kinds of plot, and draw every letter as a path. The colours can be told apart by
colour-blind readers; the background is white on dark pages too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8c6d1f", "#56b4e9", "#000000")
_WIDTH, _LEFT, _RIGHT, _TOP = 760, 64, 20, 62
_PLOT_HEIGHT, _BAR = 280, 26
_LABELS = 300
"""Pixels for the names of bars."""


@dataclass(frozen=True, slots=True)
class PlotPoint:
    """A median, with quartiles."""

    x: float
    y: float
    low: float
    high: float

    @staticmethod
    def of(x: float, spread: Mapping[str, float]) -> PlotPoint:
        """A point from the result of `figures.spread`."""
        return PlotPoint(x, spread["median"], spread["q1"], spread["q3"])


def bars(title: str, note: str, unit: str, points: Mapping[str, PlotPoint]) -> str:
    """Return one bar for each name, with its quartiles; `x` of the points is ignored."""
    most = max((point.high for point in points.values()), default=0.0) or 1.0
    scale = (_WIDTH - _LABELS - 90) / most
    parts = []
    for number, (name, point) in enumerate(points.items()):
        top, middle = _TOP + number * _BAR, _TOP + number * _BAR + 9
        parts += [
            _text(_LABELS - 8, middle + 4, name, anchor="end"),
            f'<rect x="{_LABELS}" y="{top}" width="{point.y * scale:.1f}" height="18" fill="{_COLOURS[0]}"/>',
            _line(_LABELS + point.low * scale, middle, _LABELS + point.high * scale, middle, "#000", 1.5),
            _text(_LABELS + point.high * scale + 6, middle + 4, f"{_number(point.y)} {unit}"),
        ]
    return _document(title, note, _TOP + len(points) * _BAR + 14, parts)


def lines(
    title: str, note: str, x_name: str, y_name: str, series: Mapping[str, Sequence[PlotPoint]], *, log_x: bool = False
) -> str:
    """Return one line for each name, with quartiles at its points."""
    points = [point for line in series.values() for point in line]
    log_x = log_x and all(point.x > 0 for point in points)
    xs = sorted({point.x for point in points})
    most = max((point.high for point in points), default=0.0) or 1.0
    step = _step(most)
    top = math.ceil(most / step) * step
    first, last = (_place(xs[0], log_x), _place(xs[-1], log_x)) if xs else (0.0, 1.0)

    def across(x: float) -> float:
        share = (_place(x, log_x) - first) / (last - first) if last > first else 0.5
        return _LEFT + 14 + share * (_WIDTH - _LEFT - _RIGHT - 28)

    def down(y: float) -> float:
        return _TOP + 24 + _PLOT_HEIGHT * (1 - y / top)

    parts = []
    for number in range(round(top / step) + 1):
        y = down(number * step)
        parts += [_line(_LEFT, y, _WIDTH - _RIGHT, y, "#ddd"), _text(_LEFT - 6, y + 4, _number(number * step), "end")]
    parts += [_text(across(x), down(0) + 18, _number(x), "middle") for x in xs]
    parts += [_text(_WIDTH / 2, down(0) + 38, x_name, "middle"), _text(8, _TOP + 8, y_name)]
    for number, (name, line) in enumerate(series.items()):
        colour, ordered = _COLOURS[number % len(_COLOURS)], sorted(line, key=lambda point: point.x)
        path = " ".join(f"{across(point.x):.1f},{down(point.y):.1f}" for point in ordered)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for point in ordered:
            x = across(point.x)
            parts.append(_line(x, down(point.low), x, down(point.high), colour, 1.5))
            parts.append(f'<circle cx="{x:.1f}" cy="{down(point.y):.1f}" r="3.5" fill="{colour}"/>')
        left, below = _LEFT + (number % 3) * 230, down(0) + 58 + number // 3 * 18
        parts += [_line(left, below - 4, left + 22, below - 4, colour, 3), _text(left + 28, below, name)]
    return _document(title, note, down(0) + 70 + (len(series) - 1) // 3 * 18, parts)


def _document(title: str, note: str, height: float, parts: Sequence[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height:.0f}" width="{_WIDTH}" '
        f'height="{height:.0f}" font-family="sans-serif" font-size="12" fill="#222">'
    )
    background = '<rect width="100%" height="100%" fill="#fff"/>'
    heading = f'<text x="12" y="22" font-size="15" font-weight="bold">{escape(title)}</text>'
    small = f'<text x="12" y="42" font-size="11" fill="#555">{escape(note)}</text>'
    return "\n".join([head, background, heading, small, *parts, "</svg>", ""])


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, width: float = 1) -> str:
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {ends} stroke="{colour}" stroke-width="{width}"/>'


def _place(x: float, log_x: bool) -> float:
    return math.log(x) if log_x else x


def _step(most: float) -> float:
    """1, 2 or 5 times a power of ten, so that four to ten of them reach `most`."""
    power = 10 ** math.floor(math.log10(most / 4))
    return max(step * power for step in (1, 2, 5) if step * power <= most / 4)


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
