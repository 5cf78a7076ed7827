"""Series for charts: few points, and none of the extremes lost."""

from __future__ import annotations

import random

from pantheraml.service.jobs.thin import thinned


def test_a_short_series_stays_as_it_is() -> None:
    points = [(1, 2.0), (2, 1.0)]
    assert thinned(points, 2) == points
    assert thinned([], 10) == []


def test_extremes_and_ends_stay() -> None:
    rng = random.Random(0)
    points = [(step, rng.random()) for step in range(100_000)]
    points[31_337], points[77_777] = (31_337, -5.0), (77_777, 9.0)
    kept = thinned(points, 2000)
    assert len(kept) <= 2000
    assert kept[0] == points[0]
    assert kept[-1] == points[-1]
    assert {points[31_337], points[77_777]} <= set(kept)
    assert kept == sorted(kept)


def test_every_size_is_bounded() -> None:
    for count in range(3, 60):
        points = [(step, float(step % 7)) for step in range(count)]
        for most in range(4, 20):
            assert len(thinned(points, most)) <= max(most, 4)
