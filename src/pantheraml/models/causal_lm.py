"""A transformers model that any trainer can train without full logits in memory.

`make_fast(model)` turns the instance into one of a subclass made for its class: same name, same signature, same
everything, but for `forward`:

- while training, with `labels`: `loss` comes straight from the hidden states, and `logits` is None. The loss is as
  transformers defines it (shift, -100, `num_items_in_batch`), so any trainer that reads `loss` can use it.
- with `fused_lm_head=True`, the way in which TRL asks for token scores: `TokenScoreOutput`.
- in every other case (evaluation, generation, no labels, a head that is not plain): transformers' own forward.

Where few tokens have a label (prompts masked out), the head runs on those alone; where nearly all have one, on all. The
choice needs their count on the host. Labels that it does not remember are sent there before the body is queued on the
GPU and counted after, so that the GPU never waits for it.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import ModelOutput

from pantheraml.base import log
from pantheraml.base.errors import UnsupportedModelError
from pantheraml.kernels.token_scores import Later
from pantheraml.models.asked_each_step import AskedEachStep, every_module
from pantheraml.models.derived import Derived
from pantheraml.models.families import head_loss, head_scores, is_plain_layer, plain_head
from pantheraml.models.quantise.packed import packed_in, plain_state
from pantheraml.models.read_ahead import copy_ahead, metrics_ahead, on_host, read_ahead, remembered
from pantheraml.models.routing import balance_of

logger = log.get(__name__)

_FOR_THE_LOSS = ("labels", "shift_labels", "num_items_in_batch")
_NEEDS_LOGITS = ("logits_to_keep", "output_router_logits", "ignore_index")
"""Arguments that change what logits or loss are; whoever gives them gets transformers' own forward."""


@dataclass
class TokenScoreOutput(ModelOutput):
    """Of each next-token label: all fields are 0 where it is -100. The names are those that TRL reads."""

    loss: Tensor | None = None
    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    is_top1: Tensor | None = None
    label_mask: Tensor | None = None
    aux_loss: Tensor | None = None
    """Of a mixture of experts whose router logits were asked for; `loss` has it times its coefficient."""


class Starts(Protocol):
    """A pass, before the model is called: see `fast.early`."""

    def begin(self, ids: Tensor) -> None: ...


class FastCausalLM(Derived, AskedEachStep):
    """What the subclasses have in common; `_fast_class` adds `forward`."""

    meanwhile: Callable[[], None] | None = None
    """What the host is to do once a training pass is queued on the GPU, before anybody waits for it."""
    early: Starts | None = None
    why_not_packed: str | None = None
    """Why it is an error to put several documents into a row; None: it is none."""
    packed_within: int | None = None
    """Tokens of each up to which it is none, whatever `why_not_packed` says."""
    _altered_logits: str | None = None
    _checkpointing: str | None = None

    def expect(self, batch: Any) -> None:
        """A trainer is about to call the model with `batch`: what can be begun of that is."""
        if self.early is None or not isinstance(batch, Mapping) or batch.get("position_ids") is not None:
            return
        ids, mask = batch.get("input_ids"), batch.get("attention_mask")
        if isinstance(ids, Tensor) and ids.ndim == 2 and (mask is None or _hides_nothing(mask)):
            self.early.begin(ids)

    def why_full_logits(self) -> str | None:
        """Why the loss needs full logits now, or None if it does not."""
        head = cast(PreTrainedModel, self).get_output_embeddings()
        if not is_plain_layer(head):  # an adapter or a copy of PEFT's may have taken its place since
            return f"the output head is not a plain linear layer but {type(head).__name__}"
        return self._altered_logits

    def keep_checkpointing(self, mode: str) -> None:
        """From now on, what a trainer asks about activation checkpointing does not replace `mode`."""
        self._checkpointing = mode

    def gradient_checkpointing_enable(
        self, gradient_checkpointing_kwargs: dict[str, Any] | None = None, *args: Any, **kwargs: Any
    ) -> None:
        if self._checkpointing is not None:
            logger.info("activations are checkpointed already (%s), whatever the trainer asks", self._checkpointing)
            return
        asked = gradient_checkpointing_kwargs or {}
        if asked.get("use_reentrant"):
            # transformers' trainer has DDP look for unused parameters of PEFT models, and then the reentrant kind fails
            # ("marked ready only once"). The gradients are the same.
            logger.info("checkpointing does not re-enter autograd, though the trainer asks for that: DDP could not")
        super().gradient_checkpointing_enable({**asked, "use_reentrant": False}, *args, **kwargs)  # type: ignore[misc]

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """A plain folder, which needs nothing of ours: packed weights are written as packing left them."""
        if kwargs.get("state_dict") is None:
            kwargs["state_dict"] = plain_state(self)
            for packing in packed_in(cast(nn.Module, self)):
                logger.warning("weights were packed in %s, and are written as that left them", packing)
        super().save_pretrained(save_directory, *args, **kwargs)  # type: ignore[misc]

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        model = cast(PreTrainedModel, self)
        if getattr(model, "is_loaded_in_4bit", False):  # then bitsandbytes' weights count twice
            return int(super().num_parameters(only_trainable, exclude_embeddings))  # type: ignore[misc]
        holders = [module for module in every_module(model) if module._parameters]
        excluded = {id(module.weight) for module in holders if exclude_embeddings and isinstance(module, nn.Embedding)}
        counted = {
            id(parameter): parameter.numel()
            for module in holders
            for parameter in module._parameters.values()
            if parameter is not None and (parameter.requires_grad or not only_trainable)
        }
        return sum(count for key, count in counted.items() if key not in excluded)


def _hides_nothing(mask: Any) -> bool:
    """As far as the host knows."""
    if not isinstance(mask, Tensor):
        return False
    known = mask if mask.device.type == "cpu" else remembered(mask)
    return known is not None and bool(known.all())


def make_fast(model: PreTrainedModel) -> FastCausalLM:
    """Change `model` in place, and return it."""
    head, reason = plain_head(model)
    kind: Any = type(model)
    model.__class__ = _fast_class(kind)
    fast = cast(FastCausalLM, model)
    if head is None:
        logger.info("the loss needs full logits: %s", reason)
        fast._altered_logits = reason
    return fast


def fast_model(model: Any) -> FastCausalLM | None:
    """`model`, or what its adapters are on; None if that is not one of ours."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    return inner if isinstance(inner, FastCausalLM) else None


@functools.cache
def _fast_class(parent: type) -> type:
    # The name goes into config.json ("architectures") and into trainers' look-ups, so it stays.
    namespace = {
        "__module__": parent.__module__,
        "__doc__": parent.__doc__,
        "forward": _forward(parent),
        "made_by": (_fast_class, (parent,)),
    }
    return type(parent.__name__, (FastCausalLM, parent), namespace)


def _forward(parent: Any) -> Callable[..., Any]:
    signature = inspect.signature(parent.forward)
    names = list(signature.parameters)[1:]
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    takes_cache = "use_cache" in names or inspect.Parameter.VAR_KEYWORD in kinds

    def forward(self: Any, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        inputs = {**dict(zip(names, args, strict=False)), **kwargs}
        if self.why_not_packed is not None:
            _refuse_packed(inputs, self.why_not_packed, self.packed_within)
        if not fused_lm_head and not (self.training and _loss_alone(self, inputs)):
            documents = _positions_alone(inputs) and (self.training or _several_documents(inputs))
            if takes_cache and documents and inputs.get("use_cache") is None:
                # transformers looks for documents in positions only where there is no cache
                return parent.forward(self, **{**inputs, "use_cache": False})
            return parent.forward(self, *args, **kwargs)
        outputs = _scored(self, inputs) if fused_lm_head else _with_loss(self, inputs)
        if self.training and self.meanwhile is not None:
            self.meanwhile()
        return outputs

    # generate() and trainers read the signature. Not functools.wraps: accelerate undoes its own wrapping by following
    # `__wrapped__`, and would undo ours.
    forward.__signature__ = signature  # type: ignore[attr-defined]
    forward.__doc__ = parent.forward.__doc__
    return forward


def _refuse_packed(inputs: dict[str, Any], reason: str, within: int | None) -> None:
    if _several_documents(inputs) and (within is None or int(on_host(inputs["position_ids"]).max()) >= within):
        raise UnsupportedModelError(
            f"The trainer puts several documents into a row, but {reason}.",
            todo="Set packing=False and padding_free=False in the trainer's config.",
        )


def _several_documents(inputs: dict[str, Any]) -> bool:
    """Positions that restart within a row, and no mask: the trainer has packed it, or laid a batch end to end."""
    return _positions_alone(inputs) and bool((on_host(inputs["position_ids"]).diff(dim=-1) != 1).any())


def _positions_alone(inputs: dict[str, Any]) -> bool:
    others = ("attention_mask", "past_key_values")
    return isinstance(inputs.get("position_ids"), Tensor) and all(inputs.get(name) is None for name in others)


def _loss_alone(model: Any, inputs: dict[str, Any]) -> bool:
    """Whether the caller wants a loss and nothing that only full logits can give."""
    if all(inputs.get(name) is None for name in ("labels", "shift_labels")) or model.why_full_logits() is not None:
        return False
    asked = any(isinstance(inputs.get(name), Tensor) or inputs.get(name) for name in _NEEDS_LOGITS)
    routed = getattr(model.config.get_text_config(), "output_router_logits", False)
    return not (asked or routed or inputs.get("return_dict") is False)


class _Targets:
    """What each position is to predict: -100 where nothing.

    Made before the body runs, when the GPU has nothing else to do: then only what was given is sent to the host. All
    else can be done once the GPU is at work.
    """

    def __init__(self, inputs: dict[str, Any]) -> None:
        shifted: Tensor | None = inputs.get("shift_labels")
        self._are_shifted = shifted is not None
        self._given: Tensor = inputs["labels"] if shifted is None else shifted
        known = remembered(self._given)
        self._read = copy_ahead(self._given) if known is None else lambda: known

    def labels(self) -> Tensor:
        return self._given if self._are_shifted else nn.functional.pad(self._given[..., 1:], (0, 1), value=-100)

    def count(self) -> int:
        """How many there are; the host may have to wait for them, but only for them."""
        read = self._read()
        return int(((read if self._are_shifted else read[..., 1:]) >= 0).sum())


def _divisor(inputs: dict[str, Any], labels: Tensor) -> Tensor | float:
    """Of the summed loss: the targets here, or those of all micro-batches that make up a step."""
    told = inputs.get("num_items_in_batch")
    if told is None:
        return (labels >= 0).sum()
    return told.to(labels.device) if isinstance(told, Tensor) else cast(float, told)


def _body_outputs(model: Any, inputs: dict[str, Any]) -> Any:
    inputs = {name: value for name, value in inputs.items() if name not in _FOR_THE_LOSS}
    if inputs.get("past_key_values") is None:
        inputs["use_cache"] = False  # nobody asks a loss for keys and values
    return model.base_model(**inputs)


def _with_loss(model: Any, inputs: dict[str, Any]) -> CausalLMOutputWithPast:
    targets = _Targets(inputs)
    outputs = _body_outputs(model, inputs)
    hidden = outputs.last_hidden_state
    labels = targets.labels().to(hidden.device)
    total = head_loss(model.get_output_embeddings(), hidden, labels, targets.count())
    return CausalLMOutputWithPast(
        loss=read_ahead(total / _divisor(inputs, labels)),
        past_key_values=outputs.past_key_values,
        hidden_states=outputs.hidden_states,
        attentions=outputs.attentions,
    )


def _scored(model: Any, inputs: dict[str, Any]) -> TokenScoreOutput:
    """TRL's shape: one column less than the labels, because the first token is nobody's target."""
    reason = model.why_full_logits()
    if reason is not None:
        raise UnsupportedModelError(f"This model gives no token scores without full logits: {reason}.")
    targets = _Targets(inputs)
    asked = inputs.get("output_router_logits")
    if asked is None and getattr(model.config.get_text_config(), "output_router_logits", False):
        asked = inputs["output_router_logits"] = True
    outputs = _body_outputs(model, inputs)
    hidden = outputs.last_hidden_state
    labels = targets.labels().to(hidden.device)
    later = Later()
    scores = head_scores(model.get_output_embeddings(), hidden, labels, targets.count(), later)
    # Cut off here and not from the hidden states, which that would copy.
    last = None if inputs.get("shift_labels") is not None else -1
    loss, aux_loss = -scores.log_probs.sum() / _divisor(inputs, labels), None
    balance = balance_of(model) if asked and getattr(outputs, "router_logits", None) else None
    if balance is not None:
        aux_loss = balance.sums(outputs.router_logits, inputs.get("attention_mask")).loss()
        loss = loss + balance.coefficient * aux_loss.to(loss.device)
    loss = read_ahead(loss)
    log_probs = read_ahead(scores.log_probs[:, :last])
    metrics = scores.entropy[:, :last], scores.is_top1[:, :last], (labels >= 0)[:, :last]
    # What TRL reads before it begins on the backward pass; from there on the GPU has the rest of this one to do.
    metrics_ahead(*metrics)
    mask = inputs.get("attention_mask")
    if isinstance(mask, Tensor) and mask.is_cuda and mask.shape == labels.shape and remembered(mask) is None:
        metrics_ahead(mask)
    later.rows()
    return TokenScoreOutput(loss, log_probs, *metrics, aux_loss)
