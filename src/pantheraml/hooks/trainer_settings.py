"""A MultiGPUConfig for trainers of transformers and TRL: which of its fields they honor, and as which of their own.

A field that such a trainer cannot honor is an error unless it has its default value.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch.distributed as dist
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from pantheraml.base import log
from pantheraml.base.errors import ConfigError
from pantheraml.engine.guard.own_loop import trained_parameters
from pantheraml.engine.parallelize import has_experts, static_graph_allowed
from pantheraml.parallel.consistency import check_replicas
from pantheraml.parallel.data import decide_static_graph, uses_reentrant_checkpointing
from pantheraml.specs.aggregation import check_method
from pantheraml.specs.multi_gpu import MultiGPUConfig, MultiGPUMode

logger = log.get(__name__)

_HONORED = {
    "mode", "world_size", "backend", "aggregation", "aggregation_weights", "leave_out_nonfinite", "check_every",
    "find_unused_parameters", "gradient_as_bucket_view", "broadcast_buffers", "static_graph", "bucket_cap_mb",
    "enable_multi_gpu_monitoring", "timeout_seconds", "use_gradient_checkpointing", "auto_device_map",
    "enable_gradient_synchronization", "auto_policy", "strict",
}  # fmt: skip
_IMPLIED = {"enable_hybrid", "enable_fault_tolerance"}
"""Set together with another field, which is checked."""


def check_supported(config: MultiGPUConfig, *, ranks: int) -> None:
    """ConfigError for a field that a trainer cannot honor."""
    if config.mode in (MultiGPUMode.DATAPARALLEL, MultiGPUMode.HYBRID):
        raise ConfigError(
            f"A trainer does not support MultiGPUConfig(mode={config.mode.value!r}): it has one process per GPU.",
            fix="Use mode='auto', or `pantheraml train`.",
        )
    default = MultiGPUConfig()
    for field in fields(config):
        name, value = field.name, getattr(config, field.name)
        if name not in _HONORED | _IMPLIED and value != getattr(default, name):
            raise ConfigError(
                f"A trainer does not support MultiGPUConfig({name}={value!r}).",
                fix=f"Remove {name}, or use `pantheraml train`.",
            )
    if config.mode is MultiGPUMode.NONE and ranks > 1:
        raise ConfigError(
            f"MultiGPUConfig(mode='none') asks for one process, but {ranks} were launched.",
            fix="Start the script with `python`, or use mode='auto'.",
        )
    if config.world_size is not None and ranks > 1 and config.world_size != ranks:
        raise ConfigError(
            f"MultiGPUConfig(world_size={config.world_size}), but {ranks} processes were launched.",
            fix="Remove world_size, or launch as many processes.",
        )
    if ranks > 1:
        check_method(config.aggregation, ranks, config.aggregation_weights)


def set_checkpointing(config: MultiGPUConfig, args: TrainingArguments | None) -> None:
    """Set the trainer's own argument; before the trainer is made, which prepares the model for it."""
    wanted = config.use_gradient_checkpointing
    if wanted is None:
        return
    if not isinstance(wanted, bool):
        raise ConfigError(
            f"A trainer does not support MultiGPUConfig(use_gradient_checkpointing={wanted!r}).",
            fix=f"Pass use_gradient_checkpointing={wanted!r} to FastLanguageModel.get_peft_model.",
        )
    if args is None:
        raise ConfigError("use_gradient_checkpointing needs the trainer's arguments.", fix="Pass args=SFTConfig(...).")
    args.gradient_checkpointing = wanted


def configure_ddp(config: MultiGPUConfig, args: TrainingArguments, model: nn.Module, handler: Any) -> None:
    """Set the options of the DDP wrapper that accelerate makes by `handler`; arguments of the trainer that are set
    (`ddp_find_unused_parameters`, ...) take precedence."""
    if config.auto_device_map:
        logger.info("auto_device_map is for loading the model, which is done; the trainer leaves it where it is")
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    logger.info("Multi-GPU training enabled: %d processes over %s", dist.get_world_size(), dist.get_backend())
    if dist.get_backend() != config.backend and args.device.type == "cuda":
        logger.warning(
            "the process group uses %s, not %s: set ddp_backend in the trainer's arguments",
            dist.get_backend(),
            config.backend,
        )
    static = decide_static_graph(
        allowed=static_graph_allowed(config),
        reentrant_checkpointing=_reentrant(args) or uses_reentrant_checkpointing(model),
        unused_parameters=config.find_unused_parameters,
        compiled=bool(args.torch_compile),
        mixture_of_experts=has_experts(model),
        accumulates=args.gradient_accumulation_steps > 1,
    )
    handler.gradient_as_bucket_view = config.gradient_as_bucket_view
    if args.ddp_find_unused_parameters is None:
        handler.find_unused_parameters = config.find_unused_parameters
    if args.ddp_bucket_cap_mb is None:
        handler.bucket_cap_mb = config.bucket_cap_mb
    if args.ddp_broadcast_buffers is None:
        handler.broadcast_buffers = config.broadcast_buffers
    if args.ddp_static_graph is None:
        handler.static_graph = static.value
        logger.info("static_graph is %s: %s", static.value, static.reason)


def say_if_rows_repeat(args: TrainingArguments, rows: Any) -> None:
    """Log that the last batch of an epoch repeats rows, by which accelerate gives all ranks as many batches."""
    batch = args.train_batch_size * args.world_size
    if args.world_size == 1 or args.dataloader_drop_last or not hasattr(rows, "__len__") or len(rows) % batch == 0:
        return
    logger.warning(
        "the last batch of an epoch repeats %d rows, so that all ranks have as many: a single process gives another"
        " result from there on; dataloader_drop_last=True leaves that batch out",
        batch - len(rows) % batch,
    )


def _reentrant(args: TrainingArguments) -> bool:
    return bool(args.gradient_checkpointing and (args.gradient_checkpointing_kwargs or {}).get("use_reentrant"))


class ReplicaCheck(TrainerCallback):  # type: ignore[misc]  # transformers is not typed
    """Every `check_every` steps, all ranks compare their trained weights; a difference is a DriftError."""

    def __init__(self, check_every: int) -> None:
        self._every = check_every

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        if ranks > 1 and state.global_step % self._every == 0:
            weights = trained_parameters(kwargs["model"])
            check_replicas(weights, [], step=state.global_step, device=weights[0][1].device)
