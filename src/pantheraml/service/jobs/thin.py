"""Downsample a series for a chart: each bucket keeps its lowest and its highest value."""

from __future__ import annotations

from collections.abc import Sequence

Point = tuple[int, float]


def thinned(points: Sequence[Point], most: int) -> list[Point]:
    """Return at most `most` points in order, among them the first, the last, and the extremes of every bucket."""
    if len(points) <= most:
        return list(points)
    stretches = max(1, (most - 2) // 2)
    inner = range(1, len(points) - 1)
    kept = {0, len(points) - 1}
    for index in range(stretches):
        stretch = inner[index * len(inner) // stretches : (index + 1) * len(inner) // stretches]
        kept.add(min(stretch, key=lambda i: points[i][1]))
        kept.add(max(stretch, key=lambda i: points[i][1]))
    return [points[i] for i in sorted(kept)]
