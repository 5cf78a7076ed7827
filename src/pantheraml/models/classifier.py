"""Classifiers of whole rows, such as reward models: a body as of a text model, and a head of few outputs.

The head scores the last token that is not padding, so the model must know the token that its tokenizer pads with.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn, cast

from transformers import PreTrainedModel

from pantheraml.base import log
from pantheraml.base.errors import ConfigError, UnsupportedModelError
from pantheraml.models.adapter_file import read_adapter
from pantheraml.models.causal_lm import FastCausalLM, fast_class
from pantheraml.models.model_kind import classifier_head
from pantheraml.models.trained_copies import CLASSIFIER_HEADS

logger = log.get(__name__)

_LABELS = ("num_labels", "id2label", "label2id", "problem_type")


def check_task(model: Any, task_type: str | None) -> None:
    """Refuse adapters of another task over a classifier."""
    if isinstance(model, FastClassifier) and task_type not in (None, "SEQ_CLS"):
        raise ConfigError(
            f"task_type={str(task_type)!r} does not fit a {type(model).__name__}.",
            fix='Set task_type="SEQ_CLS" in the LoraConfig.',
        )


def take_labels(arguments: dict[str, Any]) -> dict[str, Any]:
    """Remove a classifier's settings, named as in transformers' configs, and return those that are set."""
    return {name: value for name in _LABELS if (value := arguments.pop(name, None)) is not None}


class FastClassifier(FastCausalLM):
    """Refuses what needs a next token; training and saving are those of other fast models."""

    _generates = False

    def why_full_logits(self) -> str | None:
        return "a classifier has no output head"

    def generate(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse(self, "generate")

    def fast_generate(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse(self, "fast_generate")

    def save_pretrained_gguf(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse(self, "save_pretrained_gguf")

    def push_to_hub_gguf(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse(self, "push_to_hub_gguf")


def make_fast_classifier(model: PreTrainedModel) -> FastCausalLM:
    """Change `model` in place, and return it."""
    kind: Any = type(model)
    model.__class__ = fast_class(kind, FastClassifier)
    return cast(FastCausalLM, model)


def _refuse(model: Any, function: str) -> NoReturn:
    scores = f"A {type(model).__name__} scores text, and generates none"
    if "gguf" in function:
        raise UnsupportedModelError(
            f"{scores}: {function} writes causal language models only.", fix="Use save_pretrained_merged."
        )
    raise UnsupportedModelError(
        f"{scores}: there is no {function}.",
        fix="Call the model on the tokenizer's output, and read `logits`; or load it without num_labels and auto_model "
        "to generate.",
    )


def refuse_causal_trainer(model: Any, trainer: str) -> None:
    """Refuse a trainer of causal language models."""
    if isinstance(model, FastClassifier):
        raise ConfigError(
            f"{trainer} trains causal language models, and this is a {type(model).__name__}.",
            fix="Use TRL's RewardTrainer or transformers' Trainer, or load the model without num_labels.",
        )


def use_padding_of(tokenizer: Any, model: PreTrainedModel) -> None:
    """Let the model find the last token of a row that is not padding; the result is saved with it."""
    config = model.config.get_text_config()
    if tokenizer.pad_token_id in (None, config.pad_token_id):
        return
    if config.pad_token_id is not None:
        logger.info("pad_token_id is %d, as in the tokenizer, not %d", tokenizer.pad_token_id, config.pad_token_id)
    config.pad_token_id = tokenizer.pad_token_id


def check_head_is_trained(fast: FastCausalLM) -> None:
    """Refuse to train adapters under a head with random weights: it stays random, and is not saved with them."""
    if not fast.new_weights or any(p.requires_grad for m in classifier_head(fast) for p in m.parameters()):
        return
    head = ", ".join(sorted({name.rpartition(".")[0] for name in fast.new_weights}))
    raise ConfigError(
        f"The classifier's head ({head}) is new, with random weights, and is not trained.",
        fix=f'Set task_type="SEQ_CLS" in the LoraConfig, or modules_to_save={sorted(head.split(", "))}.',
    )


def labels_of_adapter(folder: Path) -> Mapping[str, Any] | None:
    """Return the number of labels that the adapter in `folder` was trained for; None if it is not for classifiers."""
    config, weights = read_adapter(folder)
    if config.task_type != "SEQ_CLS":
        return None
    heads = [w for name, w in weights.items() if any(part in CLASSIFIER_HEADS for part in name.split("."))]
    outputs = [weight for weight in heads if weight.ndim == 2]
    return {"num_labels": outputs[-1].shape[0]} if outputs else {}
