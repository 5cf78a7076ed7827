"""Settings of `enable_multi_gpu` for the trainers of transformers and TRL that a script makes afterwards.

    batch_size_per_gpu       `per_device_train_batch_size` of each trainer
    gradient_aggregation     how the gradients of the ranks become one (`trainer_aggregation`); the mean is DDP's own

One patch, of `Trainer.__init__`, and only if one of them is requested. A trainer takes the settings when it is made and
keeps them: `disable` changes those made later. This module does not import torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pantheraml.base import log
from pantheraml.base.errors import ConfigError
from pantheraml.hooks.library_patch import LibraryPatch
from pantheraml.hooks.registry import REGISTRY
from pantheraml.specs.aggregation import Method, check_method, parse_method

logger = log.get(__name__)


@dataclass(frozen=True)
class MultiGPUSettings:
    batch_size_per_gpu: int | None = None
    """None: as each trainer's arguments say."""
    gradient_aggregation: Method = "mean"
    aggregation_weights: tuple[float, ...] | None = None

    @property
    def patches_trainers(self) -> bool:
        return self.batch_size_per_gpu is not None or self.gradient_aggregation != "mean"

    def check_ranks(self, ranks: int) -> None:
        check_method(self.gradient_aggregation, ranks, self.aggregation_weights)

    def __str__(self) -> str:
        words = [f"gradient aggregation {self.gradient_aggregation}"]
        if self.batch_size_per_gpu is not None:
            words.insert(0, f"{self.batch_size_per_gpu} samples per GPU and pass")
        return ", ".join(words)


def make_settings(
    batch_size_per_gpu: int | None, gradient_aggregation: str, aggregation_weights: Sequence[float] | None
) -> MultiGPUSettings:
    if batch_size_per_gpu is not None and (type(batch_size_per_gpu) is not int or batch_size_per_gpu < 1):
        raise ConfigError(
            f"batch_size_per_gpu={batch_size_per_gpu!r} is not a positive integer.",
            fix="Pass the samples of a forward pass on each GPU, or None for each trainer's own.",
        )
    method = parse_method(gradient_aggregation)
    if method == "weighted" and aggregation_weights is None:
        logger.info("gradient aggregation weighted without aggregation_weights: by tokens, which is the mean")
        method = "mean"
    weights = None if aggregation_weights is None else tuple(aggregation_weights)
    check_method(method, len(weights) if weights is not None else 3, weights)  # the number of ranks comes later
    return MultiGPUSettings(batch_size_per_gpu, method, weights)


class _Current:
    """The settings in force, and whether they were announced."""

    def __init__(self) -> None:
        self.settings: MultiGPUSettings | None = None
        self.announced: str | None = None


_CURRENT = _Current()


def current() -> MultiGPUSettings | None:
    return _CURRENT.settings


def require_supported(settings: MultiGPUSettings) -> None:
    """Raise ConfigError if the installed transformers is not one that the settings can be applied to."""
    if settings.patches_trainers:
        TRAINER_SETTINGS.require_version()


def apply(settings: MultiGPUSettings) -> None:
    """Apply `settings`, replacing earlier ones; idempotent."""
    if settings.patches_trainers:
        REGISTRY.apply_on_import(TRAINER_SETTINGS)
    else:
        REGISTRY.revert(TRAINER_SETTINGS)
    _CURRENT.settings = settings


def revert() -> None:
    REGISTRY.revert(TRAINER_SETTINGS)
    _CURRENT.settings = _CURRENT.announced = None


def announce(what: str) -> None:
    """Log, once per process and text, that several GPUs are used; only rank 0 prints what is logged."""
    if _CURRENT.announced != what:
        _CURRENT.announced = what
        logger.info("Multi-GPU training enabled: %s", what)


def _with_settings(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def init_trainer(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        settings = _CURRENT.settings
        if settings is None:  # reverted, but another library has wrapped this function
            return
        if settings.batch_size_per_gpu is not None:
            _set_batch_size(self, settings.batch_size_per_gpu)
        own = getattr(self, "own_aggregation", None)
        if settings.gradient_aggregation != "mean" and own is not None and not own.is_mean:
            logger.info("gradients are combined as the trainer's multi_gpu_config says, not as enable_multi_gpu does")
        elif settings.gradient_aggregation != "mean":
            from pantheraml.hooks.trainer_aggregation import aggregate_gradients

            aggregate_gradients(self, settings.gradient_aggregation, settings.aggregation_weights)

    return init_trainer


def _set_batch_size(trainer: Any, size: int) -> None:
    args = trainer.args
    given = args.per_device_train_batch_size
    if given == size:
        return
    if hasattr(args, "generation_batch_size"):
        raise ConfigError(
            f"{type(args).__name__} derives its generation batches from per_device_train_batch_size={given}, which"
            f" batch_size_per_gpu={size} would change.",
            fix=f"Pass per_device_train_batch_size={size} to {type(args).__name__}, or remove batch_size_per_gpu.",
        )
    args.per_device_train_batch_size = size
    trainer._train_batch_size = args.train_batch_size
    logger.warning(
        "per_device_train_batch_size is %d, as enable_multi_gpu says, not %d: a step has %d samples",
        size,
        given,
        size * args.gradient_accumulation_steps * args.world_size,
    )


TRAINER_SETTINGS = LibraryPatch(
    library="transformers",
    versions=">=5.17,<5.23",
    module="transformers.trainer",
    class_name="Trainer",
    name="__init__",
    make=_with_settings,
    fallback="enable_multi_gpu works without batch_size_per_gpu, and with gradient_aggregation='mean'",
)
