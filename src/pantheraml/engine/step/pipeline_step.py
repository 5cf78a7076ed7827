"""Pipeline parallel passes: this rank's stages of the model, run by torch's pipeline schedules.

Every rank of a pipeline receives the same batches and takes what its stages need: tokens on the first, targets on the
last, positions and documents on all. Only hidden states and their gradients are sent. A schedule therefore passes to a
stage just the micro-batch index and, after the first stage, hidden states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from peft import PeftModel
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

from pantheraml.base.errors import LaunchError
from pantheraml.data.batch import Batch
from pantheraml.data.uniform_shapes import UniformBatches, make_uniform
from pantheraml.engine.step.loss import summed_loss
from pantheraml.models.adapters import parameter_count
from pantheraml.models.attention import uses_document_attention
from pantheraml.models.document_layout import DocumentLayout
from pantheraml.models.eval_mode import eval_no_grad
from pantheraml.models.families import PlainHead, plain_head
from pantheraml.models.lazy_weights import materialize, materialize_per_layer
from pantheraml.parallel.gradient_sum import sum_gradients
from pantheraml.parallel.pipeline import (
    BodyParts,
    add_peer_gradient,
    cannot_pipeline,
    find_body_parts,
    p2p_device,
    prune_to_stages,
    stage_view,
    tied_weight,
    view,
)
from pantheraml.planner.stages import EMBEDDING_COST, assign_layers

_PROBE_TOKENS = 5

Autocast = Callable[[], AbstractContextManager[object]]


class KnownShapesStage(PipelineStage):
    """Stage that never requests shapes from another: torch would unpickle whatever the peer sends."""

    def _recv_meta(self, src_stage: int) -> Any:
        raise LaunchError(
            f"Pipeline stage {src_stage} tried to send shapes, which all stages already know.",
            fix="Make sure that only the nodes of this run are on its network; see worker.log.",
        )


@dataclass
class _Step:
    """Micro-batches of this rank's stages, and the losses computed so far."""

    batches: UniformBatches
    losses: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class _HiddenSpec:
    """Width and dtype of the hidden states sent between stages."""

    width: int
    dtype: torch.dtype


@dataclass(frozen=True)
class _StageContext:
    """Devices and autocast of this rank's stages."""

    device: torch.device
    p2p_device: torch.device
    """Device of the hidden states that are sent and received."""
    autocast: Autocast


class _Stage(nn.Module):
    """Stage as torch's schedules call it: hidden states through its layers and, on the last stage, to the loss."""

    def __init__(
        self, body: nn.Module, context: _StageContext, *, first: bool, loss: tuple[nn.Module, PlainHead | None] | None
    ) -> None:
        """`loss`, on the last stage only: the full model with `body` in it, and its output head if that is plain."""
        super().__init__()
        self.body = body
        self.first = first
        self._context = context
        self._loss_parts = loss  # a tuple, so that it is not registered a second time in the module tree
        self.step: _Step | None = None

    def forward(self, hidden_in: Tensor, number: Tensor) -> Tensor:
        """`hidden_in`: hidden states; on the first stage, the micro-batch index again."""
        assert self.step is not None
        batches, index = self.step.batches, int(number)
        inputs: dict[str, Any] = {"position_ids": batches.position_ids[index], "use_cache": False}
        if self.first:
            inputs["input_ids"] = batches.input_ids[index]
        else:
            inputs["inputs_embeds"] = hidden_in.to(self._context.device)
        if uses_document_attention(self.body):
            inputs |= DocumentLayout(batches.boundaries[index], batches.max_lengths[index]).arguments()
        with self._context.autocast():
            if self._loss_parts is None:
                hidden: Tensor = self.body(**inputs).last_hidden_state
                return hidden.contiguous().to(self._context.p2p_device)
            last, head = self._loss_parts
            loss = summed_loss(last, head, inputs, batches.targets[index], batches.target_counts[index])
        loss = loss.double().unsqueeze(0)
        self.step.losses.append(loss.detach())
        return loss


class PipelineRun:
    """Splits `model` in place to the stages of this rank, and runs them with the other ranks of `group`.

    `data_group`: ranks with the same stages and other samples; gradients are summed over them.
    """

    def __init__(
        self,
        model: nn.Module,
        group: dist.ProcessGroup,
        *,
        device: torch.device,
        stages_per_process: int = 1,
        data_group: dist.ProcessGroup | None = None,
        autocast: Autocast = nullcontext,
    ) -> None:
        self._model, self._group, self._data_group = model, group, data_group
        self._context = _StageContext(device, p2p_device(group, device), autocast)
        self._processes, rank = dist.get_world_size(group), dist.get_rank(group)
        self._stage_count = self._processes * stages_per_process
        whole: Any = model.get_base_model() if isinstance(model, PeftModel) else model
        head, reason = plain_head(model)
        self.full_logits_reason, self.uses_collectives = None if head is not None else reason, True
        parts = find_body_parts(whole.base_model)
        bodies = _bodies(whole, parts, self._stage_count)
        with materialize_per_layer(whole):
            self._hidden_spec = _verified_hidden_spec(whole, parts, bodies, autocast)
        shared = tied_weight(whole)
        own = range(rank, self._stage_count, self._processes)
        has_last = rank == self._processes - 1
        prune_to_stages(whole, parts, [bodies[number] for number in own], last=has_last)
        materialize(whole)
        self._stages = {number: _stage(whole, head, bodies, number, self._context) for number in own}
        at_end = has_last or rank == 0
        self._shared = shared if at_end and shared is not None and shared.requires_grad else None
        self._other_end = self._processes - 1 - rank
        self._schedules: dict[bool, tuple[tuple[int, int, int], Any]] = {}
        self._factor: float | Tensor = 1.0

    @property
    def shared_parameters(self) -> frozenset[str]:
        """Names of trainable parameters tied between the first and the last stage (embedding and output head)."""
        return frozenset(name for name, parameter in self._model.named_parameters() if parameter is self._shared)

    def backward(self, batches: Sequence[Batch], factor: float | Tensor) -> Tensor:
        """Accumulate the gradient of `factor` times the summed loss; return that sum on the last stage, 0 elsewhere.

        Gradients are summed over the data group. All ranks of a pipeline must pass the same batches.
        """
        self._factor = factor
        trained = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        earlier = [parameter.grad for parameter in trained]
        for parameter in trained:
            parameter.grad = None
        loss = self._run(batches, training=True)
        if self._data_group is not None:
            sum_gradients(trained, self._data_group)
        if self._shared is not None:
            # after the data group sum, whose order may differ between stages: both copies get identical bits
            add_peer_gradient(self._other_end, self._shared, self._group)
        for parameter, gradient in zip(trained, earlier, strict=True):
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        return loss

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Tensor:
        """Return the summed loss of `batch` on the last stage, 0 elsewhere."""
        return self._run([batch], training=False)

    def _run(self, batches: Sequence[Batch], *, training: bool) -> Tensor:
        interleaved = len(self._stages) > 1
        made = make_uniform(batches, at_least=self._processes, multiple_of=self._processes if interleaved else 1)
        step = _Step(made.to(self._context.device))
        for stage in self._stages.values():
            stage.step = step
            stage.body.training = self._model.training
        numbers = torch.arange(made.shape[0])
        schedule = self._schedule(made.shape, training=training)
        try:
            schedule.step(numbers, target=numbers if training else None, number=numbers)
        except RuntimeError as err:  # torch wraps the errors of stages
            if isinstance(err.__cause__, torch.OutOfMemoryError):
                raise err.__cause__ from None
            raise
        finally:
            for stage in self._stages.values():
                stage.step = None
        none = torch.zeros((), dtype=torch.float64, device=self._context.device)
        return torch.cat(step.losses).sum() if step.losses else none

    def _schedule(self, shape: tuple[int, int, int], *, training: bool) -> Any:
        """Schedule for a shape. It allocates buffers, so only the latest for training and for evaluation is cached."""
        cached = self._schedules.get(training)
        if cached is not None and cached[0] == shape:
            return cached[1]
        self._schedules.pop(training, None)
        loss = self._scaled if training else None
        stages: list[Any] = [self._pipeline_stage(number, shape) for number in self._stages]
        if len(stages) == 1:
            made: Any = Schedule1F1B(stages[0], shape[0], loss_fn=loss, scale_grads=False)
        else:
            made = ScheduleInterleaved1F1B(stages, shape[0], loss_fn=loss, scale_grads=False)
        self._schedules[training] = (shape, made)
        return made

    def _pipeline_stage(self, number: int, shape: tuple[int, int, int]) -> PipelineStage:
        """Stage with explicit input and output shapes, so that torch does not run it to infer them."""
        _, rows, width = shape
        hidden = torch.empty(
            (rows, width, self._hidden_spec.width), dtype=self._hidden_spec.dtype, device="meta", requires_grad=True
        )
        loss = torch.empty(1, dtype=torch.float64, device="meta", requires_grad=True)
        return KnownShapesStage(
            self._stages[number],
            number,
            self._stage_count,
            self._context.p2p_device,
            input_args=torch.empty(1, dtype=torch.int64, device="meta") if number == 0 else hidden,
            output_args=loss if number == self._stage_count - 1 else hidden,
            group=self._group,
        )

    def _scaled(self, loss: Tensor, _number: Tensor) -> Tensor:
        return loss * self._factor


def _bodies(whole: Any, parts: BodyParts, stages: int) -> list[nn.Module]:
    """One view of the model body per stage."""
    layers: Any = whole.base_model.get_submodule(parts.layers)
    output = whole.get_output_embeddings()
    head_cost = 0.0 if output is None else parameter_count(output) / parameter_count(layers[0])
    shares = assign_layers(len(layers), stages, first=EMBEDDING_COST, last=head_cost)
    last = stages - 1
    return [
        stage_view(whole.base_model, parts, share, first=number == 0, last=number == last)
        for number, share in enumerate(shares)
    ]


def _stage(
    whole: Any, head: PlainHead | None, bodies: Sequence[nn.Module], number: int, context: _StageContext
) -> _Stage:
    body, first = bodies[number], number == 0
    if number < len(bodies) - 1:
        return _Stage(body, context, first=first, loss=None)
    last = view(whole, {whole.base_model_prefix: body})
    return _Stage(body, context, first=first, loss=(last, None if head is None else replace(head, body=body)))


def _verified_hidden_spec(whole: Any, parts: BodyParts, bodies: Sequence[nn.Module], autocast: Autocast) -> _HiddenSpec:
    """Return the spec of the hidden states; UnsupportedModelError unless the stages together match the full body."""
    body = whole.base_model
    ids = torch.arange(_PROBE_TOKENS, device=next(body.parameters()).device)[None]
    inputs: dict[str, Any] = {"position_ids": ids, "use_cache": False}
    specs = set()
    with eval_no_grad(whole), autocast():
        expected = _whole_output(body, parts, {"input_ids": ids, **inputs})
        hidden = bodies[0](input_ids=ids, **inputs).last_hidden_state
        _check_nothing_between(body, parts, {"inputs_embeds": hidden, **inputs})
        for later in bodies[1:]:
            specs.add(_HiddenSpec(hidden.shape[-1], hidden.dtype))
            hidden = later(inputs_embeds=hidden, **inputs).last_hidden_state
    # Same operations on the same numbers, so bitwise equal. (NaN in the weights is left for the step to report.)
    if not torch.equal(hidden.nan_to_num(), expected.nan_to_num()):
        raise cannot_pipeline(body, "its stages, run in sequence, give other results than the full model")
    if len(specs) > 1:
        raise cannot_pipeline(body, "its stages output different dtypes")
    return specs.pop()


def _whole_output(body: nn.Module, parts: BodyParts, inputs: dict[str, Any]) -> Tensor:
    """Output of the full body; raises unless its layers map hidden states to hidden states."""
    other_types: set[str] = set()

    def look(_layer: nn.Module, _args: Any, output: Any) -> None:
        if not isinstance(output, Tensor):
            other_types.add(type(output).__name__)

    layers: Any = body.get_submodule(parts.layers)
    handles = [layer.register_forward_hook(look) for layer in layers]
    try:
        hidden: Tensor = body(**inputs).last_hidden_state
    finally:
        for handle in handles:
            handle.remove()
    if other_types:
        raise cannot_pipeline(body, f"its layers return a {other_types.pop()} instead of hidden states alone")
    return hidden


def _check_nothing_between(body: nn.Module, parts: BodyParts, inputs: dict[str, Any]) -> None:
    """Check that a stage without layers is the identity: scaling or dropout in the body would be applied twice."""
    empty = stage_view(body, parts, range(0), first=False, last=False)
    empty.training = True
    if not torch.equal(empty(**inputs).last_hidden_state.nan_to_num(), inputs["inputs_embeds"].nan_to_num()):
        raise cannot_pipeline(body, "it changes hidden states outside its layers")
