"""Generate with an adapter from a folder, or without any, and leave the model as it was.

The adapter is added beside the one that is trained, used alone, and removed again. Fused layers notice that another
adapter is active, or none, and run PEFT's own layers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from peft import inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers import PreTrainedModel

from pantheraml.base.errors import ConfigError, ModelError
from pantheraml.models.adapter_file import ADAPTER_ERRORS, read_adapter
from pantheraml.models.adapter_patterns import require_bounded
from pantheraml.models.adapters import name_in_file, prepare_config

_NAME = "requested"
_PREFIX = "base_model.model."
"""PEFT's names of weights are those in a PeftModel."""


@contextlib.contextmanager
def adapters_disabled(model: nn.Module) -> Iterator[None]:
    """While active, only base weights are used. PEFT's own context manager would also change `requires_grad`."""
    layers = [layer for layer in model.modules() if isinstance(layer, BaseTunerLayer)]
    before = [layer._disable_adapters for layer in layers]
    if any(layer.merged for layer in layers):
        raise ConfigError("The adapter is merged into the base weights.", fix="Call model.unmerge_adapter() first.")
    try:
        for layer in layers:
            layer._disable_adapters = True
        yield
    finally:
        for layer, disabled in zip(layers, before, strict=True):
            layer._disable_adapters = disabled


@contextlib.contextmanager
def requested_adapter(model: Any, request: Any, *, float32: bool = False) -> Iterator[None]:
    """While active, the model has the adapter in the folder `request.path`, and no other.

    `float32`: the adapter computes in float32, as in training; otherwise in the model's dtype.
    """
    folder = _folder(request)
    with _restored(model):
        _add(model, folder, float32=float32)
        for layer in model.modules():
            if isinstance(layer, BaseTunerLayer):
                layer._active_adapter, layer._disable_adapters = [_NAME], False
        yield


def _folder(request: Any) -> Path:
    path = getattr(request, "path", None) or getattr(request, "lora_path", None)
    if path is None:
        raise ConfigError(
            f"lora_request is a {type(request).__name__} without a path.",
            fix="Pass the result of model.load_lora(folder).",
        )
    return Path(path)


def _add(model: PreTrainedModel, folder: Path, *, float32: bool) -> None:
    config, weights = read_adapter(folder)
    if config.modules_to_save or config.trainable_token_indices:
        raise ConfigError(
            f"The adapter in {folder} also has whole modules (modules_to_save), which lora_request does not support.",
            fix="Load it with FastLanguageModel.from_pretrained(folder), and use model.generate.",
        )
    if config.target_parameters:
        raise ConfigError(
            f"The adapter in {folder} adapts stacked experts (target_parameters), which lora_request does not support.",
            fix="Load it with FastLanguageModel.from_pretrained(folder), and use model.generate.",
        )
    config.inference_mode, config.base_model_name_or_path = True, None
    prepare_config(model, config)
    require_bounded(config, [name for name, _ in model.named_modules()], folder)
    with torch.random.fork_rng(devices=[]):
        try:
            inject_adapter_in_model(config, model, _NAME)
        except ADAPTER_ERRORS as err:
            raise ModelError(
                f"The adapter in {folder} does not fit this model: {err}",
                fix="Use the base model that the adapter was trained on.",
            ) from err
    added = {
        _PREFIX + name_in_file(name, _NAME): parameter
        for name, parameter in model.named_parameters()
        if f".{_NAME}" in name
    }
    if {name: w.shape for name, w in added.items()} != {name: w.shape for name, w in weights.items()}:
        raise ModelError(
            f"The adapter in {folder} does not fit this model: the names or shapes of its weights differ.",
            fix="Use the base model that the adapter was trained on.",
        )
    for name, parameter in added.items():
        if float32:
            parameter.data = parameter.data.float()  # before it gets values that would be rounded
        parameter.data.copy_(weights[name])


@contextlib.contextmanager
def _restored(model: Any) -> Iterator[None]:
    """Remove the added adapter on exit, with the layers made for it; restore what is active and what is trainable."""
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, LoraLayer)}
    states = {name: (layer._active_adapter, layer._disable_adapters) for name, layer in layers.items()}
    if any(layer.merged for layer in layers.values()):
        raise ConfigError("The adapter is merged into the base weights.", fix="Call model.unmerge_adapter() first.")
    trainable = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    modes = [(module, module.training) for module in model.modules()]
    configs = vars(model).pop("peft_config", None)  # PEFT would add the new one to it, and warn
    try:
        yield
    finally:
        for name, layer in list(model.named_modules()):
            if isinstance(layer, LoraLayer) and name not in layers:
                model.set_submodule(name, layer.get_base_layer())
        for name, layer in layers.items():
            layer._active_adapter, layer._disable_adapters = states[name]
            if _NAME in layer.scaling:
                layer.delete_adapter(_NAME)
        vars(model).pop("peft_config", None)
        if configs is not None:
            model.peft_config = configs
        for parameter, requires_grad in trainable:
            parameter.requires_grad_(requires_grad)
        for module, training in modes:
            module.training = training
