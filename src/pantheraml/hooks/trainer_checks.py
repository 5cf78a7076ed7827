"""Assumptions of transformers' `Trainer` that do not hold for our models.

A model loaded without adapters is frozen. With activation checkpointing the trainer would run to its end, with a
gradient norm of 0, and train nothing. A model in fp16 on a CPU was loaded to generate or to be saved.

With several visible GPUs in one process the trainer wraps the model in `nn.DataParallel`, raises the batch size to
match, and divides losses accordingly. Replicas of fused layers would use the original's weights.

TRL's `RewardTrainer` trains a model with one output per sequence; its own error does not say how to load one. A new
head that nothing trains stays random.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from pantheraml.base import log
from pantheraml.base.errors import ConfigError, DeviceError
from pantheraml.hooks.library_patch import LibraryPatch
from pantheraml.models.causal_lm import fast_model
from pantheraml.models.classifier import FastClassifier, check_head_is_trained

logger = log.get(__name__)


def check_trainable_dtype(model: nn.Module) -> None:
    """Refuse to train a model in fp16 on a CPU, where no trainer scales the loss and small gradients become 0."""
    halves = (parameter for parameter in model.parameters() if parameter.dtype == torch.float16)
    if (found := next(halves, None)) is not None and found.device.type == "cpu":
        raise DeviceError(
            "fp16 training needs a GPU, and this model is in fp16 on a CPU.",
            fix="Load it with dtype=torch.float32 or torch.bfloat16 to train it. For 16-bit weights in fp16, load the "
            "trained adapter with dtype=torch.float16 and call save_pretrained_merged.",
        )


def _if_trainable(train: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(train)
    def checked_train(self: Any, *args: Any, **kwargs: Any) -> Any:
        model = self.model
        if fast_model(model) is not None and not any(parameter.requires_grad for parameter in model.parameters()):
            raise ConfigError(
                "The trainer has nothing to train: every weight of the model is frozen.",
                fix="Add adapters with FastLanguageModel.get_peft_model(model) or the trainer's peft_config, or load "
                "the model with full_finetuning=True.",
            )
        if (fast := fast_model(model)) is not None:
            check_trainable_dtype(model)
            check_head_is_trained(fast)
        return train(self, *args, **kwargs)

    return checked_train


def _on_one_gpu(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def init_on_one_gpu(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        gpus = self.args.n_gpu
        if gpus > 1 and fast_model(self.model) is not None:
            # As the trainer itself does for a model that is spread over GPUs; only the batch size was derived from it.
            self.args._n_gpu = 1
            self._train_batch_size = self.args.train_batch_size
            logger.warning(
                "training on one of %d visible GPUs; to use all, pass enable_multi_gpu=True to from_pretrained, or "
                "start the script with torchrun --nproc-per-node %d",
                gpus,
                gpus,
            )

    return init_on_one_gpu


def _of_a_classifier(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def init_reward_trainer(self: Any, *args: Any, **kwargs: Any) -> None:
        model = args[0] if args else kwargs.get("model")
        fast = fast_model(model)
        if fast is not None and not isinstance(fast, FastClassifier):
            raise ConfigError(
                f"RewardTrainer needs a classifier with one output, and this is a {type(fast).__name__}.",
                fix="Load it with FastLanguageModel.from_pretrained(name, num_labels=1).",
            )
        init(self, *args, **kwargs)

    return init_reward_trainer


REQUIRE_TRAINABLE = LibraryPatch(
    library="transformers",
    versions=">=5.17,<5.23",
    module="transformers.trainer",
    class_name="Trainer",
    name="train",
    make=_if_trainable,
    fallback="a trainer does not notice that every weight is frozen",
    required=False,
)
ONE_GPU = LibraryPatch(
    library="transformers",
    versions=">=5.17,<5.23",
    module="transformers.trainer",
    class_name="Trainer",
    name="__init__",
    make=_on_one_gpu,
    fallback="with several visible GPUs, a trainer uses nn.DataParallel, which our models reject",
    required=False,
)
REWARD_MODEL = LibraryPatch(
    library="trl",
    versions=">=1.15,<1.17",
    module="trl.trainer.reward_trainer",
    class_name="RewardTrainer",
    name="__init__",
    make=_of_a_classifier,
    fallback="RewardTrainer itself rejects causal models",
    required=False,
)
