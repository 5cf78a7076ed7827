"""Causal language models that any trainer can train without full logits in memory.

`make_fast(model)` changes the instance's class to a subclass of its own class with the same name and signature; only
`forward` differs:

- in training, with `labels`: `loss` is computed from the hidden states, and `logits` only if they are read. The loss
  follows transformers' definition (shift, -100, `num_items_in_batch`), so any trainer that reads `loss` can use it.
- with `fused_lm_head=True`, which is how TRL requests token scores: `TokenScoreOutput`.
- otherwise (evaluation, generation, no labels, a non-linear head): transformers' own forward.

Where few tokens have a label (masked prompts), the head runs on those alone; where nearly all have one, on all. That
choice needs the label count on the host. Labels without a known host copy are copied before the body is launched and
counted after, so that the GPU never waits.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, cast

from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import ModelOutput

from pantheraml.base import log
from pantheraml.base.errors import UnsupportedModelError
from pantheraml.kernels.token_scores import DeferredGrad
from pantheraml.models.async_scalars import (
    host_values,
    known_host_copy,
    mirror_metrics_on_host,
    mirror_on_host,
    start_host_copy,
)
from pantheraml.models.chat_inputs import ChatInputsMixin
from pantheraml.models.derived_class import RuntimeSubclass
from pantheraml.models.families import head_loss, head_scores, is_plain_layer, plain_head
from pantheraml.models.fast_generate import FastGenerateMixin
from pantheraml.models.loss_output import LossOutput, with_logits_on_demand
from pantheraml.models.module_walk_cache import CachedModuleWalk, every_module
from pantheraml.models.quantize.quantized_linear import plain_state, quant_formats_of
from pantheraml.models.rope_scaling import RopeChange
from pantheraml.models.router_loss import router_loss_of
from pantheraml.models.saving.methods import SavingMethods
from pantheraml.models.trained_copies import forward_module
from pantheraml.models.unpadded import without_padding

logger = log.get(__name__)

_FOR_THE_LOSS = ("labels", "shift_labels", "num_items_in_batch")
_NEEDS_LOGITS = ("logits_to_keep", "output_router_logits", "ignore_index")
"""Arguments that change the logits or the loss; with any of these, transformers' own forward runs."""


@dataclass
class TokenScoreOutput(ModelOutput):
    """Per-token scores of the next-token labels, 0 where the label is -100. TRL reads these field names."""

    loss: Tensor | None = None
    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    is_top1: Tensor | None = None
    mean_logits: Tensor | None = None
    """Mean of the logits over the vocabulary."""
    label_mask: Tensor | None = None
    aux_loss: Tensor | None = None
    """Router loss of a mixture of experts, if router logits were requested; `loss` includes it times its
    coefficient."""


class FastCausalLM(RuntimeSubclass, SavingMethods, CachedModuleWalk, ChatInputsMixin, FastGenerateMixin):
    """Common part of the subclasses; `fast_class` adds `forward`."""

    max_seq_length: int | None = None
    """Length that the model was loaded for; None: not given."""
    rope: RopeChange | None = None
    """RoPE that the model was loaded with, if it is not that of its config.json; saved with adapters."""
    requested_checkpointing: str | bool = False
    """`use_gradient_checkpointing` of `from_pretrained`, for adapters that are added without one."""
    after_forward: Callable[[], None] | None = None
    """Host work to do once a training forward is queued on the GPU, before anything waits for it."""
    on_adapters: Callable[[FastCausalLM, PeftModel], None] | None = None
    """Called when PEFT itself has added adapters to train: see `hooks.peft`."""
    why_not_packed: str | None = None
    """Why packed rows are an error; None: they are supported."""
    packed_within: int | None = None
    """Length of the longest document up to which packed rows are supported, even if `why_not_packed` is set."""
    scores_no_padding: bool = False
    """Whether the trainer's labels are -100 wherever the mask is 0: token scores are then computed without padding."""
    score_temperature: float = 1.0
    """Temperature by which token scores divide the logits; the loss of `labels` does not."""
    new_weights: Collection[str] = ()
    """Weights that the checkpoint did not have, and which are random: a classifier's head."""
    has_reference_copy: bool = False
    """Whether the adapter `ref` is a copy that a trainer has made for its reference pass."""
    trains_in_full: bool = False
    """Whether the model was loaded to train every weight, without adapters."""
    _foreign_head: Callable[..., Any] | None = None
    _altered_logits: str | None = None
    _generates = True
    _checkpointing: str | None = None

    def why_full_logits(self) -> str | None:
        """Return why the loss currently needs full logits, or None."""
        head = forward_module(cast(PreTrainedModel, self).get_output_embeddings())
        if not is_plain_layer(head):  # PEFT may have added an adapter
            return f"the output head is not a plain linear layer but {type(head).__name__}"
        return self._altered_logits

    def has_head_bias(self) -> bool:
        head = forward_module(cast(PreTrainedModel, self).get_output_embeddings())
        return getattr(head, "bias", None) is not None

    def keep_foreign_head(self) -> None:
        """Remember that the instance's `forward` is a trainer's, for `remove_foreign_head`."""
        self._foreign_head = vars(self)["forward"]

    def has_foreign_head(self) -> bool:
        return self._foreign_head is not None

    def remove_foreign_head(self) -> None:
        """Remove the `forward` that an earlier trainer left, unless something else has wrapped it since."""
        if self._foreign_head is not None and vars(self).get("forward") is self._foreign_head:
            del self.forward  # type: ignore[attr-defined]
            self._foreign_head = None

    def lock_checkpointing(self, mode: str) -> None:
        """Ignore later requests of a trainer to change activation checkpointing from `mode`."""
        self._checkpointing = mode

    def gradient_checkpointing_enable(
        self, gradient_checkpointing_kwargs: dict[str, Any] | None = None, *args: Any, **kwargs: Any
    ) -> None:
        if self._checkpointing is not None:
            if not self._set_checkpointed(True):
                logger.info(
                    "activation checkpointing is already on (%s); ignoring the trainer's setting", self._checkpointing
                )
            return
        settings = gradient_checkpointing_kwargs or {}
        if settings.get("use_reentrant"):
            # transformers' trainer sets find_unused_parameters for PEFT models, and then DDP fails with reentrant
            # checkpointing ("marked ready only once"). The gradients are the same.
            logger.info("using non-reentrant activation checkpointing: DDP fails with use_reentrant=True")
        super().gradient_checkpointing_enable({**settings, "use_reentrant": False}, *args, **kwargs)  # type: ignore[misc]

    def gradient_checkpointing_disable(self) -> None:
        """Disable activation checkpointing, as trainers do for passes without gradients, until it is enabled again.

        A locked mode is only suspended: transformers would also replace its functions.
        """
        if self._checkpointing is None:
            super().gradient_checkpointing_disable()  # type: ignore[misc]
        else:
            self._set_checkpointed(False)

    def _set_checkpointed(self, on: bool) -> bool:
        """Resume or suspend the locked mode; return whether that changed anything."""
        layers = [m for m in every_module(cast(nn.Module, self)) if isinstance(m, GradientCheckpointingLayer)]
        changed = any(layer.gradient_checkpointing != on for layer in layers)
        for layer in layers:
            layer.gradient_checkpointing = on
        return changed

    def _replicate_for_data_parallel(self) -> Any:
        raise UnsupportedModelError(
            "nn.DataParallel does not support this model: replicas of fused layers would use the original's weights.",
            fix="Run one process per GPU: pass enable_multi_gpu=True to from_pretrained, or start with torchrun.",
        )

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """Save a plain Hugging Face folder: quantized weights are dequantized."""
        if kwargs.get("state_dict") is None:
            kwargs["state_dict"] = plain_state(self)
            for quant_format in quant_formats_of(cast(nn.Module, self)):
                logger.warning("weights were quantized to %s and are saved dequantized", quant_format)
        super().save_pretrained(save_directory, *args, **kwargs)  # type: ignore[misc]

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        model = cast(PreTrainedModel, self)
        if getattr(model, "is_loaded_in_4bit", False):  # transformers counts bitsandbytes weights twice
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


def make_fast(model: PreTrainedModel) -> FastCausalLM:
    """Change `model` in place, and return it."""
    head, reason = plain_head(model)
    kind: Any = type(model)
    model.__class__ = fast_class(kind, FastCausalLM)
    fast = cast(FastCausalLM, model)
    if head is None:
        logger.info("the loss needs full logits: %s", reason)
        fast._altered_logits = reason
    return fast


def fast_model(model: Any) -> FastCausalLM | None:
    """Return `model` or the base of its adapters; None if that is not a FastCausalLM."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    return inner if isinstance(inner, FastCausalLM) else None


@functools.cache
def fast_class(parent: Any, common: type[FastCausalLM]) -> type:
    # Keep the name: it goes into config.json ("architectures"), and trainers look it up.
    namespace: dict[str, Any] = {
        "__module__": parent.__module__,
        "__doc__": parent.__doc__,
        "forward": _forward(parent),
        "made_by": (fast_class, (parent, common)),
    }
    kinds = {parameter.kind for parameter in inspect.signature(parent.forward).parameters.values()}
    if inspect.Parameter.VAR_KEYWORD in kinds:
        # Vision-language models say no. Trainers would then average the means of passes and ranks instead of tokens.
        namespace["accepts_loss_kwargs"] = True
    return type(parent.__name__, (common, parent), namespace)


def _forward(parent: Any) -> Callable[..., Any]:
    signature = inspect.signature(parent.forward)
    names = list(signature.parameters)[1:]
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    takes_cache = "use_cache" in names or inspect.Parameter.VAR_KEYWORD in kinds

    def forward(self: Any, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        inputs = {**dict(zip(names, args, strict=False)), **kwargs}
        if self.why_not_packed is not None:
            _reject_packed_rows(inputs, self.why_not_packed, self.packed_within)
        if not fused_lm_head and not (self.training and _needs_only_loss(self, inputs)):
            documents = _has_positions_only(inputs) and (self.training or _is_packed(inputs))
            no_use = "use_cache" in names and not self._generates
            if takes_cache and (documents or no_use) and inputs.get("use_cache") is None:
                # transformers derives documents from positions only without a cache
                return parent.forward(self, **{**inputs, "use_cache": False})
            return parent.forward(self, *args, **kwargs)
        outputs = _token_scores(self, inputs) if fused_lm_head else _with_loss(self, inputs)
        if self.training and self.after_forward is not None:
            self.after_forward()
        return outputs

    # generate() and trainers read the signature. Not functools.wraps: accelerate unwraps by following `__wrapped__`,
    # and would remove ours.
    forward.__signature__ = signature  # type: ignore[attr-defined]
    forward.__doc__ = parent.forward.__doc__
    return forward


def _reject_packed_rows(inputs: dict[str, Any], reason: str, within: int | None) -> None:
    """Raise for packed rows, except those whose documents are all at most `within` tokens long."""
    if _is_packed(inputs) and (within is None or int(host_values(inputs["position_ids"]).max()) >= within):
        raise UnsupportedModelError(
            f"The trainer packs several documents into a row, but {reason}.",
            fix="Set packing=False and padding_free=False in the trainer's config.",
        )


def _is_packed(inputs: dict[str, Any]) -> bool:
    """Return whether positions restart within a row without a mask: the trainer packed it, or is padding-free."""
    return _has_positions_only(inputs) and bool((host_values(inputs["position_ids"]).diff(dim=-1) != 1).any())


def _has_positions_only(inputs: dict[str, Any]) -> bool:
    others = ("attention_mask", "past_key_values")
    return isinstance(inputs.get("position_ids"), Tensor) and all(inputs.get(name) is None for name in others)


def _needs_only_loss(model: Any, inputs: dict[str, Any]) -> bool:
    """Return whether the caller needs a loss and nothing that requires full logits."""
    if all(inputs.get(name) is None for name in ("labels", "shift_labels")) or model.why_full_logits() is not None:
        return False
    if _is_hooked(model.get_output_embeddings()):
        return False
    needs_logits = any(isinstance(inputs.get(name), Tensor) or inputs.get(name) for name in _NEEDS_LOGITS)
    routed = getattr(model.config.get_text_config(), "output_router_logits", False)
    return not (needs_logits or routed or inputs.get("return_dict") is False)


def _is_hooked(head: nn.Module) -> bool:
    """Return whether a script has hooks on the output head, which only a forward that computes the logits calls."""
    hooked = (head, forward_module(head))
    kinds = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    hooks = (hook for module in hooked for kind in kinds for hook in getattr(module, kind).values())
    return any(not str(getattr(hook, "__module__", None)).startswith(_NOT_OF_SCRIPTS) for hook in hooks)


_NOT_OF_SCRIPTS = ("pantheraml.", "torch.")
"""Modules of hooks that casts of a trained copy and FSDP use."""


class _Targets:
    """Token that each position is to predict; -100 for none.

    Created before the body runs, while the GPU is idle, so only the host copy is started then. The rest is done once
    the GPU is busy.
    """

    def __init__(self, inputs: dict[str, Any]) -> None:
        shifted: Tensor | None = inputs.get("shift_labels")
        self._are_shifted = shifted is not None
        self._given: Tensor = inputs["labels"] if shifted is None else shifted
        known = known_host_copy(self._given)
        self._read = start_host_copy(self._given) if known is None else lambda: known

    def labels(self) -> Tensor:
        return self._given if self._are_shifted else nn.functional.pad(self._given[..., 1:], (0, 1), value=-100)

    def count(self) -> int:
        """Return the number of targets; may wait for the host copy, but for nothing else."""
        read = self._read()
        return int(((read if self._are_shifted else read[..., 1:]) >= 0).sum())


def _divisor(inputs: dict[str, Any], labels: Tensor) -> Tensor | float:
    """Return the divisor of the summed loss: the targets here, or those of all micro-batches of the step."""
    count = inputs.get("num_items_in_batch")
    if count is None:
        return (labels >= 0).sum()
    return count.to(labels.device) if isinstance(count, Tensor) else cast(float, count)


def _body_outputs(model: Any, inputs: dict[str, Any]) -> Any:
    inputs = {name: value for name, value in inputs.items() if name not in _FOR_THE_LOSS}
    if inputs.get("past_key_values") is None:
        inputs["use_cache"] = False  # a loss needs no keys and values
    return model.base_model(**inputs)


def _with_loss(model: Any, inputs: dict[str, Any]) -> LossOutput:
    targets = _Targets(inputs)
    outputs = _body_outputs(model, inputs)
    hidden = outputs.last_hidden_state
    labels = targets.labels().to(hidden.device)
    head = forward_module(model.get_output_embeddings())
    total = head_loss(head, hidden, labels, targets.count())
    output = LossOutput(
        loss=mirror_on_host(total / _divisor(inputs, labels)),
        past_key_values=outputs.past_key_values,
        hidden_states=outputs.hidden_states,
        attentions=outputs.attentions,
    )
    return with_logits_on_demand(output, head, hidden)


def _token_scores(model: Any, inputs: dict[str, Any]) -> TokenScoreOutput:
    """Return scores in TRL's shape: one column fewer than the labels, because the first token is no target."""
    reason = model.why_full_logits()
    if reason is not None:
        raise UnsupportedModelError(
            f"This model cannot compute token scores without full logits: {reason}.",
            fix="Call the model for logits, and compute the scores from them.",
        )
    targets = _Targets(inputs)
    routed = inputs.get("output_router_logits")
    if routed is None and getattr(model.config.get_text_config(), "output_router_logits", False):
        routed = inputs["output_router_logits"] = True
    unpadded = without_padding(model, inputs) if model.scores_no_padding else None
    outputs = _body_outputs(model, inputs if unpadded is None else unpadded.inputs)
    hidden = outputs.last_hidden_state
    labels = targets.labels().to(hidden.device)
    if model.score_temperature != 1.0:
        hidden = hidden / model.score_temperature
    deferred, head = DeferredGrad(), forward_module(model.get_output_embeddings())
    if unpadded is None:
        scores = head_scores(head, hidden, labels, targets.count(), deferred)
    else:
        scores = head_scores(head, unpadded.rows(hidden), unpadded.take(labels), targets.count(), deferred)
        scores = unpadded.put_back(scores, labels.shape)
    # Sliced here rather than from the hidden states, which would copy them.
    last = None if inputs.get("shift_labels") is not None else -1
    loss, aux_loss = -scores.log_probs.sum() / _divisor(inputs, labels), None
    router_loss = router_loss_of(model) if routed and getattr(outputs, "router_logits", None) else None
    if router_loss is not None:
        aux_loss = router_loss.sums(outputs.router_logits, inputs.get("attention_mask")).loss()
        loss = loss + router_loss.coefficient * aux_loss.to(loss.device)
    loss = mirror_on_host(loss)
    log_probs = mirror_on_host(scores.log_probs[:, :last])
    others = scores.entropy, scores.is_top1, scores.mean_logits, labels >= 0
    metrics = [each[:, :last] for each in others]
    # TRL reads these before it starts the backward, while the GPU still has the rest of this forward to do.
    mirror_metrics_on_host(*metrics)
    mask = inputs.get("attention_mask")
    if isinstance(mask, Tensor) and mask.is_cuda and mask.shape == labels.shape and known_host_copy(mask) is None:
        mirror_metrics_on_host(mask)
    deferred.rows()
    return TokenScoreOutput(loss, log_probs, *metrics, aux_loss)
