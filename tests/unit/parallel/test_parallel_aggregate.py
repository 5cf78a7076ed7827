from __future__ import annotations

import pytest
import torch
from torch import nn

from pantheraml.base.errors import ConfigError
from pantheraml.parallel.aggregate import attach, mean, median, trimmed_mean
from pantheraml.specs.aggregation import check_method, parse_method

EQUAL = torch.full((5, 1), 0.2)


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("mean", "mean"),
        ("weighted", "weighted"),
        ("weighted_mean", "weighted"),
        ("median", "median"),
        ("trimmed_mean", "trimmed_mean"),
    ],
)
def test_names(name: str, method: str) -> None:
    assert parse_method(name) == method


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="`mode`") as caught:
        parse_method("mode")
    assert "mean, weighted, median, trimmed_mean, weighted_mean" in str(caught.value)


def test_mean_counts_shares() -> None:
    rows = torch.tensor([[1.0, 2.0], [3.0, 6.0]])
    assert mean(rows, torch.tensor([[0.25], [0.75]])).tolist() == [2.5, 5.0]


def test_median_of_odd_and_even_numbers() -> None:
    rows = torch.tensor([[5.0, -1.0], [1.0, 7.0], [1000.0, 3.0], [2.0, 4.0], [3.0, 5.0]])
    assert median(rows, EQUAL).tolist() == [3.0, 4.0]
    assert median(rows[:4], EQUAL[:4]).tolist() == [3.5, 3.5]
    assert median(rows[:1], EQUAL[:1]).tolist() == [5.0, -1.0]


def test_trimmed_mean_drops_one_end_each_and_more_of_many() -> None:
    rows = torch.tensor([[5.0], [1.0], [1000.0], [2.0], [-99.0]])
    assert trimmed_mean(rows, EQUAL).item() == pytest.approx(8 / 3)
    assert trimmed_mean(rows[:3], EQUAL[:3]).item() == 5.0
    assert trimmed_mean(rows[:2], EQUAL[:2]).item() == 3.0
    many = torch.arange(20.0).unsqueeze(1)
    many[0], many[1], many[18], many[19] = -1e6, -1e5, 1e9, 1e8
    assert trimmed_mean(many, EQUAL).item() == pytest.approx(sum(range(2, 18)) / 16)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_nonfinite_values_propagate(bad: float) -> None:
    rows = torch.tensor([[1.0, 1.0], [2.0, bad], [3.0, 3.0], [4.0, 4.0], [5.0, 5.0]])
    for combine in (median, trimmed_mean, mean):
        found = combine(rows, EQUAL)
        assert found[0].item() == pytest.approx(3.0)
        assert not found[1].isfinite()


def test_methods_are_checked_against_the_ranks() -> None:
    check_method("mean", 1, None)
    check_method("weighted", 2, [0.0, 3.0])
    check_method("trimmed_mean", 3, None)
    with pytest.raises(ConfigError, match="2 rank"):
        check_method("trimmed_mean", 2, None)
    with pytest.raises(ConfigError, match="require each other"):
        check_method("weighted", 2, None)
    with pytest.raises(ConfigError, match="require each other"):
        check_method("median", 2, [1.0, 1.0])


@pytest.mark.parametrize("weights", [[1.0], [1.0, -1.0], [0.0, 0.0], [1.0, float("nan")], [1.0, float("inf")]])
def test_invalid_weights_are_rejected(weights: list[float]) -> None:
    with pytest.raises(ConfigError, match="2 rank"):
        check_method("weighted", 2, weights)


def test_finish_is_a_no_op_without_ddp() -> None:
    finish = attach(nn.Linear(2, 2), "median", leave_out_nonfinite=True)
    assert finish(target_tokens=3, factor=1.0) == ()
