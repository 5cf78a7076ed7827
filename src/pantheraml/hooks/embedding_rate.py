"""A separate learning rate for embeddings: continued pretraining uses one lower than the adapters'.

Embeddings are the input embedding, the output head, and modules that PEFT trains in full (`modules_to_save`).
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from pantheraml.base import log
from pantheraml.base.errors import ConfigError

logger = log.get(__name__)

_FULLY_TRAINED = "modules_to_save"
_USUAL_NAMES = ("embed_tokens", "lm_head")


def embedding_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the trainable parameters of embeddings. LoRA weights on an embedding are adapters, and not among them."""
    modules: list[Any] = []
    for name in ("get_input_embeddings", "get_output_embeddings"):
        getter = getattr(model, name, None)
        modules.append(getter() if getter is not None else None)
    own = {id(module.weight) for module in modules if getattr(module, "weight", None) is not None}
    return [
        (name, parameter)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and (id(parameter) in own or _is_embedding(name.split(".")))
    ]


def _is_embedding(parts: list[str]) -> bool:
    if any(part.startswith("lora_") for part in parts):
        return False
    return _FULLY_TRAINED in parts or any(part in _USUAL_NAMES for part in parts)


def set_embedding_rate(optimizer: Optimizer, model: nn.Module, rate: float) -> None:
    """Move embeddings of `optimizer` into param groups with learning rate `rate`; their other settings are kept."""
    embeddings = {id(parameter) for _, parameter in embedding_parameters(model)}
    if not embeddings:
        raise ConfigError(
            f"embedding_learning_rate={rate:g} is set, but no embedding is trained.",
            fix='Add "embed_tokens" and "lm_head" to modules_to_save or target_modules, or remove it.',
        )
    moved = []
    for group in optimizer.param_groups:
        chosen = [parameter for parameter in group["params"] if id(parameter) in embeddings]
        if chosen:
            group["params"] = [parameter for parameter in group["params"] if id(parameter) not in embeddings]
            moved.append({**{k: v for k, v in group.items() if k != "params"}, "params": chosen, "lr": rate})
    optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
    for group in moved:
        group.pop("initial_lr", None)
        optimizer.add_param_group(group)
    count = sum(len(group["params"]) for group in moved)
    logger.info("%d embedding weights have learning rate %g", count, rate)
