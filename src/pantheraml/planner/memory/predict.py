"""Predict the peak memory of a training step per rank, by part, as the maximum over named instants of the step.

A step's memory is what lives as long as the run (`weights`), what each decoder layer keeps between its forward and its
backward (`fused_layers`, `plain_layers`), and what the loss, a layer's backward or a collective holds for a moment.
What layers keep shrinks during the backward while gradients grow, both evenly, so the ends of the backward decide.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pantheraml.planner.memory import fused_layers, plain_layers
from pantheraml.planner.memory.blocks import MIB, block_bytes, blocks_bytes
from pantheraml.planner.memory.head import head_use
from pantheraml.planner.memory.step_sizes import DTYPE_BYTES, FLOAT32, StepSizes, step_sizes
from pantheraml.planner.memory.weights import (
    Place,
    StageLayers,
    gradient_bytes,
    has_fp8_head,
    held_tensors,
    optimizer_tensors,
    runs_fused,
    shard_degree,
    stage_layers,
)
from pantheraml.planner.model_shapes import ModelShapes
from pantheraml.planner.setting import Setting
from pantheraml.specs.prediction import MemoryPrediction

Parts = dict[str, int]

TOKEN_BYTES = 3 * 8
"""Token, position and target of each token in int64."""
HOPPER_WORKSPACE, OTHER_WORKSPACE = 32 * MIB, 8 * MIB + 128 * 1024
"""cuBLAS's workspace for each host thread that multiplies, by torch's defaults: forward and backward run in two."""
HOPPER = (9, 0)
FAST_ATTENTION = (8, 0)
"""models.attention: older GPUs have no kernel for packed documents, and attend with masks."""


def why_not_predicted(
    shapes: ModelShapes, setting: Setting, *, capability: tuple[int, int] | None = None
) -> str | None:
    """Why the memory of this setting is not known; None: it is predicted."""
    decoder = shapes.decoder
    if decoder is None:
        return "the sizes of its decoder layers are not known"
    if setting.devices_per_process > 1:
        return "one process uses several devices"
    if setting.device == "cpu":
        return "only the memory of GPUs is predicted"
    if setting.precision == "fp32" or (capability is not None and capability < FAST_ATTENTION):
        return "attention in fp32, or on GPUs before compute capability 8.0, uses other kernels"
    if decoder.family not in plain_layers.PLAIN_FAMILIES:
        return f"what the layers of {decoder.family} keep for the backward is not known"
    if setting.method == "dora" and setting.lora_dropout > 0:
        return "what DoRA with dropout keeps is not known"
    if setting.compile and not runs_fused(shapes, setting):
        if setting.method != "full" or setting.trained_weights != setting.precision:
            return "what compiled layers keep is known only for full fine-tunes in bf16"
        if decoder.family not in ("llama", "mistral"):
            return f"what compiled layers of {decoder.family} keep is not known"
    return None


def predict_memory(
    shapes: ModelShapes,
    setting: Setting,
    *,
    capacity_bytes: int | None = None,
    capability: tuple[int, int] | None = None,
) -> MemoryPrediction | None:
    """Peak memory of the rank that needs most; None: not known, see `why_not_predicted`.

    `capability`: compute capability of the GPU; None: not known, as for the newest.
    """
    if why_not_predicted(shapes, setting, capability=capability) is not None:
        return None
    ranks = range(setting.dims.pipeline)
    workspace = HOPPER_WORKSPACE if capability is None or capability >= HOPPER else OTHER_WORKSPACE
    peaks = [_peak(_Rank(shapes, setting, Place(pipeline=rank), workspace)) for rank in ranks]
    instant, parts = max(peaks, key=lambda peak: sum(peak[1].values()))
    return MemoryPrediction(
        parts=parts,
        instant=instant,
        allocated_bytes=sum(parts.values()),
        reserved_bytes=None,
        device_bytes=None,
        capacity_bytes=capacity_bytes,
    )


def _peak(rank: _Rank) -> tuple[str, Parts]:
    return max(rank.instants().items(), key=lambda instant: sum(instant[1].values()))


@dataclass(frozen=True)
class _Layer:
    """Bytes of one decoder layer of a rank."""

    stored: int
    """Kept between its forward and its backward, with checkpointing."""
    recomputed: int
    """Held from the start of its backward on, besides `stored`."""
    backward: int
    """Held at the fullest moment of its backward."""
    prefetched: int = 0
    """Of the next layer in the backward, if there is one."""


class _Rank:
    def __init__(self, shapes: ModelShapes, setting: Setting, place: Place, workspace: int) -> None:
        decoder = shapes.decoder
        assert decoder is not None
        self.shapes, self.setting = shapes, setting
        self.stage: StageLayers = stage_layers(shapes, setting, place.pipeline)
        self.fused = runs_fused(shapes, setting)
        self.sizes: StepSizes = step_sizes(decoder, setting)
        self.held = held_tensors(shapes, setting, place)
        self.in_flight = _micro_batches_in_flight(setting, place.pipeline)
        self.layer = self._layer()
        self.persistent = self._persistent(workspace)
        self.gradients = gradient_bytes(self.held)

    def instants(self) -> dict[str, Parts]:
        """Bytes by part at the moments of a step that may be its peak."""
        kept = self.layer.stored * self.stage.layers * self.in_flight
        earlier = self._earlier_gradients()
        buffers = self._communication()
        found: dict[str, Parts] = {}
        if self.stage.head:
            head = head_use(self.sizes, fp8_head=has_fp8_head(self.shapes, self.setting), fused_norm=self.fused)
            base = self._at(kept, earlier, buffers)
            found["loss"] = base | {"logits": head.logits + head.rows + head.gradient}
            found["backward of the head"] = base | {"logits": head.rows + head.gradient + head.backward}
            head_gradient = head.gradient
        else:
            head_gradient = 0
        layer = self.layer
        held = kept + layer.recomputed + layer.backward + layer.prefetched
        last = self._at(held, max(earlier, head_gradient), buffers)
        found["backward of the last layer"] = last
        first = self._at(layer.stored * (1 + self.stage.layers * (self.in_flight - 1)), self._all_gradients(), buffers)
        first["activations"] += layer.recomputed + layer.backward
        found["backward of the first layer"] = first
        if self.stage.embedding and self.setting.method == "full":
            found["backward of the embedding"] = self._embedding_backward(buffers)
        found["optimizer"] = self._at(0, self.gradients + self._bucket_copies(), 0)
        found["loading"] = self._loading()
        return found

    def _loading(self) -> Parts:
        """Before the first step: a head that is quantized is there in both formats, as is a layer that is fused."""
        dense = self.sizes.vocabulary * self.sizes.hidden * self.sizes.compute
        head = dense if self.stage.head and not self.shapes.tied and has_fp8_head(self.shapes, self.setting) else 0
        fused = self.fused and self.setting.method != "full" and self.setting.frozen_weights != "nf4"
        group = max(group.height * group.width * self.sizes.operand for group in self.sizes.groups) if fused else 0
        own = {name: size for name, size in self.persistent.items() if name in ("weights", "adapters")}
        return own | {"loading": max(head, group)}

    def _embedding_backward(self, buffers: int) -> Parts:
        """Autograd adds the gradients of a tied embedding and head into a third tensor."""
        sizes = self.sizes
        weight = sizes.vocabulary * sizes.hidden * DTYPE_BYTES[self.setting.trained_weights]
        extra = 2 * block_bytes(weight) if self.shapes.tied and self.stage.head else 0
        rows = block_bytes(sizes.tokens * sizes.hidden * self._residual_bytes())
        return self._at(rows, self._all_gradients() + extra, buffers)

    def _residual_bytes(self) -> int:
        return self.sizes.compute if self.fused else plain_layers.residual_bytes(self.sizes)

    def _at(self, activations: int, gradients: int, buffers: int) -> Parts:
        parts = {"gradients": gradients, "activations": activations, "communication": buffers}
        return self.persistent | {name: size for name, size in parts.items() if size or name == "activations"}

    def _persistent(self, workspace: int) -> Parts:
        parts: Parts = {"weights": 0}
        for each in self.held:
            parts[each.part] = parts.get(each.part, 0) + block_bytes(each.bytes) * each.times
        states = [
            blocks_bytes(optimizer_tensors(each, self.setting)) * each.times for each in self.held if each.trained
        ]
        parts["optimizer"] = sum(states)
        positions = self.sizes.tokens * 2 * self.sizes.decoder.head_dim * self.sizes.compute
        parts["workspace"] = 2 * workspace + positions + self.sizes.tokens * TOKEN_BYTES
        return parts

    def _layer(self) -> _Layer:
        sizes, mode = self.sizes, self.setting.activation_checkpointing
        recomputes = mode in ("full", "offload")
        if self.fused:
            kept = blocks_bytes(fused_layers.kept_tensors(sizes))
            moments = fused_layers.backward_transients(sizes, owns_kept=recomputes)
            backward = max(moment.bytes for moment in moments)
        else:
            compiled = self.setting.compile
            kept = blocks_bytes((plain_layers.compiled_tensors if compiled else plain_layers.kept_tensors)(sizes))
            backward = blocks_bytes(plain_layers.backward_tensors(sizes))
        if mode == "none":
            return _Layer(kept, 0, backward)
        inputs = block_bytes(sizes.tokens * sizes.hidden * self._residual_bytes())
        if mode == "full":
            return _Layer(inputs, kept, backward)
        if mode == "offload":
            return _Layer(0, kept + inputs, backward, prefetched=inputs)
        outputs = blocks_bytes(_matmul_outputs(sizes))
        return _Layer(inputs + outputs, max(0, kept - outputs) + blocks_bytes(_unused_outputs(sizes)), backward)

    def _earlier_gradients(self) -> int:
        """Gradients that are there before the backward of a step's last pass."""
        if self._has_buckets():
            return self._all_gradients()
        if self.setting.accumulation == 1 or self.setting.dims.pipeline > 1:
            return 0
        return self._all_gradients()

    def _all_gradients(self) -> int:
        """Gradients at the end of a pass, before they are reduced."""
        if shard_degree(self.setting) > 1 and self.setting.accumulation > 1:
            return _unsharded_gradients(self.shapes, self.setting)
        return self.gradients + self._bucket_copies()

    def _has_buckets(self) -> bool:
        dims = self.setting.dims
        return dims.world_size > 1 and dims.world_size == dims.replicate * dims.context

    def _bucket_copies(self) -> int:
        """DDP's buckets, unless gradients are views of them."""
        return self.gradients if self._has_buckets() and not self.setting.gradient_as_bucket_view else 0

    def _communication(self) -> int:
        """FSDP: unsharded weights of two layers and of all outside of layers, and a layer's gradients in float32."""
        ranks = shard_degree(self.setting)
        if ranks == 1:
            return 0
        dims = self.setting.dims.model_copy(update={"shard": 1, "context": 1})
        whole = held_tensors(self.shapes, self.setting.model_copy(update={"dims": dims}))
        layers = self.stage.layers
        layer = sum(each.bytes for each in whole if each.times == layers)
        rest = sum(each.bytes for each in whole if each.times == 1 and layers != 1)
        reduced = sum(each.size * FLOAT32 for each in whole if each.trained and each.times == layers)
        return 2 * layer + rest + reduced + reduced // ranks


def _unsharded_gradients(shapes: ModelShapes, setting: Setting) -> int:
    dims = setting.dims.model_copy(update={"shard": 1, "context": 1})
    return gradient_bytes(held_tensors(shapes, setting.model_copy(update={"dims": dims})))


def _micro_batches_in_flight(setting: Setting, pipeline: int) -> int:
    """Micro-batches whose activations a pipeline rank holds at once, by 1F1B; at least one for each stage is made."""
    ranks = setting.dims.pipeline
    if ranks == 1:
        return 1
    passes = max(setting.accumulation, ranks)
    ahead = ranks - pipeline
    if setting.stages_per_process > 1:  # interleaved: counted in passes through one stage
        stages = setting.stages_per_process
        passes_ahead = 2 * (ranks - pipeline - 1) + (stages - 1) * ranks + 1
        return -(-min(passes_ahead, passes * stages) // stages)
    return min(ahead, passes)


def _matmul_outputs(sizes: StepSizes) -> Iterable[int]:
    """What selective checkpointing stores: outputs of matmuls and of attention."""
    for group in sizes.groups:
        yield sizes.tokens * group.height * sizes.compute
    yield sizes.tokens * sizes.queries * sizes.compute
    yield sizes.tokens * sizes.heads * FLOAT32


def _unused_outputs(sizes: StepSizes) -> Iterable[int]:
    """Stored outputs that no backward reads: those added to the residual stream."""
    yield from [sizes.tokens * sizes.hidden * sizes.compute] * 2
