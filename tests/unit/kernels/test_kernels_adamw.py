from __future__ import annotations

import pytest
import torch

from pantheraml.kernels.adamw import Moments8bit, reference_adamw8bit_, reference_adamw_
from pantheraml.kernels.adamw.reference import CHUNK, FIRST_BITS, ROOT_BITS, decode, encode_, mix
from tests.unit.kernels.adamw_inputs import gradients, step, weights


def test_float32_matches_torch_adamw() -> None:
    ours, theirs = weights(1000, torch.float32), weights(1000, torch.float32).requires_grad_()
    first, second = torch.zeros_like(ours), torch.zeros_like(ours)
    optimizer = torch.optim.AdamW([theirs], lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)
    for count, gradient in enumerate(gradients(20, 1000, torch.float32), start=1):
        reference_adamw_(ours, gradient, first, second, step(count))
        theirs.grad = gradient * 0.7
        optimizer.step()
    torch.testing.assert_close(ours, theirs.detach(), rtol=2e-6, atol=2e-6)


def test_result_does_not_depend_on_chunk_size(monkeypatch: pytest.MonkeyPatch) -> None:
    size = 5 * 256 + 100
    results = []
    for chunk in (CHUNK, 512):
        monkeypatch.setattr("pantheraml.kernels.adamw.reference.CHUNK", chunk)
        plain, quantized = weights(size, torch.bfloat16), weights(size, torch.bfloat16)
        moments, states = Moments8bit.zeros(quantized), [torch.zeros(size, dtype=torch.bfloat16) for _ in range(2)]
        for count, gradient in enumerate(gradients(3, size, torch.bfloat16), start=1):
            reference_adamw_(plain, gradient, states[0], states[1], step(count))
            reference_adamw8bit_(quantized, gradient, moments, step(count))
        results.append([plain, quantized, *states, *moments])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_bf16_updates_below_spacing_are_exact_on_average() -> None:
    """Weights of 1 have a spacing of 2**-7, so rounding to nearest would lose every step of 2**-12."""
    size, steps, rate = 4096, 64, 2.0**-12
    parameter = torch.ones(size, dtype=torch.bfloat16)
    first, second = torch.zeros(size), torch.zeros(size)
    for count in range(1, steps + 1):
        numbers = step(count, learning_rate=rate, weight_decay=0.0, gradient_factor=1.0, key=7919 * count)
        reference_adamw_(parameter, torch.ones(size, dtype=torch.bfloat16), first, second, numbers)
    moved = 1 - parameter.double()
    expected = steps * rate  # Adam's step on a constant gradient is the learning rate
    # One step's noise has a standard deviation of at most half the spacing below 1 (2**-8): 2e-5 over 64 * 4,096 draws.
    assert abs(moved.mean().item() - expected) < 1e-4
    assert moved.std() > 2.0**-9, "all weights moved by the same amount: rounding is not random"


def test_noise_is_uniform_and_uncorrelated() -> None:
    words = mix(torch.arange(1 << 16) ^ 0x12345678)
    for shift in (0, 16):
        counts = torch.bincount((words >> shift & 0xFFFF) >> 8, minlength=256).double()
        chi_squared = ((counts - 256).square() / 256).sum().item()
        assert 150 < chi_squared < 380  # 255 degrees of freedom: 255 +- 5.5 standard deviations
    values = words.double() - words.double().mean()
    assert abs((values[1:] * values[:-1]).mean() / values.square().mean()) < 0.02


def test_codes_are_accurate_over_six_decades() -> None:
    values = torch.cat([torch.ones(1), torch.logspace(-9, 0, 255)])
    for bits, lowest in ((FIRST_BITS, 8.0**-7), (ROOT_BITS, 8.0**-8)):
        codes, scale = torch.zeros(1, 256, dtype=torch.uint8), torch.zeros(1)
        encode_(values, codes, scale, bits)
        decoded = decode(codes, scale, bits).view(-1)
        error = (decoded - values).abs() / values
        assert decoded.max() == 1
        for level in range(bits):
            inside = (values >= 8.0 ** (level - bits)) & (values < 8.0 ** (level - bits + 1))
            assert error[inside].max() <= 3.5 / 2**level  # half a cell, relative to the range's smallest value
        below = decoded[values < lowest * 0.99]
        assert (below == 0).all() if bits == FIRST_BITS else (below > 0).all()
        codes_again, scale_again = torch.zeros_like(codes), torch.zeros(1)
        encode_(decoded, codes_again, scale_again, bits)
        assert torch.equal(codes_again, codes)
        assert torch.equal(scale_again, scale)


def test_first_moments_keep_their_sign() -> None:
    values = torch.linspace(-2, 2, 256)
    codes, scale = torch.zeros(1, 256, dtype=torch.uint8), torch.zeros(1)
    encode_(values, codes, scale, FIRST_BITS)
    torch.testing.assert_close(decode(codes, scale, FIRST_BITS).view(-1), values, rtol=0.06, atol=0)
