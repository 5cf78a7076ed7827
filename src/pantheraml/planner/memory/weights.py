"""The tensors of a rank that live as long as the run: weights, adapters, their gradients and optimizer states.

Exact, tensor by tensor, for every kind of parallelism; tests count them on real ranks. Follows `models.quantize`,
`parallel.tensor`, `parallel.fsdp` and `parallel.pipeline`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from pantheraml.planner.memory.fused_layers import FUSED_FAMILIES
from pantheraml.planner.memory.step_sizes import BYTE, DTYPE_BYTES, FLOAT32, step_sizes
from pantheraml.planner.model_shapes import NF4_BLOCK, NF4_SCALE_BLOCK, Decoder, ModelShapes, Weight, is_target
from pantheraml.planner.setting import Setting
from pantheraml.planner.stages import EMBEDDING_COST, assign_layers

Part = Literal["weights", "adapters"]

_BY_INPUTS = ("o_proj", "down_proj")
"""Layers that tensor parallelism splits by inputs; other linear layers are split by outputs."""
SMALLEST_8BIT, BLOCK_8BIT = 4096, 256
"""engine.optim.adamw: smaller parameters have float32 moments; values that share a scale."""
TENSOR_CORE = 16
"""models.quantize.fp8: heads of other sizes stay as they are."""


@dataclass(frozen=True)
class RankPlace:
    """Which rank: its index in each dimension that splits weights."""

    pipeline: int = 0
    shard: int = 0
    tensor: int = 0


FIRST_RANK = RankPlace()
"""No rank of its stage holds more."""


@dataclass(frozen=True)
class Held:
    """Tensors of one shape that a rank holds."""

    part: Part
    shape: tuple[int, ...]
    itemsize: int
    trained: bool = False
    times: int = 1
    outside: bool = False
    """Outside of decoder layers."""

    @property
    def size(self) -> int:
        """Values of each."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.size * self.itemsize


@dataclass(frozen=True)
class StageLayers:
    """The part of the model on a pipeline rank."""

    layers: int
    embedding: bool
    head: bool
    """The final norm and the head."""


def shard_degree(setting: Setting) -> int:
    """Ranks that share weights under FSDP: context parallel ranks shard them, too."""
    return setting.dims.shard * setting.dims.context if setting.dims.shard > 1 else 1


def runs_fused(shapes: ModelShapes, setting: Setting) -> bool:
    """Whether decoder layers run fused, in a family that can be."""
    unsharded = setting.dims.world_size == setting.dims.replicate
    known = shapes.decoder is not None and shapes.decoder.family in FUSED_FAMILIES
    return setting.fused and unsharded and known


def has_fp8_head(shapes: ModelShapes, setting: Setting) -> bool:
    """Whether the frozen head is quantized to fp8, as models.fast.output_head decides."""
    if setting.method == "full" or setting.dims.tensor > 1 or shapes.decoder is None:
        return False
    if any(size % TENSOR_CORE for size in (shapes.decoder.hidden, shapes.decoder.vocabulary)):
        return False
    nf4 = setting.frozen_weights == "nf4" and runs_fused(shapes, setting) and not shapes.tied
    return setting.frozen_weights == "fp8" or nf4


def stage_layers(shapes: ModelShapes, setting: Setting, pipeline: int) -> StageLayers:
    """The stages of a pipeline rank; several per process are spread over the model."""
    decoder, ranks = shapes.decoder, setting.dims.pipeline
    assert decoder is not None
    if ranks == 1:
        return StageLayers(decoder.layers, embedding=True, head=True)
    per_layer = sum(each.size for each in shapes.of_layer) + shapes_lora(shapes, setting) // decoder.layers
    head_cost = decoder.vocabulary * decoder.hidden / per_layer
    stages = ranks * setting.stages_per_process
    shares = assign_layers(decoder.layers, stages, first=EMBEDDING_COST, last=head_cost)
    own = [shares[number] for number in range(pipeline, stages, ranks)]
    last = pipeline == ranks - 1
    return StageLayers(sum(map(len, own)), embedding=pipeline == 0 or (last and shapes.tied), head=last)


def shapes_lora(shapes: ModelShapes, setting: Setting) -> int:
    """Parameters of all adapters; DoRA's magnitudes included."""
    if setting.method == "full":
        return 0
    count = shapes.lora_parameters(setting.lora_rank, setting.lora_targets)
    if setting.method == "dora":
        count += sum(each.out_in[0] for each in shapes.weights if is_target(each, setting.lora_targets))
    return count


def held_tensors(shapes: ModelShapes, setting: Setting, place: RankPlace = FIRST_RANK) -> list[Held]:
    """Weights and adapters of a rank, after quantization, fusing and sharding."""
    stage = stage_layers(shapes, setting, place.pipeline)
    found: list[Held] = []
    for weight in shapes.outside:
        if stage.embedding if weight.part == "embedding" else stage.head:
            found += (replace(each, outside=True) for each in _tensors_of(weight, shapes, setting, place))
    for weight in shapes.of_layer:
        found += (replace(each, times=stage.layers) for each in _tensors_of(weight, shapes, setting, place))
    if stage.head and has_fp8_head(shapes, setting):
        decoder = shapes.decoder
        assert decoder is not None
        found.append(Held("weights", (decoder.vocabulary, decoder.hidden), BYTE, outside=True))
        found.append(Held("weights", (decoder.vocabulary,), FLOAT32, outside=True))
    if runs_fused(shapes, setting) and setting.method != "full":
        assert shapes.decoder is not None
        buffers = _fused_buffers(shapes.decoder, setting)
        found += (replace(each, times=stage.layers) for each in buffers)
    ranks = shard_degree(setting)
    return found if ranks == 1 else [_sharded(each, ranks, place.shard) for each in found]


def whole_tensors(shapes: ModelShapes, setting: Setting) -> list[Held]:
    """Return the tensors that the ranks of an FSDP group hold together."""
    dims = setting.dims.model_copy(update={"shard": 1, "context": 1})
    return held_tensors(shapes, setting.model_copy(update={"dims": dims, "fused": False}))


def _tensors_of(weight: Weight, shapes: ModelShapes, setting: Setting, place: RankPlace) -> Iterator[Held]:
    """The tensors of a weight: of fused layers with frozen fp8 or unquantized weights, the group's matrix has them."""
    full = setting.method == "full"
    in_matrix = weight.linear and not full and runs_fused(shapes, setting) and setting.frozen_weights != "nf4"
    replaced = weight.part == "head" and has_fp8_head(shapes, setting)
    if not in_matrix and not replaced:
        yield from _stored(weight, setting, place)
    if not full and is_target(weight, setting.lora_targets):
        yield from _adapter(weight, setting, place)


def _stored(weight: Weight, setting: Setting, place: RankPlace) -> Iterator[Held]:
    quantized = setting.frozen_weights if weight.linear else None
    if quantized is None or (quantized == "fp8" and weight.transposed):
        full = setting.method == "full"
        itemsize = DTYPE_BYTES[setting.trained_weights if full else setting.precision]
        yield Held("weights", _tensor_part(weight, setting, place), itemsize, trained=full)
        return
    out, into = weight.out_in
    rows, columns = _linear_part(weight, setting, place)
    if quantized == "fp8":
        yield from (Held("weights", (rows, columns), BYTE), Held("weights", (rows,), FLOAT32))
    elif quantized == "int8":
        yield from (Held("weights", (rows, columns), BYTE), Held("weights", (rows, 1), FLOAT32))
    else:
        yield from _nf4(rows, columns, out_in=(out, into), first_row=_first(out, setting, place))


def _nf4(rows: int, columns: int, *, out_in: tuple[int, int], first_row: int) -> Iterator[Held]:
    """Codes and block scales. A part has scales in 8 bits only if it starts where values that share them start."""
    blocks = -(-rows * columns // NF4_BLOCK)
    yield Held("weights", (blocks * NF4_BLOCK // 2,), BYTE)
    split_columns = columns != out_in[1]
    starts_group = first_row * out_in[1] // NF4_BLOCK % NF4_SCALE_BLOCK == 0
    if split_columns or (rows != out_in[0] and not starts_group):
        yield Held("weights", (blocks,), FLOAT32)
        return
    yield Held("weights", (blocks,), BYTE)
    for _ in range(2):  # a step and a minimum
        yield Held("weights", (-(-blocks // NF4_SCALE_BLOCK),), FLOAT32)


def _adapter(weight: Weight, setting: Setting, place: RankPlace) -> Iterator[Held]:
    """A and B in float32; the one on the split side of the layer is split with it."""
    rows, columns = _linear_part(weight, setting, place)
    yield Held("adapters", (setting.lora_rank, columns), FLOAT32, trained=True)
    yield Held("adapters", (rows, setting.lora_rank), FLOAT32, trained=True)
    if setting.method == "dora":
        yield Held("adapters", (rows,), FLOAT32, trained=True)


def _fused_buffers(decoder: Decoder, setting: Setting) -> Iterator[Held]:
    """Return what models.fast.linear_groups stores for each group of layers besides the adapters themselves."""
    sizes = step_sizes(decoder, setting)
    for group in sizes.groups:
        height, width, pad = group.height, group.width, sizes.pad(group)
        if setting.frozen_weights == "nf4":  # where the matrices that are dequantized get the adapters from
            yield Held("adapters", (height, group.ranks), BYTE)
            yield Held("adapters", (group.ranks, width), BYTE)
        else:  # the layers' weights, with columns and rows for adapters
            yield Held("weights", (height + pad, width + pad), sizes.operand)
        if sizes.fp8_layers:
            yield from (Held("weights", (height,), FLOAT32), Held("weights", (width,), FLOAT32))
        yield Held("adapters", (group.rank if group.ranks else 0, height), sizes.operand)


# -- sharding


def _tensor_part(weight: Weight, setting: Setting, place: RankPlace) -> tuple[int, ...]:
    """Shape of this rank's part of an unquantized tensor under tensor parallelism."""
    ranks, rank = setting.dims.tensor, place.tensor
    if ranks == 1:
        return weight.shape
    split_vocabulary = weight.part in ("embedding", "head")
    if len(weight.shape) == 1:
        by_outputs = weight.part in ("attention", "mlp") and not _is_by_inputs(weight)
        return (_part(weight.shape[0], ranks, rank),) if by_outputs else weight.shape
    if split_vocabulary:
        return _part(weight.shape[0], ranks, rank), *weight.shape[1:]
    return _linear_part(weight, setting, place) if weight.linear else weight.shape


def _linear_part(weight: Weight, setting: Setting, place: RankPlace) -> tuple[int, int]:
    """Outputs and inputs of this rank's part of a linear layer."""
    (out, into), ranks, rank = weight.out_in, setting.dims.tensor, place.tensor
    if _is_by_inputs(weight):
        return out, _part(into, ranks, rank)
    return _part(out, ranks, rank), into


def _is_by_inputs(weight: Weight) -> bool:
    return weight.layer.rpartition(".")[2] in _BY_INPUTS


def _first(out: int, setting: Setting, place: RankPlace) -> int:
    return -(-out // setting.dims.tensor) * place.tensor


def _part(size: int, ranks: int, rank: int) -> int:
    """Share of a rank when torch cuts `size` into chunks: all of one length, the last ones shorter or empty."""
    length = -(-size // ranks)
    return max(0, min(length, size - rank * length))


def _sharded(held: Held, ranks: int, rank: int) -> Held:
    """FSDP cuts every tensor by its first dimension."""
    first, *others = held.shape
    return replace(held, shape=(_part(first, ranks, rank), *others))


# -- what trained tensors bring along


def gradient_bytes(held: Iterable[Held]) -> int:
    return sum(each.bytes * each.times for each in held if each.trained)


def optimizer_tensors(held: Held, setting: Setting) -> list[int]:
    """Bytes of the states of one tensor."""
    size, itemsize = held.size, held.itemsize
    wide = [size * FLOAT32] * 2
    if setting.optimizer == "adamw_bf16":
        return [size * 2] * 2
    if setting.optimizer == "adamw8bit" and size >= SMALLEST_8BIT:
        blocks = -(-size // BLOCK_8BIT)
        return [blocks * BLOCK_8BIT, blocks * FLOAT32] * 2
    if setting.optimizer == "adamw" and itemsize == FLOAT32:  # torch's fused AdamW counts steps on the device
        return [*wide, FLOAT32]
    return wide


def optimizer_bytes(held: Iterable[Held], setting: Setting) -> int:
    return sum(each.times * sum(optimizer_tensors(each, setting)) for each in held if each.trained)
