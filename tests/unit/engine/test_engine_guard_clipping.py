"""Every kind of clipping follows its definition and resumes exactly."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pantheraml.base.errors import CheckpointError
from pantheraml.engine.guard.clipping import SMALLEST_WEIGHTS, Clipping, build_clipping
from pantheraml.engine.guard.norms import ShardedParams
from pantheraml.engine.optim.adamw import LeanAdamW
from pantheraml.specs.train import StabilityConfig

KINDS = ["none", "value", "norm", "global_norm", "adaptive", "percentile", "zclip", "adagc"]
WARMUP = 4


def parameters() -> list[tuple[str, nn.Parameter]]:
    torch.manual_seed(0)
    shapes = {"a": (4, 6), "b": (6,), "unused": (3,), "zero": (2, 2)}
    made = {name: nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()}
    nn.init.zeros_(made["zero"])
    return list(made.items())


def set_gradients(named: list[tuple[str, nn.Parameter]], *, norm: float, seed: int = 1) -> None:
    torch.manual_seed(seed)
    for name, parameter in named:
        parameter.grad = None if name == "unused" else torch.randn(parameter.shape)
    scale = norm / global_norm(named)
    for _, parameter in named:
        if parameter.grad is not None:
            parameter.grad *= scale


def gradients(named: list[tuple[str, nn.Parameter]]) -> dict[str, Tensor]:
    return {name: parameter.grad.clone() for name, parameter in named if parameter.grad is not None}


def global_norm(named: list[tuple[str, nn.Parameter]]) -> float:
    return math.sqrt(sum(float(p.grad.double().square().sum()) for _, p in named if p.grad is not None))


def clipping(named: list[tuple[str, nn.Parameter]], kind: str, limit: float = 1.0, **changes: Any) -> Clipping:
    config = StabilityConfig.model_validate({"clipping": kind, "clip_warmup_steps": WARMUP, **changes})
    return build_clipping(config, limit, ShardedParams(named, named))


def optimizer(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for _, parameter in named], lr=0.1)


def norms_after(clip: Clipping, named: list[tuple[str, nn.Parameter]], norms: list[float]) -> list[float]:
    """Global norm after clipping in each step, for gradients with the given `norms`."""
    seen = []
    for number, norm in enumerate(norms):
        set_gradients(named, norm=norm, seed=number)
        clip.clip(optimizer(named), global_norm(named))
        seen.append(global_norm(named))
    return seen


def test_none_does_not_clip() -> None:
    named = parameters()
    set_gradients(named, norm=50.0)
    before = gradients(named)
    clipping(named, "none").clip(optimizer(named), 50.0)
    assert all(torch.equal(gradients(named)[name], value) for name, value in before.items())


def test_value_clips_each_value() -> None:
    named = parameters()
    set_gradients(named, norm=50.0)
    before = gradients(named)
    clipping(named, "value", clip_value=0.3).clip(optimizer(named), 50.0)
    for name, value in before.items():
        torch.testing.assert_close(gradients(named)[name], value.clamp(-0.3, 0.3), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("kind", "changes", "limit"),
    [
        ("norm", {}, lambda weight: 1.0),
        (
            "adaptive",
            {"clip_weight_ratio": 0.05},
            lambda weight: 0.05 * max(SMALLEST_WEIGHTS, float(weight.detach().norm())),
        ),
    ],
)
def test_tensors_are_clipped_one_by_one(kind: str, changes: Any, limit: Callable[[Tensor], float]) -> None:
    named = parameters()
    set_gradients(named, norm=3.0)
    named[1][1].grad *= 1e-4  # type: ignore[operator]
    before = gradients(named)
    clipping(named, kind, **changes).clip(optimizer(named), global_norm(named))
    assert float(gradients(named)["a"].norm()) < 0.999 * float(before["a"].norm())
    assert torch.equal(gradients(named)["b"], before["b"]), "a small gradient is unchanged"
    for name, parameter in named:
        if parameter.grad is not None:
            wanted = before[name] * min(1.0, limit(parameter) / float(before[name].norm()))
            torch.testing.assert_close(parameter.grad, wanted, rtol=1e-5, atol=0)


def test_percentile_uses_unclipped_norms() -> None:
    named = parameters()
    norms = [5.0, 2.0, 3.0, 4.0, 10.0, 1.0, 20.0]
    clip = clipping(named, "percentile", limit=2.5, clip_percentile=50, clip_history=5)
    seen = norms_after(clip, named, norms)
    limits = [2.5] * WARMUP + [float(np.median(norms[max(0, n - 5) : n])) for n in range(WARMUP, len(norms))]
    assert seen == pytest.approx([min(norm, limit) for norm, limit in zip(norms, limits, strict=True)], rel=1e-5)


def test_zclip_clips_only_outliers() -> None:
    named = parameters()
    first = [1.0, 1.2, 0.8, 1.0]
    clip = clipping(named, "zclip", limit=0.0, clip_zscore=2.0, clip_decay=0.9)
    assert norms_after(clip, named, first) == pytest.approx(first, rel=1e-5)
    mean, deviation = float(np.mean(first)), float(np.std(first))
    score = (5.0 - mean) / deviation
    target = mean + 4.0 / score * deviation
    assert norms_after(clip, named, [5.0]) == pytest.approx([target], rel=1e-5)
    assert mean < target < mean + 2 * deviation
    assert norms_after(clip, named, [1.1]) == pytest.approx([1.1], rel=1e-5), "not an outlier"


def test_adagc_clips_each_tensor_by_its_own_mean() -> None:
    named = parameters()
    clip = clipping(named, "adagc", limit=0.0, clip_growth=1.5, clip_decay=0.9)
    means: dict[str, list[float]] = {"a": [], "b": [], "zero": []}
    for number in range(WARMUP):
        set_gradients(named, norm=1.0 + number, seed=number)
        for name, value in gradients(named).items():
            means[name].append(float(value.norm()))
        clip.clip(optimizer(named), global_norm(named))
    set_gradients(named, norm=100.0, seed=9)
    named[1][1].grad *= 1e-4  # type: ignore[operator]
    before = gradients(named)
    clip.clip(optimizer(named), global_norm(named))
    after = gradients(named)
    for name in ("a", "zero"):
        assert float(after[name].norm()) == pytest.approx(1.5 * np.mean(means[name]), rel=1e-5)
    assert torch.equal(after["b"], before["b"])
    # the mean uses the clipped norm
    set_gradients(named, norm=100.0, seed=10)
    clip.clip(optimizer(named), global_norm(named))
    grown = 0.9 * np.mean(means["a"]) + 0.1 * 1.5 * np.mean(means["a"])
    assert float(gradients(named)["a"].norm()) == pytest.approx(1.5 * grown, rel=1e-5)


def test_adagc_allows_a_tensor_without_initial_gradient() -> None:
    """Half of an adapter has no gradient in the first step; a limit of zero would freeze it."""
    named = parameters()
    clip = clipping(named, "adagc", limit=0.0)
    for number in range(WARMUP):
        set_gradients(named, norm=1.0, seed=number)
        named[3][1].grad.zero_()  # type: ignore[union-attr]
        clip.clip(optimizer(named), global_norm(named))
    set_gradients(named, norm=1.0, seed=9)
    before = gradients(named)["zero"]
    clip.clip(optimizer(named), global_norm(named))
    assert torch.equal(gradients(named)["zero"], before)


@pytest.mark.parametrize("kind", KINDS)
def test_resumed_clipping_continues_exactly(kind: str) -> None:
    named = parameters()
    norms = [1.0, 1.3, 0.7, 1.1, 9.0, 0.8, 12.0, 1.0, 3.0]
    straight = norms_after(clipping(named, kind), named, norms)
    stopped = clipping(named, kind)
    norms_after(stopped, named, norms[:5])
    resumed = clipping(named, kind)
    resumed.from_state(json.loads(json.dumps(stopped.to_state())))
    found = []
    for number, norm in enumerate(norms[5:], 5):
        set_gradients(named, norm=norm, seed=number)
        resumed.clip(optimizer(named), global_norm(named))
        found.append(global_norm(named))
    assert found == straight[5:]


def test_adagc_rejects_the_state_of_another_model() -> None:
    named = parameters()
    state = clipping(named[:2], "adagc").to_state()
    with pytest.raises(CheckpointError, match="`unused`"):
        clipping(named, "adagc").from_state(state)


@pytest.mark.parametrize("kind", KINDS)
def test_lean_adamw_clips_like_torch_adamw(kind: str) -> None:
    """LeanAdamW applies the global limit as a factor, which must be reset in every step."""
    sides = []
    for ours in (False, True):
        named = parameters()
        group = [parameter for _, parameter in named]
        settings = {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-8}
        made: torch.optim.Optimizer = (
            LeanAdamW(group, **settings, moments="fp32", seed=0)  # type: ignore[arg-type]
            if ours
            else torch.optim.AdamW(group, **settings, weight_decay=0.0)  # type: ignore[arg-type]
        )
        clip = clipping(named, kind)
        for number, norm in enumerate([1.0, 20.0, 0.5, 1.0, 1.0, 30.0]):
            set_gradients(named, norm=norm, seed=number)
            clip.clip(made, global_norm(named))
            made.step()
        sides.append(named)
    for (_, a), (_, b) in zip(*sides, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_gradients_are_clipped_in_their_own_dtype(kind: str) -> None:
    named = [(name, nn.Parameter(parameter.detach().bfloat16())) for name, parameter in parameters()]
    clip = clipping(named, kind)
    for number in range(WARMUP + 2):
        for name, parameter in named:
            torch.manual_seed(number)
            parameter.grad = None if name == "unused" else 10**number * torch.randn_like(parameter)
        clip.clip(optimizer(named), global_norm(named))
        assert all(p.grad is None or (p.grad.dtype == torch.bfloat16 and p.grad.isfinite().all()) for _, p in named)
