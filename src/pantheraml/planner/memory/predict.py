"""Predict the peak memory of a training step per rank, by part, as the maximum over named instants of the step.

A step's memory is what lives as long as the run (`weights`), what each decoder layer keeps between its forward and its
backward (`fused_layers`, `plain_layers`), and what the loss, a layer's backward or a collective holds for a moment.
What layers keep shrinks during the backward while gradients grow, both evenly, so the ends of the backward decide.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from pantheraml.planner.memory import fused_layers, plain_layers
from pantheraml.planner.memory.blocks import MIB, block_bytes, blocks_bytes
from pantheraml.planner.memory.head import HeadUse, head_use
from pantheraml.planner.memory.reserved import TYPICAL_UNUSED, LayerTensors, StepTensors, driver_bytes, unused_bytes
from pantheraml.planner.memory.step_sizes import DTYPE_BYTES, FLOAT32, StepSizes, step_sizes
from pantheraml.planner.memory.weights import (
    FIRST_RANK,
    Held,
    RankPlace,
    StageLayers,
    gradient_bytes,
    has_fp8_head,
    held_tensors,
    optimizer_tensors,
    runs_fused,
    shard_degree,
    stage_layers,
    whole_tensors,
)
from pantheraml.planner.model_shapes import ModelShapes, is_target
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
        return f"the model has {shapes.unlike}" if shapes.unlike else "the sizes of its decoder layers are not known"
    if setting.devices_per_process > 1:
        return "one process uses several devices"
    if setting.device == "cpu":
        return "only the memory of GPUs is predicted"
    if setting.method != "full" and (problem := _why_not_targets(shapes, setting)) is not None:
        return problem
    if setting.precision == "fp32" or (capability is not None and capability < FAST_ATTENTION):
        return "attention in fp32, or on GPUs before compute capability 8.0, uses other kernels"
    if decoder.family not in plain_layers.PLAIN_FAMILIES:
        return f"what the layers of {decoder.family} keep for the backward is not known"
    if setting.method == "dora" and setting.lora_dropout > 0:
        return "what DoRA with dropout keeps is not known"
    if setting.compile and not runs_fused(shapes, setting):
        return plain_layers.why_not_compiled(step_sizes(decoder, setting))
    return None


def _why_not_targets(shapes: ModelShapes, setting: Setting) -> str | None:
    """Why it is not known which layers get an adapter; None: the same in each decoder layer."""
    targets = setting.lora_targets
    if targets == "all-linear":
        return None
    names = [targets] if isinstance(targets, str) else targets
    if any(part.isdigit() for name in names for part in name.split(".")):
        return "method.target_modules names layers by their number"
    linears = [weight for weight in shapes.of_layer if weight.linear]
    missing = [name for name in names if not any(is_target(weight, name) for weight in linears)]
    return f"method.target_modules names {', '.join(missing)}, which decoder layers do not have" if missing else None


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
    workspace = _workspace(setting, capability)
    ranks = [_Rank(shapes, setting, RankPlace(pipeline=rank), workspace) for rank in range(setting.dims.pipeline)]
    fullest = max(ranks, key=lambda rank: _total(rank.peak))
    instant, parts = fullest.peak
    allocated = sum(parts.values())
    driver = driver_bytes(setting.dims.world_size, hopper=_is_hopper(capability))
    unused = round(TYPICAL_UNUSED * allocated)
    if capacity_bytes is None or allocated + unused + driver <= capacity_bytes:  # else it is too much anyway
        unused = max(unused, unused_bytes(fullest.step_tensors()))
    return MemoryPrediction(
        parts=parts,
        instant=instant,
        allocated_bytes=allocated,
        reserved_bytes=allocated + unused,
        device_bytes=allocated + unused + driver,
        capacity_bytes=capacity_bytes,
    )


def _total(instant: tuple[str, Parts]) -> int:
    return sum(instant[1].values())


def instants(
    shapes: ModelShapes, setting: Setting, place: RankPlace = FIRST_RANK, *, capability: tuple[int, int] | None = None
) -> dict[str, Parts]:
    """Bytes of a rank by part, at each moment of a step that may be its peak."""
    return _Rank(shapes, setting, place, _workspace(setting, capability)).instants()


def _workspace(setting: Setting, capability: tuple[int, int] | None) -> int:
    if setting.device != "cuda":
        return 0
    return HOPPER_WORKSPACE if _is_hopper(capability) else OTHER_WORKSPACE


def _is_hopper(capability: tuple[int, int] | None) -> bool:
    """Hopper or newer, as GPUs that are not known are taken to be."""
    return capability is None or capability >= HOPPER


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
    """Prefetched for the next layer in the backward, if there is one."""


class _Rank:
    def __init__(self, shapes: ModelShapes, setting: Setting, place: RankPlace, workspace: int) -> None:
        decoder = shapes.decoder
        assert decoder is not None
        self.shapes, self.setting = shapes, setting
        self.stage: StageLayers = stage_layers(shapes, setting, place.pipeline)
        self.fused = runs_fused(shapes, setting)
        self.sizes: StepSizes = step_sizes(decoder, setting)
        self.held = held_tensors(shapes, setting, place)
        self.in_flight = _micro_batches_in_flight(setting, place.pipeline)
        self.tensors = self._layer_tensors()
        self.layer = self._layer()
        self.workspace = workspace
        self.persistent = self._persistent(workspace)
        self.gradients = gradient_bytes(self.held)
        self.sharded = self._unsharded()

    @cached_property
    def peak(self) -> tuple[str, Parts]:
        return max(self.instants().items(), key=_total)

    def instants(self) -> dict[str, Parts]:
        """Bytes by part at the moments of a step that may be its peak."""
        kept = self.layer.stored * self.stage.layers * self.in_flight
        earlier = self._earlier_gradients()
        buffers = (
            0 if self.sharded is None else self.sharded[0].bytes + self.sharded[0].weights + self.sharded[1].weights
        )
        found: dict[str, Parts] = {}
        if self.stage.head:
            head = self._head()
            head_gradient = block_bytes(head.gradient)
            rows = blocks_bytes(head.rows) + head_gradient
            base = self._at(kept, earlier, buffers)
            found["loss"] = base | {"logits": blocks_bytes(head.logits) + rows}
            found["backward of the head"] = base | {"logits": rows + blocks_bytes(head.backward)}
        else:
            head_gradient = 0
        own = self.layer
        held = kept + own.recomputed + own.backward + own.prefetched
        last = self._at(held, max(earlier, head_gradient), buffers)
        found["backward of the last layer"] = last
        others = self.stage.layers * (self.in_flight - 1)
        first = self._at(own.stored * (1 + others), max(earlier, self._gradients_before_first_layer()), buffers)
        first["activations"] += own.recomputed + own.backward
        found["backward of the first layer"] = first
        if self.stage.embedding and self.setting.method == "full":
            found["backward of the embedding"] = self._embedding_backward(buffers)
        if self.sharded is not None and self.sharded[1].gradients:
            found["reduction of embedding and head"] = self._at(0, self.gradients, self.sharded[1].bytes)
        found["optimizer"] = self._at(0, self.gradients + self._bucket_copies(), 0)
        found["loading"] = self._loading()
        return found

    def _head(self) -> HeadUse:
        return head_use(self.sizes, fp8_head=has_fp8_head(self.shapes, self.setting), fused_norm=self.fused)

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
        extra = 2 * block_bytes(self._embedding_bytes()) if self.shapes.tied and self.stage.head else 0
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
        tensors, mode = self.tensors, self.setting.activation_checkpointing
        stored, recomputed = blocks_bytes(tensors.stored), blocks_bytes(tensors.recomputed)
        backward = max(map(blocks_bytes, tensors.moments))
        if mode == "offload":
            return _Layer(0, recomputed, backward, prefetched=block_bytes(self._layer_input()))
        if mode == "selective":
            outputs = blocks_bytes(_matmul_outputs(self.sizes))
            return _Layer(stored, max(0, blocks_bytes(self._kept()) - outputs), backward)
        return _Layer(stored, recomputed, backward)

    def _layer_tensors(self) -> LayerTensors:
        sizes, mode = self.sizes, self.setting.activation_checkpointing
        kept, own = tuple(self._kept()), self._layer_input()
        if self.fused and fused_layers.is_tiled(sizes):
            transients = fused_layers.tiled_backward_transients(sizes)
            moments = tuple(moment.tensors for moment in transients)
        elif self.fused:
            transients = fused_layers.backward_transients(sizes, owns_kept=mode in ("full", "offload"))
            moments = tuple(moment.tensors for moment in transients)
        else:
            moments = (tuple(plain_layers.backward_tensors(sizes)),)
        if mode == "none":
            return LayerTensors(kept, (), moments)
        if mode == "full":
            return LayerTensors((own,), kept, moments)
        if mode == "offload":
            return LayerTensors((), (*kept, own), moments)
        outputs, recomputed = list(_matmul_outputs(sizes)), list(kept)
        for size in outputs:
            if size in recomputed:
                recomputed.remove(size)
        return LayerTensors((own, *outputs), tuple(recomputed), moments)

    def _kept(self) -> Iterable[int]:
        """Tensors that a layer keeps without checkpointing, or while it is recomputed."""
        if self.fused:
            tiled = fused_layers.is_tiled(self.sizes)
            return (fused_layers.tiled_kept_tensors if tiled else fused_layers.kept_tensors)(self.sizes)
        return (plain_layers.compiled_tensors if self.setting.compile else plain_layers.kept_tensors)(self.sizes)

    def _layer_input(self) -> int:
        return self.sizes.tokens * self.sizes.hidden * self._residual_bytes()

    def step_tensors(self) -> StepTensors:
        trained = [each for each in self.held if each.trained]
        of_layer, outer = ([each for each in trained if each.outside == outside] for outside in (False, True))
        head = self._head() if self.stage.head else None
        lasting = [each.bytes for each in self.held for _ in range(each.times)]
        gradients = tuple(each.bytes for each in of_layer for _ in range(each.times // max(1, self.stage.layers)))
        outer_gradients = [each.bytes for each in outer]
        if head is not None and head.gradient and not self.shapes.tied:
            outer_gradients.remove(max(outer_gradients))  # the loss makes the head's
        if self._earlier_gradients():
            lasting += [each.bytes for each in trained for _ in range(each.times)]
            gradients, outer_gradients = (), []
        whole = (0, 0) if self.sharded is None else (self.sharded[0].weights, self.sharded[0].bytes)
        return StepTensors(
            lasting=(self.workspace, self.workspace, *lasting),
            states=tuple(
                size for each in trained for _ in range(each.times) for size in optimizer_tensors(each, self.setting)
            ),
            layer=self.tensors,
            layers=self.stage.layers,
            passes=self.in_flight,
            gradients=gradients,
            outer_gradients=tuple(outer_gradients),
            summed_gradient=self._embedding_bytes() if self.shapes.tied and self.setting.method == "full" else 0,
            head=head,
            gathered=whole,
            captured=self.setting.cuda_graph,
        )

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
            return gradient_bytes(whole_tensors(self.shapes, self.setting))
        return self.gradients + self._bucket_copies()

    def _gradients_before_first_layer(self) -> int:
        """All but those of the first layer itself and of an embedding of its own, which come last."""
        late = sum(each.bytes for each in self.held if each.trained and not each.outside)
        if self.setting.method == "full" and self.stage.embedding and not self.shapes.tied:
            late += self._embedding_bytes() // shard_degree(self.setting)
        return self._all_gradients() - late

    def _embedding_bytes(self) -> int:
        return self.sizes.vocabulary * self.sizes.hidden * DTYPE_BYTES[self.setting.trained_weights]

    def _has_buckets(self) -> bool:
        dims = self.setting.dims
        return dims.world_size > 1 and dims.world_size == dims.replicate * dims.context

    def _unsharded(self) -> tuple[_Unsharded, _Unsharded] | None:
        """A layer, of which the weights of the next one are there as well, and all outside of layers; None: no FSDP."""
        ranks = shard_degree(self.setting)
        if ranks == 1:
            return None
        whole = whole_tensors(self.shapes, self.setting)
        layer, rest = ([each for each in whole if each.outside == outside] for outside in (False, True))
        return _Unsharded.of(layer, ranks), _Unsharded.of(rest, ranks)

    def _bucket_copies(self) -> int:
        """DDP's buckets, unless gradients are views of them."""
        return self.gradients if self._has_buckets() and not self.setting.gradient_as_bucket_view else 0


@dataclass(frozen=True)
class _Unsharded:
    """Return the bytes that FSDP gathers on a rank: of one layer, or of all outside of layers."""

    weights: int
    gradients: int
    """In the weights' dtype."""
    reduced: int
    """The same in float32, to be sent, and this rank's sum."""

    @classmethod
    def of(cls, held: Sequence[Held], ranks: int) -> _Unsharded:
        trained = [each for each in held if each.trained]
        wide = sum(each.size * FLOAT32 for each in trained)
        return cls(sum(each.bytes for each in held), sum(each.bytes for each in trained), wide + wide // ranks)

    @property
    def bytes(self) -> int:
        return self.weights + self.gradients + self.reduced


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
    """Return the tensors that selective checkpointing saves: outputs of matmuls and of attention."""
    for group in sizes.groups:
        yield sizes.tokens * group.height * sizes.compute
    yield sizes.tokens * sizes.queries * sizes.compute
    yield sizes.tokens * sizes.heads * FLOAT32
