"""Optimizer kernels on a GPU: equal to the reference, and without allocations."""

from __future__ import annotations

import itertools

import pytest
import torch

from pantheraml.engine.optim.graph_adamw import GraphAdamW
from pantheraml.engine.optim.optimizer import (
    build_optimizer,
    clip,
    load_optimizer_tensors,
    optimizer_tensors,
    set_learning_rate,
)
from pantheraml.kernels.adamw import AdamWStep, Moments8bit, adamw8bit_, adamw_, reference_adamw8bit_, reference_adamw_
from pantheraml.parallel.local_shards import local_squared_norm
from pantheraml.specs.train import TrainSettings

DTYPES = (torch.float32, torch.bfloat16)
SIZE = (1 << 20) + 100


def step(count: int) -> AdamWStep:
    return AdamWStep(
        learning_rate=1e-2,
        beta1=0.9,
        beta2=0.999,
        eps=1e-8,
        weight_decay=0.1,
        count=count,
        gradient_factor=0.7,
        key=1234567 * count,
    )


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """float32: the last bits. bf16: at most one ulp, in the few places where those bits decide the rounding (more,
    where two large terms nearly cancel).
    """
    if ours.dtype == torch.float32:
        torch.testing.assert_close(ours, theirs, rtol=3e-6, atol=3e-8)
        return
    assert (ours != theirs).float().mean() < 1e-3
    torch.testing.assert_close(ours.float(), theirs.float(), rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize(("dtype", "moments"), itertools.product(DTYPES, DTYPES))
def test_the_kernel_is_the_reference(dtype: torch.dtype, moments: torch.dtype) -> None:
    torch.manual_seed(0)
    parameter, gradient = torch.randn(SIZE, device="cuda").to(dtype), torch.randn(SIZE, device="cuda").to(dtype)
    first, second = torch.randn(SIZE, device="cuda").to(moments), torch.rand(SIZE, device="cuda").to(moments)
    ours, theirs = ([t.clone() for t in (parameter, first, second)] for _ in range(2))
    adamw_(ours[0], gradient, ours[1], ours[2], step(5))
    reference_adamw_(theirs[0], gradient, theirs[1], theirs[2], step(5))
    for mine, expected in zip(ours, theirs, strict=True):
        close(mine, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_8bit_kernel_is_the_reference(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    parameter = torch.randn(SIZE, device="cuda").to(dtype)
    ours, theirs = parameter.clone(), parameter.clone()
    mine, reference = Moments8bit.zeros(parameter), Moments8bit.zeros(parameter)
    for count in range(1, 4):
        gradient = (torch.randn(SIZE, device="cuda") * 10 ** (-4 * torch.rand(SIZE, device="cuda"))).to(dtype)
        adamw8bit_(ours, gradient, mine, step(count))
        reference_adamw8bit_(theirs, gradient, reference, step(count))
    last_bits = 1e-6 if dtype == torch.float32 else 0.0
    assert ((ours - theirs).abs() > last_bits * theirs.abs()).float().mean() < 1e-2
    torch.testing.assert_close(ours.float(), theirs.float(), rtol=2**-7, atol=1e-3)
    for codes, expected in ((mine.first, reference.first), (mine.root, reference.root)):
        differ = (codes.int() - expected.int()).abs()
        assert (differ > 0).float().mean() < 1e-3
        assert ((differ <= 1) | (differ == 128)).all()  # the next cell; the sign of a first moment that is nearly zero
    torch.testing.assert_close(mine.root_scale, reference.root_scale, rtol=1e-5, atol=0)


@pytest.mark.parametrize("kind", ["adamw", "adamw_bf16", "adamw8bit"])
def test_norm_clip_and_step_allocate_next_to_nothing(kind: str) -> None:
    parameters = [
        (str(n), torch.nn.Parameter(torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16))) for n in range(4)
    ]
    optimizer = build_optimizer(parameters, TrainSettings.model_validate({"optimizer": kind}))
    for _, parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    for _ in range(2):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        clip(optimizer, parameters, local_squared_norm(parameters, parameters, ranks=1).sqrt().item(), 1.0)
        optimizer.step()
    assert torch.cuda.max_memory_allocated() - before < 1 << 20  # one parameter takes 32 MiB


def test_captured_optimizer_step_matches_eager() -> None:
    """Learning rates, factors and gradients differ from those at capture; state is loaded in between."""
    torch.manual_seed(0)
    shapes = [(64, 16), (16, 64), (300,)]
    start = [torch.randn(shape, device="cuda") for shape in shapes]
    settings = TrainSettings(max_steps=10, learning_rate=1e-2)
    pairs = []
    for graph in (False, True):
        named = [(str(index), torch.nn.Parameter(values.clone())) for index, values in enumerate(start)]
        pairs.append((named, build_optimizer(named, settings, graph=graph)))
    for _, parameter in pairs[1][0]:
        parameter.grad = torch.zeros_like(parameter)
    for count in range(6):
        gradients = [torch.randn(shape, device="cuda") * (count + 1) for shape in shapes]
        for named, optimizer in pairs:
            for (_, parameter), gradient in zip(named, gradients, strict=True):
                if parameter.grad is None:
                    parameter.grad = gradient.clone()
                else:
                    parameter.grad.copy_(gradient)
            clip(optimizer, named, norm=float(count + 1), limit=2.0)
            set_learning_rate(optimizer, 1e-2 / (count + 1))
            optimizer.step()
            if isinstance(optimizer, GraphAdamW) and count == 1:
                optimizer.capture()
            if count == 3:
                load_optimizer_tensors(
                    optimizer, named, {name: t / 2 for name, t in optimizer_tensors(optimizer, named).items()}
                )
    for (_, eager), (_, captured) in zip(pairs[0][0], pairs[1][0], strict=True):
        torch.testing.assert_close(captured, eager, rtol=1e-5, atol=1e-6)
    assert isinstance(pairs[1][1], GraphAdamW)
    assert pairs[1][1].is_captured
