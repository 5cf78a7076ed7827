"""`DeviceManager` and `ConfigManager`: the GPUs that are here, and settings for `enable_multi_gpu`. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pantheraml.base import log
from pantheraml.base.errors import ConfigError
from pantheraml.devices.probe import probe
from pantheraml.hooks.multi_gpu import make_settings
from pantheraml.planner.facts import model_facts
from pantheraml.planner.known_models import known_config
from pantheraml.planner.model_shapes import ModelShapes
from pantheraml.planner.script_config import choose_batch_size, choose_batch_size_of, parse_memory, parse_parameters
from pantheraml.specs.plan import GPU
from pantheraml.specs.train import ModelConfig

__all__ = ["ConfigManager", "DeviceManager"]

logger = log.get(__name__)

TEMPLATES: dict[str, dict[str, Any]] = {
    "default": {"num_gpus": None, "batch_size_per_gpu": None, "gradient_aggregation": "mean"},
    "low_memory": {"num_gpus": None, "batch_size_per_gpu": 1, "gradient_aggregation": "mean"},
    "robust": {"num_gpus": None, "batch_size_per_gpu": None, "gradient_aggregation": "median"},
}
"""Arguments of `enable_multi_gpu` by purpose."""


class DeviceManager:
    """Reads which GPUs are here."""

    def get_available_devices(self) -> list[GPU]:
        """Return index, name, memory and compute capability of every visible GPU, read anew; empty without any."""
        log.start_for_scripts()
        devices = probe()
        if devices.note is not None:
            logger.info("no GPU is available: %s", devices.note)
        return list(devices.gpus)


class ConfigManager:
    """Chooses and checks arguments of `enable_multi_gpu`."""

    def get_optimal_config(
        self,
        model_size: str | float,
        available_memory: str | float | None = None,
        *,
        load_in_4bit: bool = True,
        max_seq_length: int = 2048,
    ) -> dict[str, Any]:
        """Return the arguments of `enable_multi_gpu`: all GPUs, as many samples for each as fit, and the mean.

        `model_size`: a model's folder or name, whose memory the planner predicts; or parameters, as "7B" or a number,
        for a rule of thumb, see `planner.script_config`. `available_memory`: of each GPU, as "32GB" or bytes; None:
        that of the smallest visible GPU. OutOfMemoryError says what is missing if not even one sample fits.
        """
        shapes = _shapes(model_size)
        parameters = parse_parameters(model_size if shapes is None else shapes.parameters)
        if type(max_seq_length) is not int or max_seq_length < 1:
            raise ConfigError(
                f"max_seq_length={max_seq_length!r} is not a positive integer.",
                fix="Pass the number of tokens of the longest sequence, such as 2048.",
            )
        gpus = DeviceManager().get_available_devices()
        memory = _smallest(gpus) if available_memory is None else parse_memory(available_memory)
        found = None
        if shapes is not None:
            found = choose_batch_size_of(shapes, memory, four_bit=load_in_4bit, max_seq_length=max_seq_length)
        batch, reason = found or choose_batch_size(
            parameters, memory, four_bit=load_in_4bit, max_seq_length=max_seq_length
        )
        logger.info("batch_size_per_gpu is %d: %s", batch, reason)
        return {"num_gpus": len(gpus) or None, "batch_size_per_gpu": batch, "gradient_aggregation": "mean"}

    def get_template(self, name: str = "default") -> dict[str, Any]:
        """Return arguments of `enable_multi_gpu` for a purpose: default, low_memory or robust."""
        if name not in TEMPLATES:
            raise ConfigError(f"There is no template {name!r}.", fix=f"Use one of {', '.join(TEMPLATES)}.")
        return dict(TEMPLATES[name])

    def validate(self, config: Mapping[str, Any]) -> None:
        """Raise ConfigError unless `config` holds arguments of `enable_multi_gpu` with possible values."""
        known = (*TEMPLATES["default"], "aggregation_weights")
        unknown = sorted(set(config) - set(known))
        if unknown:
            raise ConfigError(
                f"enable_multi_gpu has no argument {unknown[0]!r}.", fix=f"Use some of {', '.join(known)}."
            )
        gpus = config.get("num_gpus")
        if gpus is not None and (type(gpus) is not int or gpus < 1):
            raise ConfigError(
                f"num_gpus={gpus!r} is not a positive integer.", fix="Pass 1 or more, or None for all GPUs."
            )
        settings = make_settings(
            config.get("batch_size_per_gpu"),
            config.get("gradient_aggregation", "mean"),
            config.get("aggregation_weights"),
        )
        if gpus is not None:
            settings.check_ranks(gpus)


def _smallest(gpus: list[GPU]) -> float:
    known = [gpu.total_bytes for gpu in gpus if gpu.total_bytes is not None]
    if not known:
        raise ConfigError(
            "There is no GPU whose memory could be measured.", fix='Pass available_memory, such as "32GB".'
        )
    return float(min(known))


def _shapes(model: str | float) -> ModelShapes | None:
    """Sizes of a model that is named or in a folder; None: a number of parameters, or not known."""
    if not isinstance(model, str) or not (known_config(model) or Path(model).is_dir()):
        return None
    return model_facts(ModelConfig(path=model)).shapes
