"""Gradient aggregations by name, and which of them a number of ranks allows; `parallel.aggregate` computes them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum
from typing import Literal, cast, get_args

from pantheraml.base.errors import ConfigError

Method = Literal["mean", "weighted", "median", "trimmed_mean"]
ALIASES = {"weighted_mean": "weighted"}


class AggregationMethod(StrEnum):
    """How gradients of the ranks are combined; values of `parallel.aggregation`."""

    MEAN = "mean"
    WEIGHTED = "weighted"
    MEDIAN = "median"
    TRIMMED_MEAN = "trimmed_mean"


def parse_method(name: str) -> Method:
    """Resolve a method name or alias."""
    known = get_args(Method)
    method = ALIASES.get(name, str(name))
    if method not in known:
        raise ConfigError(f"Unknown gradient aggregation `{name}`.", fix=f"Use one of {', '.join([*known, *ALIASES])}.")
    return cast(Method, method)


def check_method(method: Method, ranks: int, weights: Sequence[float] | None) -> None:
    """Raise ConfigError unless `method` works with `ranks` ranks and `weights`."""
    if (weights is not None) != (method == "weighted"):
        raise ConfigError(
            "Per-rank weights and the gradient aggregation `weighted` require each other.",
            fix="Set both, or neither.",
        )
    if weights is not None and (
        len(weights) != ranks or not all(math.isfinite(w) and w >= 0 for w in weights) or not any(weights)
    ):
        raise ConfigError(
            f"{list(weights)} are not valid weights for {ranks} rank(s).",
            fix="Give one finite, non-negative number per rank, at least one of them positive.",
        )
    if method == "trimmed_mean" and ranks < 3:
        raise ConfigError(
            "The gradient aggregation `trimmed_mean` drops the largest and the smallest value, which leaves none of"
            f" {ranks} rank(s).",
            fix="Use three ranks or more, or use `mean`.",
        )
