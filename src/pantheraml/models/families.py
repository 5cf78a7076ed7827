"""Detect whether a model's logits are exactly `hidden states @ W.T + b`.

If so, the loss can be computed from hidden states in chunks, without full logits. Families differ (soft-capped, scaled,
truncated, adapted heads) and new ones appear, so this is not a list of names: the structure is read from the model,
which is then run on a few tokens with a replaced head output, to verify that nothing happens between body and head, or
after the head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from pantheraml.kernels.linear_cross_entropy import fp8_linear_cross_entropy, linear_cross_entropy
from pantheraml.kernels.token_scores import DeferredGrad, TokenScores, fp8_token_scores, token_scores
from pantheraml.models.eval_mode import eval_no_grad
from pantheraml.models.quantize.fp8 import FP8Linear
from pantheraml.parallel.device_map import only_aligns_devices
from pantheraml.parallel.vocabulary import is_vocab_parallel, sharded_head_loss

_PROBE_TOKENS = 5


@dataclass(frozen=True)
class PlainHead:
    """Logits are exactly the linear `layer` of `body(input_ids=..., position_ids=...).last_hidden_state`."""

    body: nn.Module
    layer: nn.Linear | FP8Linear

    def loss(self, hidden: Tensor, targets: Tensor, target_count: int | None = None) -> Tensor:
        """Summed cross entropy; `target_count`, if known, is the number of non-negative targets."""
        return head_loss(self.layer, hidden, targets, target_count)


def head_loss(layer: nn.Module, hidden: Tensor, targets: Tensor, target_count: int | None = None) -> Tensor:
    """Summed cross entropy of a plain linear head without full logits, on the device of `hidden`."""
    if isinstance(layer, nn.Linear) and is_vocab_parallel(layer):
        return sharded_head_loss(layer, hidden, targets, target_count)
    hidden_here, targets_here = hidden.to(_device(layer)), targets.to(_device(layer))
    if isinstance(layer, FP8Linear):
        loss = fp8_linear_cross_entropy(hidden_here, layer.qweight, layer.scale[0], targets_here, target_count)
    else:
        assert isinstance(layer, nn.Linear)
        loss = linear_cross_entropy(hidden_here, layer.weight, targets_here, layer.bias, target_count)
    return loss.to(hidden.device)


def head_scores(
    layer: nn.Module,
    hidden: Tensor,
    targets: Tensor,
    target_count: int | None = None,
    deferred: DeferredGrad | None = None,
) -> TokenScores:
    """Log-probability, entropy and rank of each target under a plain linear head, without full logits.

    On the device of `hidden`. Some gradients may be left to `deferred`.
    """
    hidden_here, targets_here = hidden.to(_device(layer)), targets.to(_device(layer))
    if isinstance(layer, FP8Linear):
        scores = fp8_token_scores(hidden_here, layer.qweight, layer.scale[0], targets_here, target_count, deferred)
    else:
        assert isinstance(layer, nn.Linear)
        scores = token_scores(hidden_here, layer.weight, targets_here, layer.bias, target_count)
    return TokenScores(*(score.to(hidden.device) for score in scores))


def _device(layer: nn.Module) -> torch.device:
    """Return the head's device; the model may be spread over several."""
    weight = layer.qweight if isinstance(layer, FP8Linear) else layer.weight
    assert isinstance(weight, Tensor)
    return weight.device


def is_plain_layer(layer: Any) -> bool:
    """Return whether the losses support this linear layer, with its forward unpatched (except to move inputs)."""
    if "forward" in vars(layer) and not only_aligns_devices(layer):
        return False
    return type(layer) is nn.Linear or (isinstance(layer, FP8Linear) and layer.shared_scale and layer.bias is None)


def head_of(model: nn.Module) -> PlainHead:
    """Return body and output layer of a model that `plain_head` has accepted."""
    whole: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    return PlainHead(getattr(whole, whole.base_model_prefix), whole.get_output_embeddings())


def vocabulary_of(model: nn.Module) -> int | None:
    """Return the vocabulary size; None if the config does not give it."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    size = getattr(text, "vocab_size", None)
    return size if isinstance(size, int) and size > 1 else None


def plain_head(model: nn.Module) -> tuple[PlainHead | None, str]:
    """Return body and head with the reason, or None and why full logits are needed."""
    whole: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    layer = whole.get_output_embeddings()
    if isinstance(layer, BaseTunerLayer):
        return None, "the output head has an adapter"
    if not is_plain_layer(layer):
        return None, f"the output head is not a plain linear layer but {type(layer).__name__}"
    body = getattr(whole, whole.base_model_prefix, None)
    if not isinstance(body, nn.Module) or body is whole or any(m is layer for m in body.modules()):
        return None, f"{type(whole).__name__} has no body apart from its output head"
    with eval_no_grad(model):
        reason = _probe_difference(model, body, layer)
    if reason is not None:
        return None, reason
    return PlainHead(body, layer), "logits are the hidden states times the output weight"


def _probe_difference(model: nn.Module, body: nn.Module, layer: nn.Linear | FP8Linear) -> str | None:
    """Run a few tokens; return what the model does besides body and head, or None."""
    device = _device(layer)
    ids = torch.arange(_PROBE_TOKENS, device=device)[None] % layer.out_features
    inputs = {"input_ids": ids, "position_ids": torch.arange(_PROBE_TOKENS, device=device)[None]}
    hidden = getattr(body(**inputs, use_cache=False), "last_hidden_state", None)
    if not isinstance(hidden, Tensor):
        return "the body returns no last_hidden_state"
    hidden = hidden.to(device)
    # Values up to 1e4 instead of the real output reveal a softcap or scale that is invisible on small logits.
    marked = torch.linspace(-1e4, 1e4, _PROBE_TOKENS * layer.out_features, device=device).to(hidden.dtype)
    marked = marked.view(1, _PROBE_TOKENS, layer.out_features)
    seen: list[Tensor] = []

    def mark(_layer: nn.Module, args: tuple[Tensor, ...], _output: Tensor) -> Tensor:
        seen.append(args[0].to(device))
        return marked

    handle = layer.register_forward_hook(mark)
    try:
        logits = model(**inputs, use_cache=False).logits
    finally:
        handle.remove()
    if len(seen) != 1 or seen[0].shape != hidden.shape:
        return "the output head does not see each hidden state once"
    # The same sums twice, which a GPU may accumulate in different orders. NaN weights give NaN on both sides, which the
    # training step reports.
    tolerance = 1e-5 if hidden.dtype == torch.float32 else 1e-2
    largest = float(hidden.nan_to_num(0.0, 0.0, 0.0).abs().max())
    if not torch.allclose(seen[0], hidden, rtol=tolerance, atol=tolerance * largest, equal_nan=True):
        return "hidden states are modified between body and output head"
    if not torch.equal(logits.to(device).float(), marked.float()):
        return "logits are modified after the output head (capped, scaled or truncated)"
    return None
