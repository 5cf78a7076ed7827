"""Calibration for quantization: second moments of the inputs and output gradients of a model's linear layers.

Weights are rounded by these moments (`models.quantize.rounding`). The calibration text runs through the full model
once; backward then proceeds one decoder layer at a time: each layer is recomputed from inputs saved in host memory (two
bytes per value in bf16, for every layer) and passes the gradient of its input on. With lazily loaded weights, only one
layer and its moments are on the device at a time, whatever the model's size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from pantheraml.base.errors import ModelError, UnsupportedModelError
from pantheraml.data.batch import Batch
from pantheraml.engine.step.loss import LossModel
from pantheraml.models.lazy_weights import materialize_per_layer, materialize_temporarily

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Tolerance between the outputs of a layer and of its recomputation."""

_ROUND_TO_NEAREST = "Train the unquantized model with method.kind=qlora, which rounds to nearest."

SCALE = {torch.float16: 256.0}
"""Loss scale, for gradients that would underflow."""

OnProgress = Callable[[str, int, int], None]
"""Callback with the name of a task, how many items are done, and how many there are."""


@dataclass
class LayerMoments:
    """Moments of one linear layer, summed over tokens: x x^T of its inputs and g g^T of its output gradients."""

    inputs: Tensor
    gradients: Tensor

    @classmethod
    def zero(cls, layer: nn.Linear) -> LayerMoments:
        sizes = (layer.in_features, layer.out_features)
        return cls(*(torch.zeros(size, size, device=layer.weight.device) for size in sizes))


@dataclass(frozen=True)
class CalibratedLayer:
    """One decoder layer with its weights, and the moments of its linear layers by their names in the model."""

    name: str
    layer: nn.Module
    moments: dict[str, LayerMoments]


@dataclass
class _LayerInputs:
    """Decoder layer inputs of one batch, and the gradient propagated so far."""

    calls: list[tuple[Tensor, tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)
    """Arguments of each layer: hidden states (in host memory), other positional and keyword arguments."""
    gradient: Tensor | None = None
    """Gradient of the output of the next layer to run backward, in host memory."""


def decoder_layers(model: Any) -> list[tuple[str, nn.Module]]:
    """Decoder layers in order, with their names."""
    found = [(name, m) for name, m in model.named_modules() if isinstance(m, GradientCheckpointingLayer)]
    if not found:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no decoder layers to calibrate one by one.", fix=_ROUND_TO_NEAREST
        )
    return found


def calibrate_layers(
    model: Any, batches: Sequence[Batch], linears: Sequence[str], on_progress: OnProgress
) -> Iterator[CalibratedLayer]:
    """Yield every decoder layer of `model`, which gets frozen, from last to first, with moments of its `linears`.

    The weights of the yielded layer are materialized, and may be replaced, until the next iteration.
    """
    model.requires_grad_(False).eval()
    layers = decoder_layers(model)
    all_inputs = _forward_all(model, [layer for _, layer in layers], batches, on_progress)
    for number, (name, layer) in reversed(list(enumerate(layers))):
        layer_linears = {full: model.get_submodule(full) for full in linears if full.startswith(f"{name}.")}
        with materialize_temporarily(layer):
            with _collecting_moments(layer_linears) as moments:
                for inputs in all_inputs:
                    _backward_layer(inputs, layer, number, name)
            yield CalibratedLayer(name, layer, moments)
        on_progress("rounding layers", len(layers) - number, len(layers))


def _forward_all(
    model: Any, layers: Sequence[nn.Module], batches: Sequence[Batch], on_progress: OnProgress
) -> list[_LayerInputs]:
    """Run all batches forward, and backward to the output of the last decoder layer."""
    device = model.get_input_embeddings().weight.device
    all_inputs = []
    with materialize_per_layer(model):
        loss_model = LossModel(model)
        for number, batch in enumerate(batches):
            on_progress("reading text", number, len(batches))
            inputs, last = _LayerInputs(), _LastOutput()
            with ExitStack() as hooks:
                for layer in layers:
                    record = layer.register_forward_pre_hook(partial(_record, inputs), with_kwargs=True, prepend=True)
                    hooks.callback(record.remove)
                hooks.callback(layers[-1].register_forward_hook(last).remove)
                here = batch.to(device)
                loss = loss_model(
                    here.input_ids, here.position_ids, here.targets, here.boundaries, here.max_length, here.target_count
                )
            if len(inputs.calls) != len(layers) or last.output is None:
                raise UnsupportedModelError(
                    f"{type(model).__name__} does not call each of its layers once.", fix=_ROUND_TO_NEAREST
                )
            if not bool(loss.isfinite()):
                raise ModelError("The model's loss on the text is not finite.", fix="Check its weights.")
            # moments are used relative to their mean, so the loss scale only affects what fp16 can represent
            (loss * SCALE.get(last.output.dtype, 1.0)).backward()
            inputs.gradient = last.output.grad.cpu()
            all_inputs.append(inputs)
    return all_inputs


def _record(inputs: _LayerInputs, _layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    hidden, rest = (args[0], args[1:]) if args else (kwargs["hidden_states"], ())
    inputs.calls.append((hidden.detach().cpu(), rest, {k: v for k, v in kwargs.items() if k != "hidden_states"}))


class _LastOutput:
    """Detaches the output of the last layer, so that the first pass differentiates nothing before it."""

    def __init__(self) -> None:
        self.output: Any = None

    def __call__(self, _layer: nn.Module, _args: Any, output: Any) -> Any:
        self.output = _hidden(output).detach().requires_grad_()
        return (self.output, *output[1:]) if isinstance(output, tuple) else self.output


def _hidden(output: Any) -> Tensor:
    hidden: Tensor = output[0] if isinstance(output, tuple) else output
    return hidden


def _backward_layer(inputs: _LayerInputs, layer: nn.Module, number: int, name: str) -> None:
    """Replace the gradient of the layer's output by that of its input."""
    before, rest, kwargs = inputs.calls[number]
    following = inputs.calls.pop()[0] if number + 1 < len(inputs.calls) else None
    device = next(layer.parameters()).device
    hidden = before.to(device).requires_grad_()
    output = _hidden(layer(hidden, *rest, **kwargs))
    if following is not None:
        expected = following.to(device)
        difference = (output.detach() - expected).float().norm()
        if not bool(difference <= TOLERANCE[output.dtype] * expected.float().norm()):
            raise UnsupportedModelError(
                f"The layer after {name} does not take its output as input.", fix=_ROUND_TO_NEAREST
            )
    assert inputs.gradient is not None
    output.backward(inputs.gradient.to(device))
    assert hidden.grad is not None
    if not bool(hidden.grad.isfinite().all()):
        raise ModelError(f"The gradient of {name} on the text is not finite.", fix="Check the model's weights.")
    inputs.gradient = hidden.grad.cpu()


@contextmanager
def _collecting_moments(linears: dict[str, Any]) -> Iterator[dict[str, LayerMoments]]:
    """Sum up the moments of the given layers while in the context."""
    moments = {name: LayerMoments.zero(layer) for name, layer in linears.items()}

    def add(total: Tensor, rows: Tensor) -> None:
        wide = rows.detach().flatten(0, -2).float()
        total.addmm_(wide.T, wide)

    def observe(own: LayerMoments, _layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        add(own.inputs, args[0])
        if output.requires_grad:
            output.register_hook(partial(add, own.gradients))

    with ExitStack() as hooks:
        for name, layer in linears.items():
            hooks.callback(layer.register_forward_hook(partial(observe, moments[name])).remove)
        yield moments
