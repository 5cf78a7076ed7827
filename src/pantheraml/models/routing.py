"""The load-balancing loss of mixtures of experts, which transformers adds where `output_router_logits` is set.

It is `experts * sum_i f_i * P_i`: f_i is the share of tokens that go to expert i, P_i its mean probability, both over
all layers and all tokens of a batch but padding. f has no gradient, and P is a sum over tokens. So with the f of a
global batch known, what its parts add to the loss is a sum over them, however it is cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from peft import PeftModel
from torch import Tensor, nn

from pantheraml.base.errors import UnsupportedModelError
from pantheraml.models.modes import observed

SWITCH_OFF = "Set output_router_logits to false in the model's config.json to train without the auxiliary loss."

_PROBE_TOKENS = 6
_COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef")
_CHOSEN = ("num_experts_per_tok", "moe_top_k")


class RouterSums(NamedTuple):
    """Of some tokens, over all layers."""

    chosen: Tensor
    """[experts]: how many tokens go to each; without gradient."""
    probabilities: Tensor
    """[experts]: summed over tokens."""
    rows: Tensor
    """Tokens, each counted once a layer."""

    def loss(self) -> Tensor:
        """The load-balancing loss of these tokens alone."""
        rows = self.rows.clamp(min=1)
        return (self.chosen / rows) @ (self.probabilities / rows) * len(self.chosen)


@dataclass(frozen=True)
class Balance:
    """What a model's auxiliary loss is made with."""

    coefficient: float
    top_k: int
    layers: int | None = None
    """That route tokens; None: not known."""

    def sums(self, router_logits: Sequence[Tensor], mask: Tensor | None) -> RouterSums:
        """`router_logits`: [..., experts] of each layer. `mask`: 0 where a token is padding; None: none is."""
        if self.layers is not None and len(router_logits) != self.layers:
            raise UnsupportedModelError(
                f"{len(router_logits)} of {self.layers} routers told how they route.", todo=SWITCH_OFF
            )
        device = router_logits[0].device
        kept = None if mask is None else mask.reshape(-1).to(device)
        chosen, probabilities, rows = [], [], []
        for layer in router_logits:
            weights = layer.flatten(0, -2).to(device).softmax(dim=-1)
            weights = weights.to(torch.promote_types(weights.dtype, torch.float32))
            counted = torch.ones_like(weights[:, 0]) if kept is None else kept.to(weights.dtype)
            picked = weights.detach().topk(self.top_k, dim=-1).indices
            hits = torch.zeros_like(weights[0]).scatter_add_(0, picked.flatten(), counted.repeat_interleave(self.top_k))
            chosen.append(hits.detach())
            probabilities.append((weights * counted.unsqueeze(-1)).sum(dim=0))
            rows.append(counted.sum())
        return RouterSums(*(torch.stack(values).sum(dim=0) for values in (chosen, probabilities, rows)))


def wants_balance(model: nn.Module) -> bool:
    """Whether the model's config asks for the auxiliary loss, and it counts for something."""
    whole = _whole(model)
    return bool(getattr(whole.config.get_text_config(), "output_router_logits", False)) and bool(_coefficient(whole))


def balance_of(model: nn.Module) -> Balance | None:
    """As the model's numbers say; None where it has none."""
    whole = _whole(model)
    top_k = _number(whole, _CHOSEN)
    return None if top_k is None else Balance(_coefficient(whole), int(top_k))


def find_balance(model: nn.Module) -> Balance | None:
    """What has to be added to the token loss for transformers' loss; None: nothing.

    The model is run on a few tokens, and what transformers adds compared with what is computed here.
    UnsupportedModelError if that is something else.
    """
    if not wants_balance(model):
        return None
    whole, balance = _whole(model), balance_of(model)
    device = whole.get_input_embeddings().weight.device
    ids = torch.arange(_PROBE_TOKENS, device=device)[None]
    with observed(model):
        plain = whole(input_ids=ids, labels=ids, output_router_logits=False, use_cache=False)
        try:
            told = whole(input_ids=ids, labels=ids, output_router_logits=True, use_cache=False)
        except IndexError:  # transformers looks at the first router, and this model has none
            return None
    if getattr(told, "aux_loss", None) is None:
        return None  # a family that hands out router logits and adds nothing
    if balance is not None and told.router_logits:
        found = balance.sums(told.router_logits, None).loss()
        added = (told.loss - plain.loss).to(found.device)
        # a thousandth of the loss is small beside the rounding of the loss
        least = 1e-5 * float(plain.loss.abs().nan_to_num(0.0))
        if _near(found, told.aux_loss, 0.0) and _near(found * balance.coefficient, added, least):
            return Balance(balance.coefficient, balance.top_k, len(told.router_logits))
    raise UnsupportedModelError(
        f"The auxiliary loss of {type(whole).__name__} is not the load-balancing loss that is known here.",
        todo=SWITCH_OFF,
    )


def refuse_balance(model: nn.Module, where: str) -> None:
    """For a mode that cannot add the auxiliary loss; `where` names its setting."""
    if wants_balance(model):
        raise UnsupportedModelError(
            f"The model's config.json asks for the experts' auxiliary loss (output_router_logits), which {where} cannot"
            " add.",
            where=where,
            todo=f"Divide the work by parallel.replicate, shard or context. Or: {SWITCH_OFF}",
        )


def _whole(model: nn.Module) -> Any:
    return model.get_base_model() if isinstance(model, PeftModel) else model


def _number(whole: Any, names: Sequence[str]) -> float | None:
    """The model's own before its config's, as transformers reads them."""
    for name in names:
        for holder in (whole, whole.config.get_text_config()):
            value = getattr(holder, name, None)
            if isinstance(value, int | float):
                return value
    return None


def _coefficient(whole: Any) -> float:
    return float(_number(whole, _COEFFICIENTS) or 0.0)


def _near(found: Tensor, expected: Tensor, least: float) -> bool:
    """Weights that are not read yet are NaN, and so are both."""
    return torch.allclose(
        found.double(), expected.to(found.device).double(), rtol=1e-2, atol=max(least, 1e-6), equal_nan=True
    )
