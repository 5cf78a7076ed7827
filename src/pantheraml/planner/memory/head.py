"""Tensors of the output head and the loss, by `kernels.linear_cross_entropy`: one chunk of logits at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pantheraml.planner.memory.step_sizes import BYTE, DTYPE_BYTES, FLOAT32, HALF, StepSizes

CHUNK_ELEMENTS = 2**26
TILES_CHUNK_FACTOR, TRAINED_CHUNK_FACTOR = 4, 16
TILES, TILE = 128, 128
"""Constants of kernels.linear_cross_entropy.head, which this module must not import; a test compares them."""

FULL_LOGITS_FAMILIES = ("gemma2", "granite")
"""Families that change logits after the head (a soft cap, a scale): their loss takes full logits, in float32."""


def chunk_rows(vocabulary: int, *, trained: bool, fp8_width: int | None = None) -> int:
    """Tokens per chunk, as kernels.linear_cross_entropy.head.chunk_rows."""
    chunk = max(1, CHUNK_ELEMENTS * (TRAINED_CHUNK_FACTOR if trained else 1) // vocabulary)
    if fp8_width is not None:
        full = TILE * (TILES // -(-fp8_width // TILE))
        chunk = max(chunk, min(full, CHUNK_ELEMENTS * TILES_CHUNK_FACTOR // vocabulary))
    return chunk if chunk < TILE else chunk // TILE * TILE


@dataclass(frozen=True)
class HeadUse:
    """Sizes of tensors besides what the decoder layers keep."""

    logits: tuple[int, ...]
    """Logits, their gradient, and what the matmuls need, while the loss is computed."""
    rows: tuple[int, ...]
    """Hidden states, what the final norm keeps, and their gradient."""
    gradient: int
    """Gradient of a trained head, which the loss computes already."""
    backward: tuple[int, ...]
    """While the head's gradients are scaled, after the logits are gone."""
    chunks: int
    """How often the logits are made in a pass."""


def head_use(sizes: StepSizes, *, fp8_head: bool, fused_norm: bool) -> HeadUse:
    tokens, width, compute = sizes.tokens, sizes.hidden, sizes.compute
    trained = sizes.trains_weights
    residual = FLOAT32 if trained and sizes.setting.trained_weights == "fp32" else compute
    rows = [tokens * width * compute, *_kept_by_final_norm(sizes, residual, fused_norm)]
    if sizes.decoder.family in FULL_LOGITS_FAMILIES:
        full = tuple(_full_logits(sizes))
        return HeadUse(full, tuple(rows), 0, full, 1)
    chunk = min(tokens, chunk_rows(sizes.vocabulary, trained=trained, fp8_width=width if fp8_head else None))
    gradient = tokens * width * compute
    head_gradient, accumulated = 0, []
    if trained:
        weight = sizes.vocabulary * width
        single = chunk >= tokens
        head_gradient = weight * (compute if single else FLOAT32)
        accumulated = [] if single else [weight * compute]
    scaled = sizes.vocabulary * width * DTYPE_BYTES[sizes.setting.trained_weights] if trained else 0
    return HeadUse(
        logits=(*_logits(sizes, chunk, fp8_head=fp8_head), *accumulated),
        rows=(*rows, gradient),
        gradient=head_gradient,
        backward=(gradient, scaled),
        chunks=-(-tokens // chunk),
    )


def _logits(sizes: StepSizes, chunk: int, *, fp8_head: bool) -> Iterator[int]:
    yield chunk * sizes.vocabulary * sizes.compute
    if fp8_head:
        yield chunk * sizes.vocabulary * BYTE  # gradient of the logits in e5m2
        yield sizes.vocabulary * sizes.hidden * BYTE  # the head transposed
        yield sizes.vocabulary * FLOAT32
    if sizes.trains_weights and sizes.compute < DTYPE_BYTES[sizes.setting.trained_weights]:
        yield sizes.vocabulary * sizes.hidden * sizes.compute  # the head in the compute dtype
    if sizes.setting.dims.tensor > 1:  # the softmax over ranks: in float32, the gradient, and masked
        yield from [chunk * sizes.vocabulary * FLOAT32] * 3


def _full_logits(sizes: StepSizes) -> Iterator[int]:
    """Logits, in float32, their log-softmax, and its gradient."""
    values = sizes.tokens * sizes.vocabulary
    yield from (values * sizes.compute, values * FLOAT32, values * FLOAT32, values * FLOAT32)


def _kept_by_final_norm(sizes: StepSizes, residual: int, fused: bool) -> Iterator[int]:
    tokens, width = sizes.tokens, sizes.hidden
    if fused:
        yield from (tokens * width * HALF, tokens * FLOAT32)
        return
    # transformers' norm: its input in float32, and the normalized rows if the weight is trained
    yield from (tokens * width * FLOAT32, tokens * FLOAT32)
    if sizes.trains_weights:
        yield tokens * width * residual
