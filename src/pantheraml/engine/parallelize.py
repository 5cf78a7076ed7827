"""Apply a run's parallelism to the model: which transformations, and in which order.

Each line of `parallelize` is a plain function of `parallel/` that changes the model in place. Before it, the model has
been loaded, quantized and given adapters; after it, trainable parameters have to be looked up by name again.
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
from pantheraml.engine.step.loss import LossModel
from pantheraml.engine.step.passes import Autocast, DataParallelPasses, FullModelPasses, Passes, PeerSync
from pantheraml.engine.step.pipeline_step import PipelineRun
from pantheraml.models.attention import use_context_parallel
from pantheraml.models.lazy_weights import materialize
from pantheraml.models.packing_check import require_boundaries
from pantheraml.models.quantize.quantized_linear import constant_buffers, quantized_buffers
from pantheraml.models.router_loss import find_router_loss, reject_router_loss
from pantheraml.parallel import data, fsdp
from pantheraml.parallel.aggregate import Finish, attach, no_op_finish
from pantheraml.parallel.layout import Layout
from pantheraml.parallel.process_group import World
from pantheraml.parallel.tensor import shard_tensors
from pantheraml.specs.multi_gpu import MultiGPUConfig
from pantheraml.specs.plan import Choice


@dataclass(frozen=True)
class Decisions:
    """Choices that could be made only with the model at hand, to be reported."""

    choices: tuple[Choice, ...] = ()
    warnings: tuple[str, ...] = ()
    """Reasons why the result differs from a single process."""

    def __add__(self, other: Decisions) -> Decisions:
        return Decisions(self.choices + other.choices, self.warnings + other.warnings)


@dataclass(frozen=True)
class Parallelized:
    passes: Passes
    mean_over: int = 1
    """Number of ranks that gradients are averaged over; the loss is multiplied by it to get their sum."""
    finish: Finish = no_op_finish
    """Completes gradient aggregation after the last backward of a step."""
    counted_elsewhere: frozenset[str] = frozenset()
    """Trainable parameters of this process that another pipeline stage counts."""
    decisions: Decisions = Decisions()


@dataclass(frozen=True)
class Traits:
    """Properties of a run that affect how its passes are built."""

    graph: bool = False
    """A step is captured as a CUDA graph."""
    compiled: bool = False
    """Layers will be compiled."""
    accumulates: bool = False
    """Gradient accumulation: a step may have several passes."""


def parallelize(
    model: nn.Module, world: World, config: MultiGPUConfig, autocast: Autocast, traits: Traits
) -> Parallelized:
    """Parallelize `model` over the ranks of `world`, in place. A collective."""
    layout, dims = world.layout, world.layout.dims
    _check_balance(model, world)
    if world.replica_devices:
        replicas = DataParallelPasses(LossModel(model), world.replica_devices, device=world.device, autocast=autocast)
        return Parallelized(replicas)
    if dims.pipeline > 1:
        return _pipelined(model, world, config, autocast)
    loss_model = LossModel(model)  # inspects the output head, so before anything is sharded
    loss_model.balance = find_router_loss(model)
    if dims.context > 1:
        require_boundaries(model)
        use_context_parallel(model, layout.group("context"), tensor=dims.tensor)
    peers: dict[str, Any] = {"context_group": layout.group("context") if dims.context > 1 else None}
    if dims.tensor > 1:
        peers["tp_gradients"] = shard_tensors(model, layout.submesh("tensor"), prepare=materialize)
    wrapped: nn.Module = loss_model
    mean_over, finish, decisions = 1, no_op_finish, _batch_norm_warning(model, layout)
    if dims.shard > 1:
        layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
        fsdp.shard_parameters(
            loss_model, layers, _sharding_mesh(layout), quantized_buffers=quantized_buffers, prepare=materialize
        )
        peers["without_sync"] = partial(fsdp.without_sync, loss_model)
    elif dims.tensor > 1:
        peers["reduce_group"] = _replica_group(layout)
    elif dims.replicate * dims.context > 1:
        wrapped, decisions = with_ddp(loss_model, world, config, traits)
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
        reason = "the experts' auxiliary loss has new weights in each step"
        decisions += Decisions((Choice(name="train.cuda_graph", value=False, reason=reason, automatic=True),))
    passes = FullModelPasses(
        loss_model, wrapped, PeerSync(**peers), device=world.device, autocast=autocast, graph=graph
    )
    return Parallelized(passes, mean_over, finish, decisions=decisions)


def _check_balance(model: nn.Module, world: World) -> None:
    """Raise if this layout cannot reproduce the single-process auxiliary loss of a mixture of experts."""
    for name in ("pipeline", "tensor"):
        if getattr(world.layout.dims, name) > 1:
            reject_router_loss(model, f"parallel.{name}={getattr(world.layout.dims, name)}")
    if world.replica_devices:
        reject_router_loss(model, "parallel.mode=dataparallel")


def _pipelined(model: nn.Module, world: World, config: MultiGPUConfig, autocast: Autocast) -> Parallelized:
    layout = world.layout
    decisions = _batch_norm_warning(model, layout)
    run = PipelineRun(
        model,
        layout.group("pipeline"),
        device=world.device,
        stages_per_process=config.stages_per_process,
        data_group=_replica_group(layout),
        autocast=autocast,
    )
    tied = run.shared_parameters if layout.coordinates["pipeline"] > 0 else frozenset()
    return Parallelized(run, counted_elsewhere=tied, decisions=decisions)


def with_ddp(model: nn.Module, world: World, config: MultiGPUConfig, traits: Traits) -> tuple[nn.Module, Decisions]:
    """Wrap `model` in DDP over all ranks with different tokens; gradients are averaged over them."""
    static = data.decide_static_graph(
        allowed=static_graph_allowed(config),
        reentrant_checkpointing=data.uses_reentrant_checkpointing(model),
        unused_parameters=config.find_unused_parameters,
        accumulates=traits.accumulates,
        compiled=traits.compiled,
        mixture_of_experts=has_experts(model),
    )
    synced, norm_decisions = sync_batch_norm_layers(model, world, config)
    wrapped = data.wrap(
        synced,
        world,
        config,
        constant_buffers=constant_buffers(model),
        group=_replica_group(world.layout),
        static_graph=static.value,
    )
    choice = Choice(
        name="parallel.static_graph", value=static.value, reason=static.reason, automatic=config.static_graph
    )
    return wrapped, Decisions((choice,)) + norm_decisions


def static_graph_allowed(config: MultiGPUConfig) -> bool:
    return config.static_graph and not env.static_graph_forbidden()


def sync_batch_norm_layers(model: nn.Module, world: World, config: MultiGPUConfig) -> tuple[nn.Module, Decisions]:
    """Synchronize batch norm over all replicas, if the model has such layers and `parallel.sync_bn` is set."""
    if not data.has_batch_norm(model):
        return model, Decisions()
    name = "parallel.sync_bn"
    if not config.sync_bn:
        return model, Decisions((Choice(name=name, value=False, reason="as configured", automatic=False),))
    synchronized, (value, reason) = data.sync_batch_norm(model, world.device, _replica_group(world.layout))
    choice = Choice(name=name, value=value, reason=reason, automatic=True)
    return synchronized, Decisions((choice,), () if value else (_not_synchronized(reason),))


def _batch_norm_warning(model: nn.Module, layout: Layout) -> Decisions:
    single = layout.dims.data * layout.dims.context == 1
    if single or not data.has_batch_norm(model):
        return Decisions()
    return Decisions(warnings=(_not_synchronized("only DDP supports sync_bn"),))


def _not_synchronized(reason: str) -> str:
    return f"batch norm is per rank, over its own samples ({reason}): the result differs from a single process"


def has_experts(model: nn.Module) -> bool:
    """Whether the model has a mixture of experts, by transformers' module names."""
    return any(name.endswith("experts") for name, _ in model.named_modules())


def _replica_group(layout: Layout) -> dist.ProcessGroup | None:
    """Group of ranks with the same weights and different tokens."""
    names = [name for name in ("replicate", "context") if getattr(layout.dims, name) > 1]
    return layout.group(*names) if names else None


def _sharding_mesh(layout: Layout) -> DeviceMesh:
    if layout.dims.replicate > 1:
        assert layout.mesh is not None
        return layout.mesh["replicate", "shard"]
    return layout.submesh("shard", "context") if layout.dims.context > 1 else layout.submesh("shard")
