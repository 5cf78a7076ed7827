"""The optimizer of a run, and its state as named tensors that a checkpoint can hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from pantheraml.base.errors import CheckpointError
from pantheraml.engine.adamw8bit import AdamW8bit
from pantheraml.specs.train import TrainSettings

NamedParameters = Sequence[tuple[str, nn.Parameter]]
SEPARATOR = "::"


def build_optimizer(parameters: NamedParameters, settings: TrainSettings) -> Optimizer:
    decayed = [p for _, p in parameters if p.ndim >= 2]
    plain = [p for _, p in parameters if p.ndim < 2]  # biases and norms: decay would pull them to zero for no reason
    groups = [
        {"params": group, "weight_decay": decay}
        for group, decay in ((decayed, settings.weight_decay), (plain, 0.0))
        if group
    ]
    betas = (settings.beta1, settings.beta2)
    if settings.optimizer == "adamw8bit":
        return AdamW8bit(groups, lr=settings.learning_rate, betas=betas, eps=settings.eps)
    return AdamW(groups, lr=settings.learning_rate, betas=betas, eps=settings.eps, fused=True)


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
        keep_on_host = key == "step" and isinstance(optimizer, AdamW8bit)
        optimizer.state[parameter][key] = tensor.clone() if keep_on_host else tensor.to(parameter.device, copy=True)


def total_norm(parameters: NamedParameters) -> Tensor:
    gradients = [p.grad for _, p in parameters if p.grad is not None]
    return torch.nn.utils.get_total_norm(gradients)


def clip(parameters: NamedParameters, norm: Tensor, limit: float) -> None:
    if limit > 0:
        torch.nn.utils.clip_grads_with_norm_([p for _, p in parameters], limit, norm)
