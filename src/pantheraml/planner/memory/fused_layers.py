"""Tensors that a fused decoder layer keeps for its backward, and that its backward holds at a time.

Follows `models.fast.autograd_functions`, tensor by tensor: a tensor that is saved there is listed here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from pantheraml.planner.memory.blocks import blocks_bytes
from pantheraml.planner.memory.step_sizes import BYTE, FLOAT32, LinearSizes, StepSizes

TILE = 16_384
"""As in `models.fast.tiled_mlp`."""
FUSED_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma3_text", "phi3", "granite")
"""Families with a `Decoder` that models.fast.families fuses."""
HEAD_NORM_FAMILIES = ("qwen3", "gemma3_text")
OUTPUT_NORM_FAMILIES = ("gemma3_text",)
"""Families that normalize what attention and the MLP add to the residual stream."""


@dataclass(frozen=True)
class Transient:
    """Sizes of the tensors alive at a moment of a layer's pass, besides what layers keep and the gradients of its
    parameters."""

    instant: str
    tensors: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return blocks_bytes(self.tensors)


def kept_tensors(sizes: StepSizes) -> Iterator[int]:
    """Bytes of each tensor that a layer keeps between its forward and its backward, without checkpointing."""
    yield from _kept_before_attention(sizes)
    yield from _kept_by_attention(sizes)
    yield from _kept_after_attention(sizes)


def is_tiled(sizes: StepSizes) -> bool:
    """Return whether what follows attention is recomputed in tiles: as `models.fast.tiled_mlp` decides."""
    _, _, first, second = sizes.groups
    return (
        sizes.setting.activation_checkpointing in ("full", "offload")
        and not sizes.trains_weights
        and sizes.tokens >= 2 * TILE
        and first.height + second.width > 4 * sizes.queries
    )


def tiled_kept_tensors(sizes: StepSizes) -> Iterator[int]:
    """Bytes of each tensor that a recomputed layer keeps if what follows attention is tiled."""
    yield from _kept_before_attention(sizes)
    yield from _kept_by_attention(sizes)
    yield sizes.tokens * sizes.hidden * sizes.compute  # the residual stream


def tiled_backward_transients(sizes: StepSizes) -> list[Transient]:
    """Moments of a tile's backward, with the gradients of the whole sequence beside it: of the layer's output, of the
    residual stream, and of attention's output."""
    count = -(-sizes.tokens // TILE)
    tile = replace(sizes, tokens=-(-sizes.tokens // count))
    whole = [sizes.tokens * width * sizes.compute for width in (sizes.hidden, sizes.hidden, sizes.queries)]
    held = (*whole, *_kept_after_attention(tile))
    moments = backward_transients(tile, owns_kept=True)
    return [Transient(f"{moment.instant}, tiled", (*held, *moment.tensors)) for moment in moments]


def _kept_before_attention(sizes: StepSizes) -> Iterator[int]:
    tokens, qkv = sizes.tokens, sizes.group("qkv")
    yield from _kept_by_norm(sizes, qkv)
    yield from _kept_by_adapters(sizes, qkv)
    if sizes.decoder.family in OUTPUT_NORM_FAMILIES:  # of the MLP of the layer before
        yield from (tokens * sizes.hidden * sizes.compute, tokens * FLOAT32)
    if sizes.decoder.family in HEAD_NORM_FAMILIES:
        yield tokens * (sizes.heads + sizes.kv_heads) * FLOAT32
        if sizes.trains_weights:  # the norms' inputs, views of the matmul's output
            yield tokens * qkv.height * sizes.compute


def _kept_by_attention(sizes: StepSizes) -> Iterator[int]:
    """Query, key, value, output and log of the sum of each row."""
    tokens = sizes.tokens
    for width in (sizes.queries, sizes.keys, sizes.keys, sizes.queries):
        yield tokens * width * sizes.compute
    yield tokens * sizes.heads * FLOAT32


def _kept_after_attention(sizes: StepSizes) -> Iterator[int]:
    tokens = sizes.tokens
    _, output, first, second = sizes.groups
    yield from _kept_by_adapters(sizes, output)  # the rows are made again from attention's output
    if sizes.decoder.family in OUTPUT_NORM_FAMILIES:
        yield from (tokens * sizes.hidden * sizes.compute, tokens * FLOAT32)
    yield from _kept_by_norm(sizes, first)
    yield from _kept_by_adapters(sizes, first)
    yield tokens * first.height * sizes.compute  # gate and up
    yield from _kept_by_adapters(sizes, second)


def _kept_by_norm(sizes: StepSizes, group: LinearSizes) -> Iterator[int]:
    """Rows for the group's matmul and what their norm's gradient is computed from."""
    tokens = sizes.tokens
    yield tokens * (group.width + sizes.pad(group)) * sizes.operand
    yield tokens * FLOAT32  # inverse root mean square
    if sizes.fp8_layers:
        yield tokens * FLOAT32
    if sizes.trains_weights or not sizes.fp8_layers:
        yield tokens * sizes.hidden * sizes.compute


def _kept_by_adapters(sizes: StepSizes, group: LinearSizes) -> Iterator[int]:
    if sizes.trains_weights:
        if sizes.fp8_layers:  # the weights' scale, repeated
            yield max(group.height, group.width) * FLOAT32
    elif group.ranks:
        yield sizes.tokens * group.ranks * sizes.compute


def backward_transients(sizes: StepSizes, *, owns_kept: bool) -> list[Transient]:
    """Moments of a layer's backward that may be its peak. `owns_kept`: under activation checkpointing, gradients of
    gate and up may overwrite them."""
    tokens, hidden = sizes.tokens, sizes.hidden * sizes.compute
    _, _, first, second = sizes.groups
    gradient = [tokens * hidden]
    if sizes.fp8_layers or sizes.pad(second):  # as the operand of the last matmul
        gradient.append(tokens * (second.height + sizes.pad(second)) * sizes.operand)
    d_hidden = tokens * sizes.inner * sizes.compute
    in_place = owns_kept and not sizes.fp8_layers and not sizes.pad(first)
    rows = [] if in_place else [tokens * (second.width + sizes.pad(second)) * sizes.operand]
    d_first = [] if in_place else [tokens * (first.height + sizes.pad(first)) * sizes.operand]
    weights_of_second = list(_weight_gradient(sizes, second))
    moments = {
        "backward of the MLP's activation": [*gradient, d_hidden, *rows, *d_first, *weights_of_second],
        "backward of the MLP's output": [*gradient, d_hidden, *_matrix(sizes, second)],
        "backward of the MLP's input": [
            tokens * hidden,
            *d_first,
            tokens * hidden,
            *weights_of_second[-1:],
            *max(list(_matrix(sizes, first)), list(_weight_gradient(sizes, first)), key=sum),
        ],
    }
    return [Transient(name, tuple(tensors)) for name, tensors in moments.items()]


def _matrix(sizes: StepSizes, group: LinearSizes) -> Iterator[int]:
    """The matrix that a backward matmul builds just before it: transposed bytes, dequantized or stacked weights."""
    if sizes.fp8_layers:
        yield group.width * (group.height + sizes.pad(group)) * BYTE
    elif sizes.trains_weights and len(group.heights) > 1:
        yield group.width * group.height * sizes.compute


def _weight_gradient(sizes: StepSizes, group: LinearSizes) -> Iterator[int]:
    """Operands of the matmul of a weight's gradient; the gradient comes last."""
    if not sizes.trains_weights:
        return
    if sizes.fp8_layers:  # both operands transposed
        yield from (group.height * sizes.tokens, group.width * sizes.tokens)
    yield group.height * group.width * sizes.compute
