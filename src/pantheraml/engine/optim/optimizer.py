"""Optimizer construction, clipping, and optimizer state as named tensors for checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from pantheraml.base.errors import CheckpointError
from pantheraml.engine.optim.adamw import LeanAdamW, MomentFormat
from pantheraml.engine.optim.graph_adamw import GraphAdamW
from pantheraml.specs.train import TrainSettings

NamedParameters = Sequence[tuple[str, nn.Parameter]]
SEPARATOR = "::"

MOMENTS: Mapping[str, MomentFormat] = {"adamw": "fp32", "adamw_bf16": "bf16", "adamw8bit": "8bit"}


def build_optimizer(parameters: NamedParameters, settings: TrainSettings, *, graph: bool = False) -> Optimizer:
    """Build the optimizer. `graph`: gradients will have fixed addresses, so steps can be captured as CUDA graphs."""
    decayed = [p for _, p in parameters if p.ndim >= 2]
    plain = [p for _, p in parameters if p.ndim < 2]  # biases and norms: no weight decay
    groups = [
        {"params": group, "weight_decay": decay}
        for group, decay in ((decayed, settings.weight_decay), (plain, 0.0))
        if group
    ]
    betas = (settings.beta1, settings.beta2)
    moments = MOMENTS[settings.optimizer]
    if moments == "fp32" and all(p.dtype == torch.float32 for _, p in parameters):
        if graph:
            return GraphAdamW(groups, lr=settings.peak_learning_rate, betas=betas, eps=settings.eps)
        return AdamW(groups, lr=settings.peak_learning_rate, betas=betas, eps=settings.eps, fused=True)
    return LeanAdamW(
        groups, lr=settings.peak_learning_rate, betas=betas, eps=settings.eps, moments=moments, seed=settings.seed
    )


def set_learning_rate(optimizer: Optimizer, value: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = value


def optimizer_tensors(optimizer: Optimizer, parameters: NamedParameters) -> dict[str, Tensor]:
    """Optimizer state as `parameter name::state name` -> tensor."""
    return {
        f"{name}{SEPARATOR}{key}": value
        for name, parameter in parameters
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def load_optimizer_tensors(optimizer: Optimizer, parameters: NamedParameters, tensors: Mapping[str, Tensor]) -> None:
    """Load the result of `optimizer_tensors`. Keeps dtypes (Optimizer.load_state_dict casts 8-bit states to float)."""
    by_name = dict(parameters)
    for full_name, tensor in tensors.items():
        name, _, key = full_name.rpartition(SEPARATOR)
        if name not in by_name:
            raise CheckpointError(
                f"The checkpoint has optimizer state for `{name}`, which this run does not train.",
                fix="Resume with the configuration that wrote the checkpoint.",
            )
        parameter = by_name[name]
        # fused AdamW counts steps on the device, LeanAdamW on the host, where reading the count needs no sync
        keep_on_host = key == "step" and isinstance(optimizer, LeanAdamW)
        state = optimizer.state[parameter]
        if key in state:  # in place: a captured step reads it from this address
            state[key].copy_(tensor)
        else:
            state[key] = tensor.clone() if keep_on_host else tensor.to(parameter.device, copy=True)


def clip_factor(norm: float, limit: float) -> float:
    """Factor that brings `norm` down to `limit`; 1 if it is within, or the limit is 0."""
    return min(1.0, limit / (norm + 1e-6)) if limit > 0 else 1.0


def clip(optimizer: Optimizer, parameters: NamedParameters, norm: float, limit: float) -> None:
    """Clip the gradients for the next step to norm `limit` (0: no clipping); `norm`: their current norm."""
    factor = clip_factor(norm, limit)
    if isinstance(optimizer, LeanAdamW | GraphAdamW):
        optimizer.gradient_factor = factor
    elif factor < 1 and (gradients := [p.grad for _, p in parameters if p.grad is not None]):
        torch._foreach_mul_(gradients, factor)  # rejects an empty list, as of a stage without adapters
