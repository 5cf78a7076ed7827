"""Tensors that a decoder layer of transformers saves for its backward, and that its backward holds.

Adapters are PEFT's. Under autocast every linear layer, and every adapter, casts its input for itself.
"""

from __future__ import annotations

from collections.abc import Iterator

from pantheraml.planner.memory.step_sizes import BYTE, DTYPE_BYTES, FLOAT32, LinearSizes, StepSizes

PLAIN_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma3_text", "phi3", "granite")
"""gemma2 caps attention scores, which takes attention without fused kernels; gpt2's activation keeps its every term."""
COMPILED_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma3_text")
HEAD_NORM_FAMILIES = ("qwen3", "gemma3_text")
_FLOAT32_NORMS = ("gemma", "gemma3_text")
"""Families whose norms compute in float32 throughout."""


def residual_bytes(sizes: StepSizes) -> int:
    """Bytes of a value of the residual stream: in the weights' dtype, whatever autocast does inside layers."""
    return DTYPE_BYTES[sizes.setting.trained_weights] if sizes.trains_weights else sizes.compute


def kept_tensors(sizes: StepSizes) -> Iterator[int]:
    """Bytes of each tensor that a layer keeps between its forward and its backward, without checkpointing."""
    tokens, compute = sizes.tokens, sizes.compute
    norms = 4 if sizes.decoder.family == "gemma3_text" else 2
    for _ in range(norms):
        yield from _kept_by_norm(sizes, sizes.hidden, 1)
    if sizes.decoder.family in HEAD_NORM_FAMILIES:
        yield from _kept_by_norm(sizes, sizes.queries, sizes.heads)
        yield from _kept_by_norm(sizes, sizes.keys, sizes.kv_heads)
    values = sizes.queries + 2 * sizes.keys if sizes.decoder.family == "phi3" else sizes.keys  # a view of all three
    for width in (sizes.queries, sizes.keys, values):
        yield tokens * width * compute
    yield tokens * sizes.queries * compute
    yield tokens * sizes.heads * FLOAT32
    for _ in range(3):  # gate, its activation, up
        yield tokens * sizes.inner * compute
    yield from _kept_by_linears(sizes)


def _kept_by_norm(sizes: StepSizes, width: int, heads: int) -> Iterator[int]:
    """The input in float32, the inverse root mean square and, for the weight's gradient, the normalized rows."""
    yield sizes.tokens * width * FLOAT32
    yield sizes.tokens * heads * FLOAT32
    wide = sizes.decoder.family in _FLOAT32_NORMS
    if wide:
        yield width // heads * FLOAT32  # 1 + weight
    if sizes.trains_weights:
        yield sizes.tokens * width * (FLOAT32 if wide else residual_bytes(sizes))


def _kept_by_linears(sizes: StepSizes) -> Iterator[int]:
    """Inputs of the layers whose weights or adapters get a gradient; attention's output is kept already."""
    _, output, *_ = groups = sizes.groups
    for group in groups:
        rows = sizes.tokens * group.width * sizes.compute
        copies = _input_copies(sizes, group)
        if group is output and not _casts(sizes):
            copies -= 1
        for _ in range(copies):
            yield rows
    if sizes.trains_weights and residual_bytes(sizes) != sizes.compute:  # weights, as autocast casts them
        yield from (group.width * group.height * sizes.compute for group in groups)
    if sizes.setting.method != "full":
        for group in groups:
            yield from _kept_by_adapters(sizes, group)


def _casts(sizes: StepSizes) -> bool:
    """Whether each layer has its own copy of an input: adapters are in float32, and so may be the residual stream."""
    if sizes.trains_weights:
        return False  # attention's output is in the compute dtype
    return sizes.compute != FLOAT32 or sizes.setting.lora_dropout > 0


def _input_copies(sizes: StepSizes, group: LinearSizes) -> int:
    if sizes.trains_weights:
        norms_cast = residual_bytes(sizes) != sizes.compute and group.width == sizes.hidden and len(group.heights) > 1
        return len(group.heights) if norms_cast else 1
    return sum(group.adapted) if _casts(sizes) else min(1, sum(group.adapted))


def _kept_by_adapters(sizes: StepSizes, group: LinearSizes) -> Iterator[int]:
    tokens, rank, compute = sizes.tokens, group.rank, sizes.compute
    adapted = [height for height, has in zip(group.heights, group.adapted, strict=True) if has]
    for height in adapted:
        yield tokens * rank * compute
        if compute != FLOAT32:  # A and B, as autocast casts them
            yield from (rank * group.width * compute, height * rank * compute)
        if sizes.setting.lora_dropout > 0:
            mask = BYTE if sizes.setting.device == "cuda" else FLOAT32
            yield tokens * group.width * mask
        if sizes.setting.method == "dora":
            # the outputs of the layer and of its adapter; B A, which PEFT computes of an identity matrix
            yield from (tokens * height * compute, tokens * height * compute)
            yield from (group.width**2 * compute, group.width * rank * compute)
            yield from [height * FLOAT32] * 3  # magnitudes and norms


def backward_tensors(sizes: StepSizes) -> list[int]:
    """Tensors alive in the backward of the MLP's activation, besides what the layer keeps: gradients of the residual
    stream, of the activation's two factors, and of the product, whose own rows are freed by then."""
    tokens = sizes.tokens
    rows = tokens * sizes.inner * sizes.compute
    weight = [sizes.hidden * sizes.inner * residual_bytes(sizes)] if sizes.trains_weights else []
    return [tokens * sizes.hidden * residual_bytes(sizes), rows, rows, *weight]


def why_not_compiled(sizes: StepSizes) -> str | None:
    """Return why the tensors kept by a compiled layer are unknown; None: see `compiled_tensors`."""
    if sizes.decoder.family not in COMPILED_FAMILIES:
        return f"what compiled layers of {sizes.decoder.family} keep is not known"
    if sizes.setting.frozen_weights is not None or sizes.setting.method == "dora" or sizes.setting.lora_dropout > 0:
        return "what compiled layers keep is not known with quantized weights, DoRA or dropout"
    return None


def compiled_tensors(sizes: StepSizes) -> Iterator[int]:
    """Like `kept_tensors`, of a layer that torch.compile compiled: it keeps inputs and outputs of matmuls, and computes
    norms and casts again, but not those of weights."""
    tokens, compute, family = sizes.tokens, sizes.compute, sizes.decoder.family
    yield tokens * sizes.hidden * residual_bytes(sizes)
    for _ in range(3):  # both norms' output, and what attention adds to the residual stream
        yield tokens * sizes.hidden * compute
    yield from (tokens * FLOAT32, tokens * FLOAT32)
    if family == "gemma3_text":  # what the MLP adds, and two more norms
        yield from (tokens * sizes.hidden * compute, tokens * FLOAT32, tokens * FLOAT32)
    if family in HEAD_NORM_FAMILIES:
        for width, heads in ((sizes.queries, sizes.heads), (sizes.keys, sizes.kv_heads)):
            yield from (tokens * width * compute, tokens * heads * FLOAT32)
    for width in (sizes.queries, sizes.keys, sizes.keys, sizes.queries):
        yield tokens * width * compute
    yield tokens * sizes.heads * FLOAT32
    for _ in range(3):  # gate, up and their product
        yield tokens * sizes.inner * compute
    if sizes.trains_weights:
        if residual_bytes(sizes) != compute:
            yield from (group.width * group.height * compute for group in sizes.groups)
        return
    yield tokens * sizes.queries * compute  # attention's output, for the adapter
    for group in sizes.groups:
        yield from _kept_by_adapters(sizes, group)
