"""Torch reference of the AdamW step, in chunks; also used on CPU.

Arithmetic is float32 whatever the storage dtype. bf16 tensors are rounded stochastically, so that the expectation is
exact: an update far below bf16's spacing (2**-8 of the weight) is not lost but applied occasionally. The noise is a
hash of the element index and a key that the caller draws per parameter and step. It is stateless, so ranks agree on it
and a resumed run reproduces it.

8-bit moments are stored in blocks of 256 with one float32 scale each (after Dettmers et al., "8-bit Optimizers via
Block-wise Quantization", 2021). The ranges 1/8 to 1, 1/64 to 1/8, ... of a block's absmax are split into 128, 64, ...
equal cells; a code is a cell index and decodes to the cell's midpoint. So the largest values are accurate to 0.4 %,
values 10^6 times smaller are still distinct from zero, and (unlike with a table of decimal decades) cell and midpoint
take a few bit operations. The second moment is stored as its square root, which needs half the range.
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
"""Elements per chunk, a multiple of BLOCK: bounds the step's temporary memory."""

FIRST_BITS = 7
"""Magnitude bits of a first moment's code; the eighth bit is the sign."""
ROOT_BITS = 8


@dataclass(frozen=True)
class AdamWStep:
    """Hyperparameters of one step, with the semantics of torch.optim.AdamW."""

    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    count: int
    """Step number, starting at 1."""
    gradient_factor: float
    """Gradient clipping: gradients are multiplied by it as they are read."""
    key: int
    """Seed of the rounding noise, 31 bits."""

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
    """Apply one step in place. Parameter and moments: contiguous, each float32 or bf16. Gradient: any float dtype."""
    flat = [tensor.view(-1) for tensor in (parameter, gradient, first, second)]
    for start in range(0, parameter.numel(), CHUNK):
        p, g, m, v = (tensor[start : start + CHUNK] for tensor in flat)
        new_p, new_m, new_v = _step(p, g, m.float(), v.float(), step)
        noises = _noises(start, p.numel(), step.key, p.device)
        for target, values, noise in zip((p, m, v), (new_p, new_m, new_v), noises, strict=True):
            target.copy_(_round_stochastic(values, noise) if target.dtype == torch.bfloat16 else values)


def reference_adamw8bit_(parameter: Tensor, gradient: Tensor, moments: Moments8bit, step: AdamWStep) -> None:
    """Apply one step with 8-bit moments, decoding one chunk at a time."""
    flat, grad = parameter.view(-1), gradient.view(-1)
    for start in range(0, flat.numel(), CHUNK):
        p, g = flat[start : start + CHUNK], grad[start : start + CHUNK]
        rows = slice(start // BLOCK, -(-(start + p.numel()) // BLOCK))
        chunk = Moments8bit(*(tensor[rows] for tensor in moments))
        m = decode(chunk.first, chunk.first_scale, FIRST_BITS).view(-1)[: p.numel()]
        v = decode(chunk.root, chunk.root_scale, ROOT_BITS).view(-1)[: p.numel()].square_()
        new_p, new_m, new_v = _step(p, g, m, v, step)
        if p.dtype == torch.bfloat16:
            new_p = _round_stochastic(new_p, _noises(start, p.numel(), step.key, p.device)[0])
        p.copy_(new_p)
        encode_(new_m, chunk.first, chunk.first_scale, FIRST_BITS)
        encode_(new_v.sqrt_(), chunk.root, chunk.root_scale, ROOT_BITS)


def _step(p: Tensor, g: Tensor, m: Tensor, v: Tensor, step: AdamWStep) -> tuple[Tensor, Tensor, Tensor]:
    """Parameter and moments after the step, in float32."""
    g = g.float() * step.gradient_factor
    m = m * step.beta1 + g * (1 - step.beta1)
    v = v * step.beta2 + g * g * (1 - step.beta2)
    denominator = v.sqrt() * step.root_factor + step.eps
    return p.float() * step.decay - m / denominator * step.step_size, m, v


# Rounding ---------------------------------------------------------------------------------------------------------


def mix(x: Tensor) -> Tensor:
    """32-bit hash (held in int64) with full avalanche: Wellons' lowbias32."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return x ^ (x >> 16)


def _noises(start: int, length: int, key: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Uniform 16-bit integers for parameter, first and second moment of `length` elements from `start`."""
    word = mix(torch.arange(start, start + length, device=device) ^ key)
    return word >> 16, word & 0xFFFF, mix(word) >> 16


def _round_stochastic(values: Tensor, noise: Tensor) -> Tensor:
    """Round float32 to bf16 stochastically: up with the probability of the truncated fraction."""
    bits = values.view(torch.int32) + noise.to(torch.int32)
    return (bits & -0x10000).view(torch.float32).to(torch.bfloat16)


# 8-bit codes ------------------------------------------------------------------------------------------------------


@functools.cache
def _cells(bits: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Lower edges of cells 1, 2, ... and the decoded value of every code (first: 0, last: 1)."""
    edges = [(1 + 7 * cell / 2**level) * 8.0 ** (level - bits) for level in range(bits) for cell in range(2**level)]
    upper = [*edges[1:], 1.0]
    values = [0.0, *((low + high) / 2 for low, high in zip(edges, upper, strict=True))]
    values[-1] = 1.0  # a block's absmax round-trips exactly; otherwise scales would shrink every step
    if bits == FIRST_BITS:
        values += [-value for value in values]
    return torch.tensor(edges, device=device), torch.tensor(values, device=device)


def decode(codes: Tensor, scale: Tensor, bits: int) -> Tensor:
    """Decode codes [blocks, 256] and their scales to float32 [blocks, 256]."""
    _, values = _cells(bits, codes.device)
    return values[codes.int()] * scale.unsqueeze(1)


def encode_(values: Tensor, codes: Tensor, scale: Tensor, bits: int) -> None:
    """Encode flat float32 values into codes [blocks, 256] and scales [blocks], zero-padding the last block."""
    edges, _ = _cells(bits, codes.device)
    blocks = torch.nn.functional.pad(values, (0, codes.numel() - values.numel())).view(codes.shape)
    magnitudes = blocks.abs()
    scale.copy_(magnitudes.amax(dim=1))
    ratios = magnitudes * scale.clamp(min=torch.finfo(torch.float32).tiny).reciprocal().unsqueeze(1)
    cells = torch.bucketize(ratios, edges, right=True)
    if bits == ROOT_BITS:
        # A nonzero root must not become zero: the denominator would be eps alone, and the step unbounded.
        cells = torch.maximum(cells, (ratios > 0).to(cells.dtype))
    else:
        cells = cells + (1 << FIRST_BITS) * (blocks < 0)
    codes.copy_(cells)
