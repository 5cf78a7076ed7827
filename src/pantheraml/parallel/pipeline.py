"""Cutting a causal language model into stages: groups of decoder layers, one after another, on different processes.

A stage is a view of the model's own body, whose forward is used as it is: layers of other stages are pass-throughs in
the same list, so that every parameter keeps its name. On later stages the body takes the hidden states as
`inputs_embeds`, and what comes before the layers passes them on; on all but the last so does what comes after. Which
parts those are is read from the model's config (`base_model_pp_plan`) or, where it has none, from the order of the
body's children. A cut is only as good as its proof: whoever cuts has to see that the stages, run one after another,
give what the whole model gives.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pantheraml.base.errors import ConfigError, UnsupportedModelError


def share_layers(layers: int, stages: int, *, first: float, last: float) -> list[range]:
    """Which layers each stage gets: contiguous, at least one each, the fullest stage as small as can be.

    `first` and `last` are what the first stage does before its layers and the last one after them, in layers' worth.
    """
    if stages > layers:
        raise ConfigError(
            f"The model has {layers} layers, which cannot be cut into {stages} pipeline stages.",
            todo="Lower parallel.pipeline (or the number of stages per process).",
        )
    loads = [1.0] * stages
    loads[0] += first
    loads[-1] += last
    counts = [1] * stages
    for _ in range(layers - stages):
        # Among equals the later one: earlier stages have more micro-batches under way, and so less memory to spare.
        stage = min(range(stages), key=lambda stage: (loads[stage], -stage))
        loads[stage] += 1
        counts[stage] += 1
    starts = [sum(counts[:stage]) for stage in range(stages)]
    return [range(start, start + count) for start, count in zip(starts, counts, strict=True)]


def bubble_share(processes: int, micro_batches: int, stages_per_process: int = 1) -> float:
    """The part of a step in which a process waits for others, if all stages take equally long and sending no time.

    Filling and draining takes `processes - 1` turns, and a turn is one stage's work on one micro-batch.
    """
    waiting = processes - 1
    return waiting / (stages_per_process * micro_batches + waiting)


@dataclass(frozen=True)
class Parts:
    """Names of a body's children, by what they do."""

    embedding: str
    """Turns tokens into hidden states."""
    before: tuple[str, ...]
    """What else hidden states go through before the layers."""
    layers: str
    after: tuple[str, ...]
    """What hidden states go through after the layers."""


class PassThrough(nn.Module):
    """Stands where a part of another stage was, and hands on what it is given first."""

    def forward(self, hidden: Tensor, *_others: Any, **_named: Any) -> Tensor:
        return hidden


class NoPositions(nn.Module):
    """Stands for a table of positions whose rows have been added on an earlier stage."""

    def forward(self, positions: Tensor, *_others: Any, **_named: Any) -> Tensor:
        return positions.new_zeros(())


def find_parts(body: Any) -> Parts:
    """The parts of a model's body; UnsupportedModelError where they cannot be told."""
    children = dict(body.named_children())
    count = body.config.get_text_config().num_hidden_layers
    lists = [name for name, child in children.items() if isinstance(child, nn.ModuleList) and len(child) == count]
    embeddings = [name for name, child in children.items() if child is body.get_input_embeddings()]
    if len(lists) != 1 or len(embeddings) != 1:
        raise not_cuttable(body, "its embedding and its list of layers are not found")
    (layers,), (embedding,) = lists, embeddings
    plan = getattr(body.config, "base_model_pp_plan", None)
    order = list(children) if plan is None else [name for name in plan if name in children]
    if plan is not None and layers not in order:
        raise not_cuttable(body, f"its config's base_model_pp_plan names no {layers!r}")
    place = order.index(layers)
    before = [name for name in order[:place] if name != embedding and _touches_hidden(children[name])]
    after = [name for name in order[place + 1 :] if _touches_hidden(children[name])]
    return Parts(embedding, tuple(before), layers, tuple(after))


def _touches_hidden(module: nn.Module) -> bool:
    """Not so what has no weights, such as the rotary embedding, which every stage computes for itself."""
    return isinstance(module, nn.Dropout) or any(True for _ in module.parameters())


def not_cuttable(body: nn.Module, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{type(body).__name__} cannot be cut into pipeline stages: {reason}.",
        todo="Use parallel.shard (FSDP) or parallel.replicate (DDP), which work with any model.",
    )


def stage_view(body: nn.Module, parts: Parts, layers: range, *, first: bool, last: bool) -> nn.Module:
    """A body that shares its modules with `body`, but runs only `layers`, and what is before and after as asked."""
    every: Any = body.get_submodule(parts.layers)
    kept = [layer if number in layers else _stand_in(layer) for number, layer in enumerate(every)]
    changed: dict[str, nn.Module] = {parts.layers: nn.ModuleList(kept)}
    if not first:
        changed[parts.embedding] = PassThrough()
        changed |= {name: _stand_in(body.get_submodule(name)) for name in parts.before}
    if not last:
        changed |= {name: _stand_in(body.get_submodule(name)) for name in parts.after}
    return view(body, changed)


def view(module: nn.Module, changed: dict[str, nn.Module]) -> nn.Module:
    """A module like `module`, hooks included, with other children under the names in `changed`."""
    seen = copy.copy(module)
    seen._modules = {**module._modules, **changed}
    return seen


def _stand_in(module: nn.Module) -> nn.Module:
    if isinstance(module, nn.Embedding):
        return NoPositions()
    stand_in = PassThrough()
    # Bodies look at marks of their layers, such as the kind of attention, before they call them.
    for name, value in vars(module).items():
        if isinstance(value, str | int | float) and not name.startswith("_"):
            setattr(stand_in, name, value)
    return stand_in


def keep_stages(whole: Any, parts: Parts, views: Sequence[nn.Module], *, last: bool) -> None:
    """Drop from `whole`, in place, what none of the `views` of its body uses; `last`: one of them is the last stage.

    A weight that the output head shares with the input embedding stays under the embedding's name, as in every mode.
    """
    body = whole.base_model
    tied = shared_weight(whole) is not None
    for name in (parts.embedding, *parts.before, *parts.after):
        if name == parts.embedding and last and tied:
            continue
        if all(view.get_submodule(name) is not body.get_submodule(name) for view in views):
            setattr(body, name, views[0].get_submodule(name))
    every = body.get_submodule(parts.layers)
    for number, layer in enumerate(every):
        here: list[Any] = [view.get_submodule(parts.layers) for view in views]
        if all(layers[number] is not layer for layers in here):
            every[number] = here[0][number]
    if not last:
        for name, child in list(whole.named_children()):
            if child is not body:
                setattr(whole, name, PassThrough())


def shared_weight(whole: Any) -> nn.Parameter | None:
    """The weight that is both input embedding and output head, if there is one."""
    embedding, head = whole.get_input_embeddings(), whole.get_output_embeddings()
    weight = getattr(embedding, "weight", None)
    return weight if weight is not None and weight is getattr(head, "weight", None) else None


def wire(group: dist.ProcessGroup, device: torch.device) -> torch.device:
    """Where tensors have to lie that a process on `device` sends to another: gloo sends from host memory only."""
    return torch.device("cpu") if dist.get_backend(group) == dist.Backend.GLOO else device


def add_gradient_of(peer: int, parameter: nn.Parameter, group: dist.ProcessGroup) -> None:
    """Add to `parameter`'s gradient the one that `peer`, a rank in `group`, has for it; the peer has to do the same."""
    mine = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    sent = mine.contiguous().to(wire(group, mine.device))
    theirs = torch.empty_like(sent)
    exchange = [
        dist.P2POp(dist.isend, sent, group=group, group_peer=peer),
        dist.P2POp(dist.irecv, theirs, group=group, group_peer=peer),
    ]
    for work in dist.batch_isend_irecv(exchange):
        work.wait()
    parameter.grad = mine.add_(theirs.to(mine.device))
