"""One process's part in a pipeline: its stages of the model, run by torch's schedules.

Every process of a pipeline is given the same batches and takes from them what its stages need: tokens on the first,
targets on the last, positions and documents on all. Only hidden states and their gradients travel. What a schedule
hands to a stage is therefore no more than the number of a micro-batch and, behind the first stage, hidden states.
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
from pantheraml.data.uniform import UniformBatches, uniform
from pantheraml.engine.loss import summed_loss
from pantheraml.models.adapters import parameter_count
from pantheraml.models.attention import DocumentLayout, uses_document_attention
from pantheraml.models.families import Head, plain_head
from pantheraml.models.modes import observed
from pantheraml.models.unread import read_in_turn, read_weights
from pantheraml.parallel.gradient_sum import sum_gradients
from pantheraml.parallel.pipeline import (
    Parts,
    add_gradient_of,
    find_parts,
    keep_stages,
    not_cuttable,
    share_layers,
    shared_weight,
    stage_view,
    view,
    wire,
)

_PROBE_TOKENS = 5

EMBEDDING_WORTH = 1.0
"""In layers. Looking tokens up takes no time to speak of, but the first stage has the most micro-batches in memory."""

Autocast = Callable[[], AbstractContextManager[object]]


class KnownShapesStage(PipelineStage):
    """A stage that never asks another for shapes: torch would unpickle the answer, if a peer votes for asking."""

    def _recv_meta(self, src_stage: int) -> Any:
        raise LaunchError(
            f"Pipeline stage {src_stage} wants to tell shapes that all stages know.",
            todo="See that only the nodes of this run are on its network; see worker.log.",
        )


@dataclass
class _Step:
    """What the stages of this process work on, and the losses that came out."""

    batches: UniformBatches
    losses: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class _Stream:
    """What travels between stages, but for the number of rows and tokens."""

    width: int
    dtype: torch.dtype


@dataclass(frozen=True)
class _Place:
    """Where and how the stages of this process compute."""

    device: torch.device
    wire: torch.device
    """Where hidden states lie that come from another process or go there."""
    autocast: Autocast


class _Stage(nn.Module):
    """A stage as torch's schedules call it: hidden states go through its layers and, on the last, on to the loss."""

    def __init__(
        self, body: nn.Module, place: _Place, *, first: bool, loss: tuple[nn.Module, Head | None] | None
    ) -> None:
        """`loss`, on the last stage alone: the whole model with `body` in it, and its output head if that is plain."""
        super().__init__()
        self.body = body
        self.first = first
        self._place = place
        self._loss_parts = loss  # in a tuple, and so not in the module tree a second time
        self.step: _Step | None = None

    def forward(self, given: Tensor, number: Tensor) -> Tensor:
        """`given` is the hidden states; on the first stage it is the number of the micro-batch again."""
        assert self.step is not None
        batches, index = self.step.batches, int(number)
        inputs: dict[str, Any] = {"position_ids": batches.position_ids[index], "use_cache": False}
        if self.first:
            inputs["input_ids"] = batches.input_ids[index]
        else:
            inputs["inputs_embeds"] = given.to(self._place.device)
        if uses_document_attention(self.body):
            inputs |= DocumentLayout(batches.boundaries[index], batches.max_lengths[index]).arguments()
        with self._place.autocast():
            if self._loss_parts is None:
                hidden: Tensor = self.body(**inputs).last_hidden_state
                return hidden.contiguous().to(self._place.wire)
            last, head = self._loss_parts
            loss = summed_loss(last, head, inputs, batches.targets[index], batches.target_counts[index])
        loss = loss.double().unsqueeze(0)
        self.step.losses.append(loss.detach())
        return loss


class PipelineRun:
    """Cuts `model` in place to the stages of this process, and runs them together with the other processes of `group`.

    `data_group`: the processes that have the same stages and see other samples; gradients are summed over them.
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
        self._place = _Place(device, wire(group, device), autocast)
        self._processes, rank = dist.get_world_size(group), dist.get_rank(group)
        self._stage_count = self._processes * stages_per_process
        whole: Any = model.get_base_model() if isinstance(model, PeftModel) else model
        head, reason = plain_head(model)
        self.full_logits_reason, self.meets_peers = None if head is not None else reason, True
        parts = find_parts(whole.base_model)
        bodies = _bodies(whole, parts, self._stage_count)
        with read_in_turn(whole):
            self._stream = _proved(whole, parts, bodies, autocast)
        shared = shared_weight(whole)
        own = range(rank, self._stage_count, self._processes)
        has_last = rank == self._processes - 1
        keep_stages(whole, parts, [bodies[number] for number in own], last=has_last)
        read_weights(whole)
        self._stages = {number: _stage(whole, head, bodies, number, self._place) for number in own}
        at_end = has_last or rank == 0
        self._shared = shared if at_end and shared is not None and shared.requires_grad else None
        self._other_end = self._processes - 1 - rank
        self._schedules: dict[bool, tuple[tuple[int, int, int], Any]] = {}
        self._factor: float | Tensor = 1.0

    @property
    def shared_parameters(self) -> frozenset[str]:
        """Names of trainable parameters that two stages hold: the first and the last, as embedding and output head."""
        return frozenset(name for name, parameter in self._model.named_parameters() if parameter is self._shared)

    def backward(self, batches: Sequence[Batch], factor: float | Tensor) -> Tensor:
        """Add the gradient of `factor` times the summed loss of all `batches`; that sum on the last stage, else 0.

        Over the data group gradients are summed. All processes of a pipeline have to give the same batches.
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
            # after the sum over the data group, whose order may differ from stage to stage: both copies get equal bits
            add_gradient_of(self._other_end, self._shared, self._group)
        for parameter, gradient in zip(trained, earlier, strict=True):
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        return loss

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Tensor:
        """The summed loss of `batch` on the last stage, else 0."""
        return self._run([batch], training=False)

    def _run(self, batches: Sequence[Batch], *, training: bool) -> Tensor:
        interleaved = len(self._stages) > 1
        made = uniform(batches, at_least=self._processes, multiple_of=self._processes if interleaved else 1)
        step = _Step(made.to(self._place.device))
        for stage in self._stages.values():
            stage.step = step
            stage.body.training = self._model.training
        numbers = torch.arange(made.shape[0])
        schedule = self._schedule(made.shape, training=training)
        try:
            schedule.step(numbers, target=numbers if training else None, number=numbers)
        except RuntimeError as err:  # torch wraps what a stage raises
            if isinstance(err.__cause__, torch.OutOfMemoryError):
                raise err.__cause__ from None
            raise
        finally:
            for stage in self._stages.values():
                stage.step = None
        none = torch.zeros((), dtype=torch.float64, device=self._place.device)
        return torch.cat(step.losses).sum() if step.losses else none

    def _schedule(self, shape: tuple[int, int, int], *, training: bool) -> Any:
        """A schedule serves one shape, and keeps memory for it: the last one made for each purpose is kept."""
        known = self._schedules.get(training)
        if known is not None and known[0] == shape:
            return known[1]
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
        """With the shapes of what comes in and goes out, so that torch does not run the stages to find them out."""
        _, rows, width = shape
        hidden = torch.empty(
            (rows, width, self._stream.width), dtype=self._stream.dtype, device="meta", requires_grad=True
        )
        loss = torch.empty(1, dtype=torch.float64, device="meta", requires_grad=True)
        return KnownShapesStage(
            self._stages[number],
            number,
            self._stage_count,
            self._place.wire,
            input_args=torch.empty(1, dtype=torch.int64, device="meta") if number == 0 else hidden,
            output_args=loss if number == self._stage_count - 1 else hidden,
            group=self._group,
        )

    def _scaled(self, loss: Tensor, _number: Tensor) -> Tensor:
        return loss * self._factor


def _bodies(whole: Any, parts: Parts, stages: int) -> list[nn.Module]:
    """A view of the body for each stage."""
    layers: Any = whole.base_model.get_submodule(parts.layers)
    output = whole.get_output_embeddings()
    head_worth = 0.0 if output is None else parameter_count(output) / parameter_count(layers[0])
    shares = share_layers(len(layers), stages, first=EMBEDDING_WORTH, last=head_worth)
    last = stages - 1
    return [
        stage_view(whole.base_model, parts, share, first=number == 0, last=number == last)
        for number, share in enumerate(shares)
    ]


def _stage(whole: Any, head: Head | None, bodies: Sequence[nn.Module], number: int, place: _Place) -> _Stage:
    body, first = bodies[number], number == 0
    if number < len(bodies) - 1:
        return _Stage(body, place, first=first, loss=None)
    last = view(whole, {whole.base_model_prefix: body})
    return _Stage(body, place, first=first, loss=(last, None if head is None else replace(head, body=body)))


def _proved(whole: Any, parts: Parts, bodies: Sequence[nn.Module], autocast: Autocast) -> _Stream:
    """What travels between the stages; UnsupportedModelError unless they do together what the whole body does."""
    body = whole.base_model
    ids = torch.arange(_PROBE_TOKENS, device=next(body.parameters()).device)[None]
    inputs: dict[str, Any] = {"position_ids": ids, "use_cache": False}
    streams = set()
    with observed(whole), autocast():
        expected = _whole_output(body, parts, {"input_ids": ids, **inputs})
        hidden = bodies[0](input_ids=ids, **inputs).last_hidden_state
        _check_nothing_between(body, parts, {"inputs_embeds": hidden, **inputs})
        for later in bodies[1:]:
            streams.add(_Stream(hidden.shape[-1], hidden.dtype))
            hidden = later(inputs_embeds=hidden, **inputs).last_hidden_state
    # The same operations on the same numbers: they differ by nothing. (NaN in the weights is for the step to report.)
    if not torch.equal(hidden.nan_to_num(), expected.nan_to_num()):
        raise not_cuttable(body, "its stages, one after another, give other results than the whole")
    if len(streams) > 1:
        raise not_cuttable(body, "its stages hand on numbers of different types")
    return streams.pop()


def _whole_output(body: nn.Module, parts: Parts, inputs: dict[str, Any]) -> Tensor:
    """Of the uncut body, whose layers have to be functions from hidden states to hidden states."""
    others: set[str] = set()

    def look(_layer: nn.Module, _args: Any, output: Any) -> None:
        if not isinstance(output, Tensor):
            others.add(type(output).__name__)

    layers: Any = body.get_submodule(parts.layers)
    handles = [layer.register_forward_hook(look) for layer in layers]
    try:
        hidden: Tensor = body(**inputs).last_hidden_state
    finally:
        for handle in handles:
            handle.remove()
    if others:
        raise not_cuttable(body, f"its layers return a {others.pop()} instead of hidden states alone")
    return hidden


def _check_nothing_between(body: nn.Module, parts: Parts, inputs: dict[str, Any]) -> None:
    """A stage without layers has to hand on what it is given: a body's own scaling or dropout would come twice."""
    empty = stage_view(body, parts, range(0), first=False, last=False)
    empty.training = True
    if not torch.equal(empty(**inputs).last_hidden_state.nan_to_num(), inputs["inputs_embeds"].nan_to_num()):
        raise not_cuttable(body, "it changes hidden states outside its layers")
