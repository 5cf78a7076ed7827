"""Split a causal language model into pipeline stages of consecutive decoder layers.

A stage is a view of the model's body with its forward unchanged: layers of other stages become pass-throughs in the
same list, so every parameter keeps its name. Stages after the first take hidden states as `inputs_embeds`, with the
modules before the layers passed through; stages before the last pass through the modules after them. These modules come
from the model's config (`base_model_pp_plan`) or, without one, from the order of the body's children. The caller must
verify that the stages run in sequence reproduce the full model's output.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pantheraml.base.errors import UnsupportedModelError


@dataclass(frozen=True)
class BodyParts:
    """Names of a body's children by role."""

    embedding: str
    """Token embedding."""
    before: tuple[str, ...]
    """Other modules applied before the layers."""
    layers: str
    after: tuple[str, ...]
    """Modules applied after the layers."""


class PassThrough(nn.Module):
    """Placeholder for a module of another stage; returns its first argument."""

    def forward(self, hidden: Tensor, *_others: Any, **_named: Any) -> Tensor:
        return hidden


class ZeroPositions(nn.Module):
    """Placeholder for a position embedding that was already added on the first stage."""

    def forward(self, positions: Tensor, *_others: Any, **_named: Any) -> Tensor:
        return positions.new_zeros(())


def find_body_parts(body: Any) -> BodyParts:
    """Identify the parts of a model's body; raise UnsupportedModelError if that fails."""
    children = dict(body.named_children())
    count = body.config.get_text_config().num_hidden_layers
    lists = [name for name, child in children.items() if isinstance(child, nn.ModuleList) and len(child) == count]
    embeddings = [name for name, child in children.items() if child is body.get_input_embeddings()]
    if len(lists) != 1 or len(embeddings) != 1:
        raise cannot_pipeline(body, "its embedding or its list of layers was not found")
    (layers,), (embedding,) = lists, embeddings
    plan = getattr(body.config, "base_model_pp_plan", None)
    order = list(children) if plan is None else [name for name in plan if name in children]
    if plan is not None and layers not in order:
        raise cannot_pipeline(body, f"its config's base_model_pp_plan does not name {layers!r}")
    place = order.index(layers)
    before = [name for name in order[:place] if name != embedding and _touches_hidden(children[name])]
    after = [name for name in order[place + 1 :] if _touches_hidden(children[name])]
    return BodyParts(embedding, tuple(before), layers, tuple(after))


def _touches_hidden(module: nn.Module) -> bool:
    """Return False for modules without weights, such as the rotary embedding, which every stage computes itself."""
    return isinstance(module, nn.Dropout) or any(True for _ in module.parameters())


def cannot_pipeline(body: nn.Module, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{type(body).__name__} cannot be split into pipeline stages: {reason}.",
        fix="Use parallel.shard (FSDP) or parallel.replicate (DDP), which work with any model.",
    )


def stage_view(body: nn.Module, parts: BodyParts, layers: range, *, first: bool, last: bool) -> nn.Module:
    """Return a body that shares modules with `body` but runs only `layers`, plus the first/last modules if asked."""
    all_layers: Any = body.get_submodule(parts.layers)
    stage_layers = [layer if number in layers else _placeholder(layer) for number, layer in enumerate(all_layers)]
    changed: dict[str, nn.Module] = {parts.layers: nn.ModuleList(stage_layers)}
    if not first:
        changed[parts.embedding] = PassThrough()
        changed |= {name: _placeholder(body.get_submodule(name)) for name in parts.before}
    if not last:
        changed |= {name: _placeholder(body.get_submodule(name)) for name in parts.after}
    return view(body, changed)


def view(module: nn.Module, changed: dict[str, nn.Module]) -> nn.Module:
    """Return a shallow copy of `module`, hooks included, with the children in `changed` replaced."""
    clone = copy.copy(module)
    clone._modules = {**module._modules, **changed}
    return clone


def _placeholder(module: nn.Module) -> nn.Module:
    if isinstance(module, nn.Embedding):
        return ZeroPositions()
    placeholder = PassThrough()
    # Bodies read attributes of their layers, such as the attention type, before calling them.
    for name, value in vars(module).items():
        if isinstance(value, str | int | float) and not name.startswith("_"):
            setattr(placeholder, name, value)
    return placeholder


def prune_to_stages(whole: Any, parts: BodyParts, views: Sequence[nn.Module], *, last: bool) -> None:
    """Drop modules of `whole`, in place, that none of the stage `views` of its body uses.

    `last` says that one of the views is the last stage. A tied weight stays under the embedding's name, as in every
    mode.
    """
    body = whole.base_model
    tied = tied_weight(whole) is not None
    for name in (parts.embedding, *parts.before, *parts.after):
        if name == parts.embedding and last and tied:
            continue
        if all(view.get_submodule(name) is not body.get_submodule(name) for view in views):
            setattr(body, name, views[0].get_submodule(name))
    all_layers = body.get_submodule(parts.layers)
    for number, layer in enumerate(all_layers):
        view_layers: list[Any] = [view.get_submodule(parts.layers) for view in views]
        if all(layers[number] is not layer for layers in view_layers):
            all_layers[number] = view_layers[0][number]
    if not last:
        for name, child in list(whole.named_children()):
            if child is not body:
                setattr(whole, name, PassThrough())


def tied_weight(whole: Any) -> nn.Parameter | None:
    """Return the weight tied between input embedding and output head, or None."""
    embedding, head = whole.get_input_embeddings(), whole.get_output_embeddings()
    weight = getattr(embedding, "weight", None)
    return weight if weight is not None and weight is getattr(head, "weight", None) else None


def p2p_device(group: dist.ProcessGroup, device: torch.device) -> torch.device:
    """Return the device for point-to-point transfers: gloo sends from host memory only."""
    return torch.device("cpu") if dist.get_backend(group) == dist.Backend.GLOO else device


def add_peer_gradient(peer: int, parameter: nn.Parameter, group: dist.ProcessGroup) -> None:
    """Add the gradient that `peer` (a rank in `group`) has for `parameter`; the peer must make the same call."""
    mine = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    sent = mine.contiguous().to(p2p_device(group, mine.device))
    theirs = torch.empty_like(sent)
    exchange = [
        dist.P2POp(dist.isend, sent, group=group, group_peer=peer),
        dist.P2POp(dist.irecv, theirs, group=group, group_peer=peer),
    ]
    for work in dist.batch_isend_irecv(exchange):
        work.wait()
    parameter.grad = mine.add_(theirs.to(mine.device))
