"""What text makes of a model's linear layers: the moments of their inputs and of their outputs' gradients.

By these moments weights are rounded (`models.quantise.rounding`). The text goes through the whole model once, and its
gradient comes back one decoder layer at a time: a layer computes again what it had computed, from inputs that were kept
in host memory (of every layer, two bytes a value in bf16), and hands the gradient of its input on. So where weights can
be read layer by layer, those of one layer and its moments are on the device at a time, whatever the model's size.
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
from pantheraml.engine.loss import LossModel
from pantheraml.models.unread import read_for_now, read_in_turn

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Within which a layer comes to the same outputs when it computes again."""

SCALE = {torch.float16: 256.0}
"""Of the loss, for gradients that would be too small for their dtype."""

Told = Callable[[str, int, int], None]
"""Is told what is being done, how often that was done, and how often it will be."""


@dataclass
class Moments:
    """Of one linear layer, summed over tokens: E[x x^T] of its inputs and E[g g^T] of its outputs' gradients."""

    inputs: Tensor
    gradients: Tensor

    @classmethod
    def zero(cls, layer: nn.Linear) -> Moments:
        sizes = (layer.in_features, layer.out_features)
        return cls(*(torch.zeros(size, size, device=layer.weight.device) for size in sizes))


@dataclass(frozen=True)
class Visit:
    """One decoder layer with its weights, and the moments of its linear layers by their names in the model."""

    name: str
    layer: nn.Module
    moments: dict[str, Moments]


@dataclass
class _Passage:
    """One batch's way through the decoder layers."""

    calls: list[tuple[Tensor, tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)
    """What each was called with: hidden states, in host memory, and what else."""
    gradient: Tensor | None = None
    """Of the last output that the way back has come to, in host memory."""


def decoder_layers(model: Any) -> list[tuple[str, nn.Module]]:
    """With their names, from the first to the last."""
    found = [(name, m) for name, m in model.named_modules() if isinstance(m, GradientCheckpointingLayer)]
    if not found:
        raise UnsupportedModelError(f"{type(model).__name__} has no decoder layers that could be visited one by one.")
    return found


def visits(model: Any, batches: Sequence[Batch], linears: Sequence[str], told: Told) -> Iterator[Visit]:
    """Every decoder layer of the frozen `model` that has some of `linears`, the last one first. Its weights are there,
    and may be replaced, until the next visit."""
    model.requires_grad_(False).eval()
    layers = decoder_layers(model)
    passages = _go_forward(model, [layer for _, layer in layers], batches, told)
    for number, (name, layer) in reversed(list(enumerate(layers))):
        wanted = {full: model.get_submodule(full) for full in linears if full.startswith(f"{name}.")}
        with read_for_now(layer):
            with _observing(wanted) as moments:
                for passage in passages:
                    _go_back(passage, layer, number, name)
            yield Visit(name, layer, moments)
        told("rounding layers", len(layers) - number, len(layers))


def _go_forward(model: Any, layers: Sequence[nn.Module], batches: Sequence[Batch], told: Told) -> list[_Passage]:
    """All batches through the model, up to the gradient of the last layer's output."""
    device = model.get_input_embeddings().weight.device
    passages = []
    with read_in_turn(model):
        loss_model = LossModel(model)
        for number, batch in enumerate(batches):
            told("reading text", number, len(batches))
            passage, last = _Passage(), _LastOutput()
            with ExitStack() as hooks:
                for layer in layers:
                    record = layer.register_forward_pre_hook(partial(_record, passage), with_kwargs=True, prepend=True)
                    hooks.callback(record.remove)
                hooks.callback(layers[-1].register_forward_hook(last).remove)
                here = batch.to(device)
                loss = loss_model(
                    here.input_ids, here.position_ids, here.targets, here.boundaries, here.max_length, here.target_count
                )
            if len(passage.calls) != len(layers) or last.output is None:
                raise UnsupportedModelError(f"{type(model).__name__} does not call each of its layers once.")
            if not bool(loss.isfinite()):
                raise ModelError("The model's loss on the text is not finite.", todo="Check its weights.")
            # moments are looked at by their own mean, so a factor changes nothing but what fp16 can hold
            (loss * SCALE.get(last.output.dtype, 1.0)).backward()
            passage.gradient = last.output.grad.cpu()
            passages.append(passage)
    return passages


def _record(passage: _Passage, _layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    hidden, rest = (args[0], args[1:]) if args else (kwargs["hidden_states"], ())
    passage.calls.append((hidden.detach().cpu(), rest, {k: v for k, v in kwargs.items() if k != "hidden_states"}))


class _LastOutput:
    """Where the gradient begins: nothing before is differentiated in the first pass."""

    def __init__(self) -> None:
        self.output: Any = None

    def __call__(self, _layer: nn.Module, _args: Any, output: Any) -> Any:
        self.output = _hidden(output).detach().requires_grad_()
        return (self.output, *output[1:]) if isinstance(output, tuple) else self.output


def _hidden(output: Any) -> Tensor:
    hidden: Tensor = output[0] if isinstance(output, tuple) else output
    return hidden


def _go_back(passage: _Passage, layer: nn.Module, number: int, name: str) -> None:
    """The gradient of the layer's input, in the place of that of its output."""
    before, rest, kwargs = passage.calls[number]
    following = passage.calls.pop()[0] if number + 1 < len(passage.calls) else None
    device = next(layer.parameters()).device
    hidden = before.to(device).requires_grad_()
    output = _hidden(layer(hidden, *rest, **kwargs))
    if following is not None:
        expected = following.to(device)
        difference = (output.detach() - expected).float().norm()
        if not bool(difference <= TOLERANCE[output.dtype] * expected.float().norm()):
            raise UnsupportedModelError(f"The layer after {name} does not begin with what that one ends with.")
    assert passage.gradient is not None
    output.backward(passage.gradient.to(device))
    assert hidden.grad is not None
    if not bool(hidden.grad.isfinite().all()):
        raise ModelError(f"The gradient of {name} on the text is not finite.", todo="Check the model's weights.")
    passage.gradient = hidden.grad.cpu()


@contextmanager
def _observing(linears: dict[str, Any]) -> Iterator[dict[str, Moments]]:
    """Inside, what the layers are given and what gradients come back is added up."""
    moments = {name: Moments.zero(layer) for name, layer in linears.items()}

    def add(total: Tensor, rows: Tensor) -> None:
        wide = rows.detach().flatten(0, -2).float()
        total.addmm_(wide.T, wide)

    def observe(own: Moments, _layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        add(own.inputs, args[0])
        if output.requires_grad:
            output.register_hook(partial(add, own.gradients))

    with ExitStack() as hooks:
        for name, layer in linears.items():
            hooks.callback(layer.register_forward_hook(partial(observe, moments[name])).remove)
        yield moments
