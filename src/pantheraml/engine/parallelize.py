"""Spreading a model over the processes of a run: what is done to it, in which order.

Each line of `parallelize` is a plain function of `parallel/` that changes the model in place. Before it, the model was
loaded, quantised and given its adapters; after it, the trainable parameters have to be taken by name again.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers.modeling_layers import GradientCheckpointingLayer

from pantheraml.base import env
from pantheraml.engine.loss import LossModel
from pantheraml.engine.passes import Autocast, CopiesPasses, Passes, Peers, WholePasses
from pantheraml.engine.pipeline_run import PipelineRun
from pantheraml.models.attention import use_context_parallel
from pantheraml.models.packing import require_boundaries
from pantheraml.models.quantise.packed import constant_buffers, packed_buffers
from pantheraml.models.routing import find_balance, refuse_balance
from pantheraml.models.unread import read_weights
from pantheraml.parallel import data, fsdp
from pantheraml.parallel.aggregate import Finish, attach, nothing_to_finish
from pantheraml.parallel.layout import Layout
from pantheraml.parallel.process_group import World
from pantheraml.parallel.tensor import shard_tensors
from pantheraml.specs.multi_gpu import MultiGPUConfig
from pantheraml.specs.plan import Choice


@dataclass(frozen=True)
class Decided:
    """What could be decided only with the model at hand, to be told."""

    choices: tuple[Choice, ...] = ()
    warnings: tuple[str, ...] = ()
    """Why the result is not that of one process."""

    def __add__(self, other: Decided) -> Decided:
        return Decided(self.choices + other.choices, self.warnings + other.warnings)


@dataclass(frozen=True)
class Parallelised:
    passes: Passes
    mean_over: int = 1
    """What a loss has to be multiplied by, because gradients come out as the mean over so many processes."""
    finish: Finish = nothing_to_finish
    """Ends the exchange of gradients after the last backward pass of a step."""
    held_twice: frozenset[str] = frozenset()
    """Trainable parameters of this process that another pipeline stage counts."""
    decided: Decided = Decided()


@dataclass(frozen=True)
class Traits:
    """What else is known about a run that bears on how its passes are made."""

    graph: bool = False
    """A step's kernels are recorded and replayed."""
    compiled: bool = False
    """Layers will be compiled."""
    accumulates: bool = False
    """A step may take more than one pass."""


def parallelize(
    model: nn.Module, world: World, config: MultiGPUConfig, autocast: Autocast, traits: Traits
) -> Parallelised:
    """Spread `model` over the processes of `world`, in place. A collective of all of them."""
    layout, dims = world.layout, world.layout.dims
    _check_balance(model, world)
    if world.copies_on:
        copies = CopiesPasses(LossModel(model), world.copies_on, device=world.device, autocast=autocast)
        return Parallelised(copies)
    if dims.pipeline > 1:
        return _pipelined(model, world, config, autocast)
    loss_model = LossModel(model)  # looks at the output head, so before anything is cut
    loss_model.balance = find_balance(model)
    if dims.context > 1:
        require_boundaries(model)
        use_context_parallel(model, layout.group("context"), tensor=dims.tensor)
    peers: dict[str, Any] = {"parts_of_rows": layout.group("context") if dims.context > 1 else None}
    if dims.tensor > 1:
        peers["shared"] = shard_tensors(model, layout.submesh("tensor"), prepare=read_weights)
    wrapped: nn.Module = loss_model
    mean_over, finish, decided = 1, nothing_to_finish, _about_divided_model(model, layout)
    if dims.shard > 1:
        layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
        fsdp.shard_parameters(
            loss_model, layers, _sharding_mesh(layout), packed_buffers=packed_buffers, prepare=read_weights
        )
        peers["without_sync"] = partial(fsdp.without_sync, loss_model)
    elif dims.tensor > 1:
        peers["sum_over"] = _copies(layout)
    elif dims.replicate * dims.context > 1:
        wrapped, decided = with_ddp(loss_model, world, config, traits)
        mean_over = dims.replicate * dims.context
        finish = attach(
            wrapped,
            config.aggregation,
            weights=config.aggregation_weights,
            leave_out_nonfinite=config.leave_out_nonfinite,
        )
        peers["without_sync"] = partial(data.without_sync, wrapped)
        peers["last_pass_only"] = dims.context == 1 and not data.sends_buffers(wrapped)
    graph = traits.graph and loss_model.balance is None
    if traits.graph and not graph:
        reason = "the experts' auxiliary loss is weighed anew in each step"
        decided += Decided((Choice(name="train.cuda_graph", value=False, reason=reason, automatic=True),))
    passes = WholePasses(loss_model, wrapped, Peers(**peers), device=world.device, autocast=autocast, graph=graph)
    return Parallelised(passes, mean_over, finish, decided=decided)


def _check_balance(model: nn.Module, world: World) -> None:
    """Whether the experts' auxiliary loss, if there is one, can be that of one process."""
    for name in ("pipeline", "tensor"):
        if getattr(world.layout.dims, name) > 1:
            refuse_balance(model, f"parallel.{name}={getattr(world.layout.dims, name)}")
    if world.copies_on:
        refuse_balance(model, "parallel.mode=dataparallel")


def _pipelined(model: nn.Module, world: World, config: MultiGPUConfig, autocast: Autocast) -> Parallelised:
    layout = world.layout
    decided = _about_divided_model(model, layout)
    run = PipelineRun(
        model,
        layout.group("pipeline"),
        device=world.device,
        stages_per_process=config.stages_per_process,
        data_group=_copies(layout),
        autocast=autocast,
    )
    twice = run.shared_parameters if layout.place["pipeline"] > 0 else frozenset()
    return Parallelised(run, held_twice=twice, decided=decided)


def with_ddp(model: nn.Module, world: World, config: MultiGPUConfig, traits: Traits) -> tuple[nn.Module, Decided]:
    """A copy of `model` on every process that sees tokens of its own; gradients become the mean over them."""
    static = data.decide_static_graph(
        allowed=static_graph_allowed(config),
        reentrant_checkpointing=data.uses_reentrant_checkpointing(model),
        unused_parameters=config.find_unused_parameters,
        accumulates=traits.accumulates,
        compiled=traits.compiled,
        mixture_of_experts=has_experts(model),
    )
    shared, about_norm = shared_batch_norm(model, world, config)
    wrapped = data.wrap(
        shared,
        world,
        config,
        constant_buffers=constant_buffers(model),
        group=_copies(world.layout),
        static_graph=static.value,
    )
    choice = Choice(
        name="parallel.static_graph", value=static.value, reason=static.reason, automatic=config.static_graph
    )
    return wrapped, Decided((choice,)) + about_norm


def static_graph_allowed(config: MultiGPUConfig) -> bool:
    return config.static_graph and not env.static_graph_forbidden()


def shared_batch_norm(model: nn.Module, world: World, config: MultiGPUConfig) -> tuple[nn.Module, Decided]:
    """Batch norm over the samples of all copies, where the model has such layers and `parallel.sync_bn` wants it."""
    if not data.has_batch_norm(model):
        return model, Decided()
    name = "parallel.sync_bn"
    if not config.sync_bn:
        return model, Decided((Choice(name=name, value=False, reason="as configured", automatic=False),))
    synchronised, (value, reason) = data.synchronise_batch_norm(model, world.device, _copies(world.layout))
    choice = Choice(name=name, value=value, reason=reason, automatic=True)
    return synchronised, Decided((choice,), () if value else (_unshared(reason),))


def _about_divided_model(model: nn.Module, layout: Layout) -> Decided:
    alone = layout.dims.data * layout.dims.context == 1
    if alone or not data.has_batch_norm(model):
        return Decided()
    return Decided(warnings=(_unshared("only copies of whole models share it"),))


def _unshared(reason: str) -> str:
    return f"each process takes batch norm over its own samples ({reason}): the result is not that of one process"


def has_experts(model: nn.Module) -> bool:
    """Whether some layers choose among experts, by the names that transformers gives to those."""
    return any(name.endswith("experts") for name, _ in model.named_modules())


def _copies(layout: Layout) -> dist.ProcessGroup | None:
    """The processes that hold the same weights and see other tokens."""
    names = [name for name in ("replicate", "context") if getattr(layout.dims, name) > 1]
    return layout.group(*names) if names else None


def _sharding_mesh(layout: Layout) -> DeviceMesh:
    if layout.dims.replicate > 1:
        assert layout.mesh is not None
        return layout.mesh["replicate", "shard"]
    return layout.submesh("shard", "context") if layout.dims.context > 1 else layout.submesh("shard")
