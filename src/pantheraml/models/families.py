"""What the loss has to know about a model: whether its logits are plainly `hidden states @ W.T + b`.

If they are, the loss can go from hidden states to token losses in chunks and never hold the full logits. Families
differ (soft-capped, scaled, cut, adapted heads), and new ones appear, so this is not a list of names: the structure is
read off the model, and then the model is run on a few tokens with a marked head output to see that nothing is done
between body and head, or after the head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from pantheraml.kernels.linear_cross_entropy import fp8_linear_cross_entropy, linear_cross_entropy
from pantheraml.kernels.token_scores import Later, TokenScores, fp8_token_scores, token_scores
from pantheraml.models.modes import observed
from pantheraml.models.quantise.fp8 import FP8Linear
from pantheraml.parallel.split import brings_inputs_only
from pantheraml.parallel.vocabulary import is_vocabulary_parallel, sharded_head_loss

_PROBE_TOKENS = 5


@dataclass(frozen=True)
class Head:
    """Logits are the linear `layer` of `body(input_ids=..., position_ids=...).last_hidden_state`, exactly."""

    body: nn.Module
    layer: nn.Linear | FP8Linear

    def loss(self, hidden: Tensor, targets: Tensor, target_count: int | None = None) -> Tensor:
        """Summed cross entropy; `target_count`, if known, is how many targets are not negative."""
        return head_loss(self.layer, hidden, targets, target_count)


def head_loss(layer: nn.Module, hidden: Tensor, targets: Tensor, target_count: int | None = None) -> Tensor:
    """Summed cross entropy of a plain linear head, without full logits; on the device of `hidden`."""
    if isinstance(layer, nn.Linear) and is_vocabulary_parallel(layer):
        return sharded_head_loss(layer, hidden, targets, target_count)
    here, wanted = hidden.to(_device(layer)), targets.to(_device(layer))
    if isinstance(layer, FP8Linear):
        loss = fp8_linear_cross_entropy(here, layer.qweight, layer.scale[0], wanted, target_count)
    else:
        assert isinstance(layer, nn.Linear)
        loss = linear_cross_entropy(here, layer.weight, wanted, layer.bias, target_count)
    return loss.to(hidden.device)


def head_scores(
    layer: nn.Module, hidden: Tensor, targets: Tensor, target_count: int | None = None, later: Later | None = None
) -> TokenScores:
    """Log-probability, entropy and rank of each target under a plain linear head, without full logits; likewise.
    Some gradients may be left for `later`."""
    here, wanted = hidden.to(_device(layer)), targets.to(_device(layer))
    if isinstance(layer, FP8Linear):
        scores = fp8_token_scores(here, layer.qweight, layer.scale[0], wanted, target_count, later)
    else:
        assert isinstance(layer, nn.Linear)
        scores = token_scores(here, layer.weight, wanted, layer.bias, target_count)
    return TokenScores(*(score.to(hidden.device) for score in scores))


def _device(layer: nn.Module) -> torch.device:
    """Of a model that is spread over devices, that of its head."""
    weight = layer.qweight if isinstance(layer, FP8Linear) else layer.weight
    assert isinstance(weight, Tensor)
    return weight.device


def is_plain_layer(layer: Any) -> bool:
    """Whether a layer is a linear one that the losses know, as it was made (or only given a device of its own)."""
    if "forward" in vars(layer) and not brings_inputs_only(layer):
        return False
    return type(layer) is nn.Linear or (isinstance(layer, FP8Linear) and layer.shared_scale and layer.bias is None)


def head_of(model: nn.Module) -> Head:
    """Body and output layer of a model of which `plain_head` has found that its logits are made of these alone."""
    whole: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    return Head(getattr(whole, whole.base_model_prefix), whole.get_output_embeddings())


def vocabulary_of(model: nn.Module) -> int | None:
    """How many tokens the model chooses among; None: its config does not say."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    found = getattr(text, "vocab_size", None)
    return found if isinstance(found, int) and found > 1 else None


def plain_head(model: nn.Module) -> tuple[Head | None, str]:
    """The pieces of the logits and why they are right, or None and why the full logits are needed."""
    whole: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    layer = whole.get_output_embeddings()
    if isinstance(layer, BaseTunerLayer):
        return None, "the output head has an adapter"
    if not is_plain_layer(layer):
        return None, f"the output head is not a plain linear layer but {type(layer).__name__}"
    body = getattr(whole, whole.base_model_prefix, None)
    if not isinstance(body, nn.Module) or body is whole or any(m is layer for m in body.modules()):
        return None, f"{type(whole).__name__} has no body apart from its output head"
    with observed(model):
        reason = _difference(model, body, layer)
    if reason is not None:
        return None, reason
    return Head(body, layer), "logits are the hidden states times the output weight"


def _difference(model: nn.Module, body: nn.Module, layer: nn.Linear | FP8Linear) -> str | None:
    """Runs a few tokens; what the model does besides body and head, or None if nothing."""
    device = _device(layer)
    ids = torch.arange(_PROBE_TOKENS, device=device)[None] % layer.out_features
    inputs = {"input_ids": ids, "position_ids": torch.arange(_PROBE_TOKENS, device=device)[None]}
    hidden = getattr(body(**inputs, use_cache=False), "last_hidden_state", None)
    if not isinstance(hidden, Tensor):
        return "the body returns no last_hidden_state"
    hidden = hidden.to(device)
    # Values up to 1e4 instead of the real output: a cap or a scale that is invisible on small logits shows on these.
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
    # The same sums twice, which a GPU may order differently. A model with NaN in its weights gives NaN on both sides;
    # that is for the training step to report.
    tolerance = 1e-5 if hidden.dtype == torch.float32 else 1e-2
    largest = float(hidden.nan_to_num(0.0, 0.0, 0.0).abs().max())
    if not torch.allclose(seen[0], hidden, rtol=tolerance, atol=tolerance * largest, equal_nan=True):
        return "hidden states are changed between body and output head"
    if not torch.equal(logits.to(device).float(), marked.float()):
        return "logits are changed after the output head (capped, scaled or cut)"
    return None
