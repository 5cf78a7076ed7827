"""AdamW's step on plain torch, chunk by chunk: the definition, and what runs on a CPU.

The arithmetic is float32 whatever the tensors are kept in. What is kept in bf16 is rounded up or down at random, with
the probabilities that make the expectation exact: an update far below bf16's spacing (2**-8 of the weight) is not lost,
it happens now and then. The noise is a hash of the element's index and of a key that the caller draws for each
parameter and step: it has no state, so ranks agree on it and a resumed run repeats it.

8-bit moments come in blocks of 256 with one float32 scale each (after Dettmers et al., "8-bit Optimizers via Block-wise
Quantization", 2021). A code is a cell number: the ranges 1/8 to 1, 1/64 to 1/8, ... of a block's largest value are cut
into 128, 64, ... equal cells, and a code stands for the middle of its cell. So the largest values are kept within
0.4 %, values 10^6 times smaller are still told apart from zero, and (unlike in a table of decimal decades) cell and
middle come from a few operations on a float's bits. Of the second moment the root is stored: it needs half the range.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 256
CHUNK = 1 << 18
"""Elements worked on at a time, a multiple of BLOCK: bounds the step's memory whatever the parameter's size."""

FIRST_BITS = 7
"""Bits of a first moment's magnitude; the eighth is its sign."""
ROOT_BITS = 8


@dataclass(frozen=True)
class AdamWStep:
    """The numbers of one step, as torch.optim.AdamW means them."""

    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    count: int
    """Steps taken, this one included."""
    gradient_factor: float
    """Clipping: gradients are multiplied by it on their way in."""
    key: int
    """Of the rounding noise; 31 bits."""

    @property
    def step_size(self) -> float:
        return self.learning_rate / (1 - self.beta1**self.count)

    @property
    def root_factor(self) -> float:
        return 1 / math.sqrt(1 - self.beta2**self.count)

    @property
    def decay(self) -> float:
        return 1 - self.learning_rate * self.weight_decay


class Moments8bit(NamedTuple):
    """First moment and root of the second, as codes [blocks, 256] (uint8) and scales [blocks] (float32)."""

    first: Tensor
    first_scale: Tensor
    root: Tensor
    root_scale: Tensor

    @classmethod
    def zeros(cls, like: Tensor) -> Moments8bit:
        blocks = -(-like.numel() // BLOCK)
        codes = [torch.zeros(blocks, BLOCK, dtype=torch.uint8, device=like.device) for _ in range(2)]
        scales = [torch.zeros(blocks, dtype=torch.float32, device=like.device) for _ in range(2)]
        return cls(codes[0], scales[0], codes[1], scales[1])


def reference_adamw_(parameter: Tensor, gradient: Tensor, first: Tensor, second: Tensor, step: AdamWStep) -> None:
    """One step in place. Parameter and moments: float32 or bf16 each, contiguous; gradient: any float dtype."""
    flat = [tensor.view(-1) for tensor in (parameter, gradient, first, second)]
    for start in range(0, parameter.numel(), CHUNK):
        p, g, m, v = (tensor[start : start + CHUNK] for tensor in flat)
        new_p, new_m, new_v = _step(p, g, m.float(), v.float(), step)
        noises = _noises(start, p.numel(), step.key, p.device)
        for target, values, noise in zip((p, m, v), (new_p, new_m, new_v), noises, strict=True):
            target.copy_(_stochastically(values, noise) if target.dtype == torch.bfloat16 else values)


def reference_adamw8bit_(parameter: Tensor, gradient: Tensor, moments: Moments8bit, step: AdamWStep) -> None:
    """The same over 8-bit moments, which stay packed but for one chunk."""
    flat, grad = parameter.view(-1), gradient.view(-1)
    for start in range(0, flat.numel(), CHUNK):
        p, g = flat[start : start + CHUNK], grad[start : start + CHUNK]
        rows = slice(start // BLOCK, -(-(start + p.numel()) // BLOCK))
        packed = Moments8bit(*(tensor[rows] for tensor in moments))
        m = decode(packed.first, packed.first_scale, FIRST_BITS).view(-1)[: p.numel()]
        v = decode(packed.root, packed.root_scale, ROOT_BITS).view(-1)[: p.numel()].square_()
        new_p, new_m, new_v = _step(p, g, m, v, step)
        if p.dtype == torch.bfloat16:
            new_p = _stochastically(new_p, _noises(start, p.numel(), step.key, p.device)[0])
        p.copy_(new_p)
        encode_(new_m, packed.first, packed.first_scale, FIRST_BITS)
        encode_(new_v.sqrt_(), packed.root, packed.root_scale, ROOT_BITS)


def _step(p: Tensor, g: Tensor, m: Tensor, v: Tensor, step: AdamWStep) -> tuple[Tensor, Tensor, Tensor]:
    """Parameter and moments after the step, in float32."""
    g = g.float() * step.gradient_factor
    m = m * step.beta1 + g * (1 - step.beta1)
    v = v * step.beta2 + g * g * (1 - step.beta2)
    denominator = v.sqrt() * step.root_factor + step.eps
    return p.float() * step.decay - m / denominator * step.step_size, m, v


# Rounding ---------------------------------------------------------------------------------------------------------


def mix(x: Tensor) -> Tensor:
    """A hash of 32 bits (held in int64) whose every output bit depends on every input bit (Wellons' lowbias32)."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return x ^ (x >> 16)


def _noises(start: int, length: int, key: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Uniform integers below 2**16 for parameter, first and second moment, for the elements from `start` on."""
    word = mix(torch.arange(start, start + length, device=device) ^ key)
    return word >> 16, word & 0xFFFF, mix(word) >> 16


def _stochastically(values: Tensor, noise: Tensor) -> Tensor:
    """float32 -> bf16, up with the probability of the part that bf16 cuts off."""
    bits = values.view(torch.int32) + noise.to(torch.int32)
    return (bits & -0x10000).view(torch.float32).to(torch.bfloat16)


# 8-bit codes ------------------------------------------------------------------------------------------------------


@functools.cache
def _cells(bits: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Lower edges of the cells 1, 2, ... and the value of every code (0 stands for 0, the last for 1)."""
    edges = [(1 + 7 * cell / 2**part) * 8.0 ** (part - bits) for part in range(bits) for cell in range(2**part)]
    upper = [*edges[1:], 1.0]
    values = [0.0, *((low + high) / 2 for low, high in zip(edges, upper, strict=True))]
    values[-1] = 1.0  # a block's largest value survives exactly; else scales would shrink from step to step
    if bits == FIRST_BITS:
        values += [-value for value in values]
    return torch.tensor(edges, device=device), torch.tensor(values, device=device)


def decode(codes: Tensor, scale: Tensor, bits: int) -> Tensor:
    """Codes [blocks, 256] and their scales as float32 [blocks, 256]."""
    _, values = _cells(bits, codes.device)
    return values[codes.int()] * scale.unsqueeze(1)


def encode_(values: Tensor, codes: Tensor, scale: Tensor, bits: int) -> None:
    """Flat float32 values into codes [blocks, 256] and scales [blocks]; what lies beyond the last value becomes 0."""
    edges, _ = _cells(bits, codes.device)
    blocks = torch.nn.functional.pad(values, (0, codes.numel() - values.numel())).view(codes.shape)
    magnitudes = blocks.abs()
    scale.copy_(magnitudes.amax(dim=1))
    shares = magnitudes * scale.clamp(min=torch.finfo(torch.float32).tiny).reciprocal().unsqueeze(1)
    cells = torch.bucketize(shares, edges, right=True)
    if bits == ROOT_BITS:
        # A root that is not zero stays so: as a denominator it would leave eps alone and make a step of any size.
        cells = torch.maximum(cells, (shares > 0).to(cells.dtype))
    else:
        cells = cells + (1 << FIRST_BITS) * (blocks < 0)
    codes.copy_(cells)
