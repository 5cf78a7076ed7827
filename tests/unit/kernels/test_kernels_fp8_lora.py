from __future__ import annotations

import pytest
import torch

from pantheraml.kernels.fp8_lora import (
    LORA_COLUMNS,
    FP8Weights,
    fp8_lora_linear,
    quantise_rows,
    quantise_weight,
    reference_lora_linear,
    write_lora_columns,
)

SCALING = 2.0


class Case:
    """A layer whose adapter matters as much as its weight, so that an error in either shows."""

    def __init__(self, rank: int = 8, up_size: float = 0.05) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(3, 40, 256, generator=generator).requires_grad_()
        self.weight = torch.randn(192, 256, generator=generator) * 0.05
        self.down = (torch.randn(rank, 256, generator=generator) * 0.1).requires_grad_()
        self.up = (torch.randn(192, rank, generator=generator) * up_size).requires_grad_()
        self.g = torch.randn(3, 40, 192, generator=generator)
        there, back = quantise_weight(self.weight), quantise_weight(self.weight.T)
        self.weights = FP8Weights(*there, torch.ones(()), *back, torch.ones(()))
        self.write()

    def write(self) -> None:
        w = self.weights
        write_lora_columns(w.forward, w.scale, self.up * SCALING, w.lora_scale)
        write_lora_columns(w.backward, w.scale_t, self.down.T, w.lora_scale_t)

    def ours(self) -> torch.Tensor:
        return fp8_lora_linear(self.x, self.down, self.up, SCALING, self.weights)

    def reference(self) -> torch.Tensor:
        return reference_lora_linear(self.x, self.weight, self.down, self.up, SCALING)

    def gradients(self, out: torch.Tensor) -> list[torch.Tensor]:
        return list(torch.autograd.grad(out, (self.x, self.down, self.up), self.g))


def relative_error(ours: torch.Tensor, exact: torch.Tensor) -> float:
    return float((ours - exact).detach().norm() / exact.detach().norm())


def test_rows_are_quantised_to_three_bits_of_mantissa() -> None:
    values = torch.randn(5, 300) * torch.tensor([1e-4, 1.0, 1e4, 0.0, 3.0])[:, None]
    payload, scale = quantise_rows(values)
    back = payload.float() * scale
    assert payload.dtype == torch.float8_e4m3fn
    assert bool(back.isfinite().all())
    big = values.abs() > 0.02 * values.abs().amax(dim=1, keepdim=True)
    assert ((back - values).abs()[big] / values.abs()[big]).max() <= 2**-4 + 1e-6


@pytest.mark.parametrize("rank", [1, 8, LORA_COLUMNS])
def test_output_and_gradients_follow_the_reference(rank: int) -> None:
    case = Case(rank)
    assert relative_error(case.ours(), case.reference()) < 0.05
    for ours, exact in zip(case.gradients(case.ours()), case.gradients(case.reference()), strict=True):
        assert relative_error(ours, exact) < 0.06
        assert torch.cosine_similarity(ours.flatten(), exact.flatten(), dim=0) > 0.998


def test_the_adapter_is_in_the_product() -> None:
    case = Case()
    with_adapter = case.ours()
    base = case.x @ case.weight.T
    assert relative_error(with_adapter, base) > 0.2, "this case is meant to have a strong adapter"
    with torch.no_grad():
        case.up.mul_(-1)
    assert relative_error(case.ours(), case.reference()) > 0.2, "columns that were not written again must show"
    case.write()
    assert relative_error(case.ours(), case.reference()) < 0.05


def test_without_an_adapter_its_columns_do_not_count() -> None:
    case = Case(up_size=10.0)
    out = fp8_lora_linear(case.x, None, None, 1.0, case.weights)
    assert relative_error(out, case.x @ case.weight.T) < 0.05
    (dx,) = torch.autograd.grad(out, case.x, case.g)
    assert relative_error(dx, case.g @ case.weight) < 0.05


@pytest.mark.parametrize("up_size", [1e-8, 1e-3, 1.0, 1e6])
def test_adapters_of_any_size_are_right(up_size: float) -> None:
    """Far smaller than the weight, far larger: nothing is clamped, nothing that matters vanishes."""
    case = Case(up_size=up_size)
    assert relative_error(case.ours(), case.reference()) < 0.06
    for ours, exact in zip(case.gradients(case.ours()), case.gradients(case.reference()), strict=True):
        assert torch.cosine_similarity(ours.flatten(), exact.flatten(), dim=0) > 0.995
