"""Line charts as SVG text, without a plotting library; deterministic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 860, 360
LEFT, RIGHT, TOP, BOTTOM = 52, 200, 44, 40
COLORS = ("#777777", "#c44e52", "#4c72b0", "#55a868", "#8172b3", "#dd8452", "#937860", "#da8bc3", "#17becf")
"""Color-blind friendly, as far as nine colors can be."""


@dataclass(frozen=True)
class Line:
    name: str
    values: Sequence[float | None]
    """One value per step, from step 1; None is a gap."""


@dataclass(frozen=True)
class LineChart:
    title: str
    lines: Sequence[Line]
    y_title: str
    shaded: range = range(0)
    """Highlighted steps (from 1)."""
    first: int = 1
    """First step shown."""

    def svg(self) -> str:
        shown = [value for line in self.lines for value in line.values[self.first - 1 :] if value is not None]
        top = _round_up(max(shown))
        steps = max(len(line.values) for line in self.lines)
        scale = _Scale(self.first, steps, top)
        body = [
            f'<text x="{LEFT}" y="16" font-weight="bold">{escape(self.title)}</text>',
            *self._shade(scale),
            *_axes(scale, self.y_title),
        ]
        for number, line in enumerate(self.lines):
            color = COLORS[number % len(COLORS)]
            body += [
                f'<polyline fill="none" stroke="{color}" stroke-width="1.6" points="{points}"/>'
                for points in _segments(line, scale)
            ]
            y = TOP + 8 + 20 * number
            body.append(f'<rect x="{WIDTH - RIGHT + 14}" y="{y - 5}" width="14" height="4" fill="{color}"/>')
            body.append(f'<text x="{WIDTH - RIGHT + 34}" y="{y + 1}">{escape(line.name)}</text>')
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif"'
            ' font-size="12" fill="#222222">'
        )
        background = f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>'
        return "\n".join([head, background, *body, "</svg>"]) + "\n"

    def _shade(self, scale: _Scale) -> list[str]:
        if not self.shaded:
            return []
        left, right = scale.x(self.shaded.start - 0.5), scale.x(self.shaded.stop - 0.5)
        height = HEIGHT - TOP - BOTTOM
        return [f'<rect x="{left:.1f}" y="{TOP}" width="{right - left:.1f}" height="{height}" fill="#eeeeee"/>']


@dataclass(frozen=True)
class _Scale:
    first: int
    last: int
    top: float

    def x(self, step: float) -> float:
        return LEFT + (step - self.first) / max(1, self.last - self.first) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - value / self.top * (HEIGHT - TOP - BOTTOM)


def _axes(scale: _Scale, y_title: str) -> list[str]:
    right, floor = WIDTH - RIGHT, HEIGHT - BOTTOM
    found = [f'<line x1="{LEFT}" y1="{floor}" x2="{right}" y2="{floor}" stroke="#222222"/>']
    for part in range(6):
        value = scale.top * part / 5
        y = scale.y(value)
        found.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="#dddddd"/>')
        found.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
    for step in range(-(-scale.first // 10) * 10, scale.last + 1, 10):
        found.append(f'<text x="{scale.x(step):.1f}" y="{floor + 16}" text-anchor="middle">{step}</text>')
    found.append(f'<text x="{(LEFT + right) / 2}" y="{HEIGHT - 6}" text-anchor="middle">step</text>')
    return [*found, f'<text x="{LEFT}" y="{TOP - 8}" fill="#555555">{escape(y_title)}</text>']


def _segments(line: Line, scale: _Scale) -> list[str]:
    """Point lists of each segment between gaps."""
    found: list[list[str]] = [[]]
    for step, value in enumerate(line.values, start=1):
        if step < scale.first:
            continue
        if value is None:
            found.append([])
        else:
            found[-1].append(f"{scale.x(step):.1f},{scale.y(value):.1f}")
    return [" ".join(points) for points in found if len(points) > 1]


def _round_up(value: float) -> float:
    """Round up to 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= value)
