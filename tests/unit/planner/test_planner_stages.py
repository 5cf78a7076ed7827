"""Which layers a pipeline stage gets, and the share of a step that its process waits."""

from __future__ import annotations

import pytest

from pantheraml.base.errors import ConfigError
from pantheraml.planner.stages import assign_layers, bubble_fraction


def counts(layers: int, stages: int, *, first: float = 0.0, last: float = 0.0) -> list[int]:
    return [len(share) for share in assign_layers(layers, stages, first=first, last=last)]


def test_all_layers_are_assigned_in_order() -> None:
    shares = assign_layers(13, 4, first=1.0, last=2.4)
    assert [layer for share in shares for layer in share] == list(range(13))


@pytest.mark.parametrize(
    ("layers", "stages", "first", "last", "expected"),
    [
        (4, 2, 0.0, 0.0, [2, 2]),
        (5, 2, 0.0, 0.0, [2, 3]),
        (32, 4, 1.0, 2.4, [8, 9, 9, 6]),
        (16, 2, 1.0, 4.3, [10, 6]),
        (4, 2, 1.0, 9.0, [3, 1]),
        (3, 3, 1.0, 9.0, [1, 1, 1]),
    ],
)
def test_stage_loads_are_balanced(layers: int, stages: int, first: float, last: float, expected: list[int]) -> None:
    assert counts(layers, stages, first=first, last=last) == expected


def test_no_other_assignment_has_a_smaller_fullest_stage() -> None:
    def fullest(shares: tuple[int, ...]) -> float:
        loads = list(map(float, shares))
        loads[0] += 1.0
        loads[-1] += 2.4
        return max(loads)

    for layers in range(3, 14):
        possible = [(a, b, layers - a - b) for a in range(1, layers) for b in range(1, layers - a)]
        chosen = tuple(counts(layers, 3, first=1.0, last=2.4))
        assert fullest((chosen[0], chosen[1], chosen[2])) == min(map(fullest, possible))


def test_more_stages_than_layers_are_rejected() -> None:
    with pytest.raises(ConfigError, match="3 layers, too few for 4"):
        assign_layers(3, 4, first=1.0, last=1.0)


def test_bubble_fraction() -> None:
    assert bubble_fraction(1, 4) == 0
    assert bubble_fraction(4, 4) == pytest.approx(3 / 7)
    assert bubble_fraction(4, 16) == pytest.approx(3 / 19)
    assert bubble_fraction(4, 16, stages_per_process=2) == pytest.approx(3 / 35)
