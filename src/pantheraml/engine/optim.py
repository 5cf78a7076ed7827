"""The optimizer of a run, and its state as named tensors that a checkpoint can hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from pantheraml.base.errors import CheckpointError
from pantheraml.engine.adamw import LeanAdamW, Moments
from pantheraml.engine.adamw_graph import GraphAdamW
from pantheraml.specs.train import TrainSettings

NamedParameters = Sequence[tuple[str, nn.Parameter]]
SEPARATOR = "::"

MOMENTS: Mapping[str, Moments] = {"adamw": "fp32", "adamw_bf16": "bf16", "adamw8bit": "8bit"}


def build_optimizer(parameters: NamedParameters, settings: TrainSettings, *, graph: bool = False) -> Optimizer:
    """`graph`: gradients will stay where they are, for steps to be recorded."""
    decayed = [p for _, p in parameters if p.ndim >= 2]
    plain = [p for _, p in parameters if p.ndim < 2]  # biases and norms: decay would pull them to zero for no reason
    groups = [
        {"params": group, "weight_decay": decay}
        for group, decay in ((decayed, settings.weight_decay), (plain, 0.0))
        if group
    ]
    betas = (settings.beta1, settings.beta2)
    moments = MOMENTS[settings.optimizer]
    if moments == "fp32" and all(p.dtype == torch.float32 for _, p in parameters):
        if graph:
            return GraphAdamW(groups, lr=settings.learning_rate, betas=betas, eps=settings.eps)
        return AdamW(groups, lr=settings.learning_rate, betas=betas, eps=settings.eps, fused=True)
    return LeanAdamW(
        groups, lr=settings.learning_rate, betas=betas, eps=settings.eps, moments=moments, seed=settings.seed
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
    """The inverse. Tensors keep their own dtype (Optimizer.load_state_dict would turn 8-bit states into floats)."""
    by_name = dict(parameters)
    for full_name, tensor in tensors.items():
        name, _, key = full_name.rpartition(SEPARATOR)
        if name not in by_name:
            raise CheckpointError(
                f"The checkpoint has optimizer state for `{name}`, which this run does not train.",
                todo="Resume with the configuration that wrote the checkpoint.",
            )
        parameter = by_name[name]
        # fused AdamW counts steps on the device; ours on the host, where reading the count does not wait for the GPU
        keep_on_host = key == "step" and isinstance(optimizer, LeanAdamW)
        state = optimizer.state[parameter]
        if key in state:  # where a recorded step reads it
            state[key].copy_(tensor)
        else:
            state[key] = tensor.clone() if keep_on_host else tensor.to(parameter.device, copy=True)


def clip_factor(norm: float, limit: float) -> float:
    """What brings `norm` down to `limit`; 1 if it is within, or the limit is 0."""
    return min(1.0, limit / (norm + 1e-6)) if limit > 0 else 1.0


def clip(optimizer: Optimizer, parameters: NamedParameters, norm: float, limit: float) -> None:
    """Have the next step see gradients of at most the norm `limit` (0: as they are); `norm` is what they have now."""
    factor = clip_factor(norm, limit)
    if isinstance(optimizer, LeanAdamW | GraphAdamW):
        optimizer.gradient_factor = factor
    elif factor < 1 and (gradients := [p.grad for _, p in parameters if p.grad is not None]):
        torch._foreach_mul_(gradients, factor)  # which takes no empty list, as a stage without adapters would have
