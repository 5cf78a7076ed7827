"""Load-balancing loss of mixtures of experts, which transformers adds where `output_router_logits` is set.

It is `experts * sum_i f_i * P_i`: f_i is the fraction of tokens routed to expert i, P_i its mean probability, both over
all layers and all non-padding tokens of a batch. f has no gradient, and P is a sum over tokens. So with the f of the
global batch known, the loss is a sum over micro-batches and ranks, however the batch is split.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from peft import PeftModel
from torch import Tensor, nn

from pantheraml.base.errors import UnsupportedModelError
from pantheraml.models.eval_mode import eval_no_grad

DISABLE_FIX = "Set output_router_logits to false in the model's config.json to train without the auxiliary loss."

_PROBE_TOKENS = 6
_COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "moe_top_k")


class RouterSums(NamedTuple):
    """Router statistics of some tokens, over all layers."""

    chosen: Tensor
    """[experts]: tokens routed to each; without gradient."""
    probabilities: Tensor
    """[experts]: summed over tokens."""
    rows: Tensor
    """Tokens, each counted once per layer."""

    def loss(self) -> Tensor:
        """Return the load-balancing loss of these tokens alone."""
        rows = self.rows.clamp(min=1)
        return (self.chosen / rows) @ (self.probabilities / rows) * len(self.chosen)


@dataclass(frozen=True)
class RouterLoss:
    """Parameters of a model's auxiliary loss."""

    coefficient: float
    top_k: int
    layers: int | None = None
    """Number of layers with a router; None: unknown."""

    def sums(self, router_logits: Sequence[Tensor], mask: Tensor | None) -> RouterSums:
        """Compute the statistics. `router_logits`: [..., experts] per layer; `mask`: 0 for padding; None: no
        padding."""
        if self.layers is not None and len(router_logits) != self.layers:
            raise UnsupportedModelError(
                f"Only {len(router_logits)} of {self.layers} routers returned their logits.", fix=DISABLE_FIX
            )
        device = router_logits[0].device
        is_token = None if mask is None else mask.reshape(-1).to(device)
        chosen, probabilities, rows = [], [], []
        for layer in router_logits:
            weights = layer.flatten(0, -2).to(device).softmax(dim=-1)
            weights = weights.to(torch.promote_types(weights.dtype, torch.float32))
            counted = torch.ones_like(weights[:, 0]) if is_token is None else is_token.to(weights.dtype)
            picked = weights.detach().topk(self.top_k, dim=-1).indices
            hits = torch.zeros_like(weights[0]).scatter_add_(0, picked.flatten(), counted.repeat_interleave(self.top_k))
            chosen.append(hits.detach())
            probabilities.append((weights * counted.unsqueeze(-1)).sum(dim=0))
            rows.append(counted.sum())
        return RouterSums(*(torch.stack(values).sum(dim=0) for values in (chosen, probabilities, rows)))


def uses_router_loss(model: nn.Module) -> bool:
    """Return whether the model's config enables the auxiliary loss with a non-zero coefficient."""
    whole = _whole(model)
    return bool(getattr(whole.config.get_text_config(), "output_router_logits", False)) and bool(_coefficient(whole))


def router_loss_of(model: nn.Module) -> RouterLoss | None:
    """Return the parameters from the model's config; None if it has none."""
    whole = _whole(model)
    top_k = _number(whole, _CHOSEN)
    return None if top_k is None else RouterLoss(_coefficient(whole), int(top_k))


def find_router_loss(model: nn.Module) -> RouterLoss | None:
    """Return the auxiliary loss to add to the token loss to match transformers' loss; None: nothing.

    The model is run on a few tokens, and what transformers adds is compared with what is computed here.
    UnsupportedModelError if they differ.
    """
    if not uses_router_loss(model):
        return None
    whole, router_loss = _whole(model), router_loss_of(model)
    device = whole.get_input_embeddings().weight.device
    ids = torch.arange(_PROBE_TOKENS, device=device)[None]
    with eval_no_grad(model):
        plain = whole(input_ids=ids, labels=ids, output_router_logits=False, use_cache=False)
        try:
            routed = whole(input_ids=ids, labels=ids, output_router_logits=True, use_cache=False)
        except IndexError:  # transformers indexes the first router, and this model has none
            return None
    if getattr(routed, "aux_loss", None) is None:
        return None  # a family that returns router logits and adds nothing
    if router_loss is not None and routed.router_logits:
        computed = router_loss.sums(routed.router_logits, None).loss()
        added = (routed.loss - plain.loss).to(computed.device)
        # a thousandth of the loss is small next to the rounding error of the loss itself
        least = 1e-5 * float(plain.loss.abs().nan_to_num(0.0))
        if _near(computed, routed.aux_loss, 0.0) and _near(computed * router_loss.coefficient, added, least):
            return RouterLoss(router_loss.coefficient, router_loss.top_k, len(routed.router_logits))
    raise UnsupportedModelError(
        f"The auxiliary loss of {type(whole).__name__} is not the load-balancing loss that this library implements.",
        fix=DISABLE_FIX,
    )


def disable_without_experts(model: nn.Module) -> None:
    """Set the coefficient to zero in a model of a mixture-of-experts family that has no experts.

    Granite 4.0 h has such models. TRL asks for the auxiliary loss wherever there is a coefficient, and transformers
    then fails for want of routers.
    """
    whole = _whole(model)
    text = whole.config.get_text_config()
    if any(getattr(text, name, None) == 0 for name in _EXPERTS) and not _number(whole, _EXPERTS):
        for holder, name in itertools.product((whole, text), _COEFFICIENTS):
            if getattr(holder, name, None):
                setattr(holder, name, 0.0)


def reject_router_loss(model: nn.Module, where: str) -> None:
    """Raise for a mode that cannot add the auxiliary loss; `where` names its setting."""
    if uses_router_loss(model):
        raise UnsupportedModelError(
            f"The model's config.json enables the router's auxiliary loss (output_router_logits), which {where} cannot"
            " add.",
            where=where,
            fix=f"Use parallel.replicate, shard or context instead. Or: {DISABLE_FIX}",
        )


def _whole(model: nn.Module) -> Any:
    return model.get_base_model() if isinstance(model, PeftModel) else model


def _number(whole: Any, names: Sequence[str]) -> float | None:
    """Read the model's attribute before its config's, as transformers does."""
    for name in names:
        for holder in (whole, whole.config.get_text_config()):
            value = getattr(holder, name, None)
            if isinstance(value, int | float):
                return value
    return None


def _coefficient(whole: Any) -> float:
    return float(_number(whole, _COEFFICIENTS) or 0.0)


def _near(actual: Tensor, expected: Tensor, least: float) -> bool:
    """Compare; NaN equals NaN, since weights that are not read yet are NaN."""
    return torch.allclose(
        actual.double(), expected.to(actual.device).double(), rtol=1e-2, atol=max(least, 1e-6), equal_nan=True
    )
