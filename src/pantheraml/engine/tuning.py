"""Optimizations by `PerformanceConfig` of a user's module, optimizer and DataLoader, besides multi-GPU wrapping.

Each function changes one thing and returns a `Choice` with the value and its reason, so that the status can report
what was done and, on a device where a setting changes nothing, that it was not.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from transformers.modeling_layers import GradientCheckpointingLayer

from pantheraml.base.errors import ConfigError, UnsupportedModelError
from pantheraml.engine.compile import compile_layers
from pantheraml.engine.memory.checkpointing import apply_checkpointing
from pantheraml.models.derived_class import RuntimeSubclass
from pantheraml.planner.precision import choose_precision
from pantheraml.specs.performance import OptimizationLevel, PerformanceConfig
from pantheraml.specs.plan import Choice

Checkpointing = bool | Literal["unsloth"]


# -- precision ---------------------------------------------------------------------------------------------------------


class _Autocast(RuntimeSubclass):
    """Mixin: the forward runs under bf16 autocast and returns float32, so that losses keep their precision."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        here: Any = self
        device = next((parameter.device.type for parameter in here.parameters()), "cpu")
        with torch.autocast(device, dtype=torch.bfloat16):
            output = super().forward(*args, **kwargs)  # type: ignore[misc]
        return tree_map_only(Tensor, lambda value: value.float() if value.dtype == torch.bfloat16 else value, output)


@cache
def _with_autocast(kind: Any) -> Any:
    return type(kind.__name__, (_Autocast, kind), {"made_by": (_with_autocast, (kind,)), "__module__": kind.__module__})


def use_mixed_precision(model: nn.Module, config: PerformanceConfig, device: torch.device) -> Choice:
    """Run the forward of `model` in bf16, in place, where the device has it."""
    name, automatic = "enable_mixed_precision", config.enable_mixed_precision is None
    if not config.mixed_precision:
        reason = f"level {config.optimization_level}" if automatic else "as configured"
        return Choice(name=name, value=False, reason=reason, automatic=automatic)
    if any(parameter.dtype in (torch.bfloat16, torch.float16) for parameter in model.parameters()):
        return Choice(name=name, value=False, reason="the model has 16-bit weights already", automatic=True)
    on_gpu = device.type == "cuda"
    capabilities = [torch.cuda.get_device_capability(device)] if on_gpu else []
    chosen = choose_precision(None, "cuda" if on_gpu else "cpu", capabilities)
    if chosen.value == "fp16":
        reason = "the GPU has no bf16, and fp16 would need a GradScaler in your loop"
        return Choice(name=name, value=False, reason=reason, automatic=True)
    if chosen.value != "bf16":
        return Choice(name=name, value=False, reason=chosen.reason, automatic=True)
    apply_autocast(model)
    return Choice(name=name, value=True, reason="bf16 autocast", automatic=automatic)


def apply_autocast(model: nn.Module) -> None:
    if not isinstance(model, _Autocast):
        kind: Any = type(model)
        model.__class__ = _with_autocast(kind)


class MatmulPrecision:
    """TF32 for float32 matmuls from level advanced: a setting of the process, which `restore` takes back."""

    def __init__(self) -> None:
        self._before: str | None = None

    def apply(self, config: PerformanceConfig, device: torch.device) -> Choice:
        if not config.optimization_level.includes(OptimizationLevel.ADVANCED):
            return _level_choice("tf32", config, value=False)
        if device.type != "cuda":
            return Choice(name="tf32", value=False, reason="the model is on the CPU", automatic=True)
        if self._before is None:
            self._before = torch.get_float32_matmul_precision()
            torch.set_float32_matmul_precision("high")
        return _level_choice("tf32", config, value=True)

    def restore(self) -> None:
        if self._before is not None:
            torch.set_float32_matmul_precision(self._before)
            self._before = None


# -- compile -----------------------------------------------------------------------------------------------------------


def compile_module(model: nn.Module, config: PerformanceConfig, device: torch.device) -> Choice:
    """Compile `model` in place: its decoder layers, or all of it if it has none."""
    name, automatic = "enable_compile", config.enable_compile is None
    if not config.compile:
        reason = f"level {config.optimization_level}" if automatic else "as configured"
        return Choice(name=name, value=False, reason=reason, automatic=automatic)
    problem = _no_compiler(device)
    if problem is not None:
        if not automatic:
            raise ConfigError(f"enable_compile=True, but {problem}.", fix="Install one, or set enable_compile=False.")
        return Choice(name=name, value=False, reason=problem, automatic=True)
    layers = compile_layers(model)
    if not layers:
        model.compile()
    what = f"{layers} decoder layers" if layers else "the whole model, at its first forward"
    return Choice(name=name, value=True, reason=what, automatic=automatic)


def _no_compiler(device: torch.device) -> str | None:
    if device.type == "cuda":
        return None
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return "there is no C++ compiler, which torch.compile needs on a CPU"
    return None


# -- activation checkpointing ------------------------------------------------------------------------------------------


class _Checkpointed(RuntimeSubclass):
    """Mixin: in training, the forward is recomputed in the backward pass while `recompute` is set."""

    recompute = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        run: Any = super().forward  # type: ignore[misc]
        here: Any = self
        if not (self.recompute and here.training and torch.is_grad_enabled()):
            return run(*args, **kwargs)
        return checkpoint(run, *args, use_reentrant=False, **kwargs)


@cache
def _with_checkpointing(kind: Any) -> Any:
    made_by = (_with_checkpointing, (kind,))
    return type(kind.__name__, (_Checkpointed, kind), {"made_by": made_by, "__module__": kind.__module__})


def repeated_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers of `model`: transformers' decoder layers, else the items of its outermost lists."""
    layers: list[nn.Module] = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    if layers:
        return layers
    found: list[nn.Module] = []
    pending = [model]
    while pending:
        module = pending.pop(0)
        items = list(module.children())
        if isinstance(module, nn.ModuleList | nn.Sequential):
            found += [item for item in items if any(True for _ in item.parameters())]
        else:
            pending += items
    return found


def checkpoint_layers(model: nn.Module, mode: Checkpointing) -> Choice:
    """Turn activation checkpointing of the layers of `model` on or off, in place."""
    layers = repeated_layers(model)
    if mode and not layers:
        raise UnsupportedModelError(
            f"enable_gradient_checkpointing={mode!r} recomputes the layers in a ModuleList or Sequential of the model,"
            f" and {type(model).__name__} has none.",
            fix="Put its layers into one, or call torch.utils.checkpoint in its forward.",
        )
    if isinstance(next(iter(layers), None), GradientCheckpointingLayer):
        apply_checkpointing(model, {True: "full", "unsloth": "offload", False: "none"}[mode])  # type: ignore[arg-type]
    elif mode == "unsloth":
        raise UnsupportedModelError(
            "enable_gradient_checkpointing='unsloth' works on transformers' decoder layers, and this model has none.",
            fix="Use enable_gradient_checkpointing=True.",
        )
    else:
        for layer in layers:
            if isinstance(layer, _Checkpointed):
                layer.recompute = bool(mode)
            elif mode:
                kind: Any = type(layer)
                layer.__class__ = _with_checkpointing(kind)
    reason = f"{len(layers)} layers are recomputed" if mode else "as configured"
    return Choice(name="enable_gradient_checkpointing", value=bool(mode), reason=reason, automatic=False)


# -- optimizer and loader ----------------------------------------------------------------------------------------------

FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)


def fuse_optimizer(optimizer: Optimizer, config: PerformanceConfig) -> Choice:
    """Let the optimizer update all weights in one kernel, in place, if torch has one for it."""
    name = "fused_optimizer"
    if not config.optimization_level.includes(OptimizationLevel.BASIC):
        return _level_choice(name, config, value=False)
    problem = _why_not_fused(optimizer)
    if problem is not None:
        return Choice(name=name, value=False, reason=problem, automatic=True)
    for group in optimizer.param_groups:
        group["fused"], group["foreach"] = True, False
    return _level_choice(name, config, value=True)


def _why_not_fused(optimizer: Optimizer) -> str | None:
    kind = type(optimizer).__name__
    if type(optimizer) not in FUSED:
        return f"torch has no fused {kind}"
    groups, parameters = optimizer.param_groups, [p for group in optimizer.param_groups for p in group["params"]]
    if any(group.get("foreach") is not None or group.get("fused") is not None for group in groups):
        return "the optimizer was created with foreach or fused"
    if any(group.get("differentiable") or group.get("capturable") for group in groups):
        return "the optimizer is differentiable or capturable"
    if optimizer.state:
        return "the optimizer has taken steps already"
    if not all(p.device.type in ("cuda", "cpu") and torch.is_floating_point(p) for p in parameters):
        return "some parameters are not floating point numbers on a GPU or CPU"
    if any(type(p) is not nn.Parameter for p in parameters):
        return "some parameters are sharded"
    if isinstance(optimizer, torch.optim.Adagrad) and any(p.device.type != "cpu" for p in parameters):
        return "torch's fused Adagrad is for CPUs"
    return None


def loader_changes(loader: DataLoader[Any], config: PerformanceConfig, device: torch.device) -> dict[str, Any]:
    """Return arguments of the DataLoader that speed it up: pinned memory, persistent workers that read ahead."""
    changed: dict[str, Any] = {}
    if not config.optimization_level.includes(OptimizationLevel.BASIC):
        return changed
    if device.type == "cuda" and not loader.pin_memory:
        changed["pin_memory"] = True
    if loader.num_workers > 0 and not loader.persistent_workers:
        changed["persistent_workers"] = True
    return changed


def _level_choice(name: str, config: PerformanceConfig, *, value: bool) -> Choice:
    return Choice(name=name, value=value, reason=f"level {config.optimization_level}", automatic=True)
