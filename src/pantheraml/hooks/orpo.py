"""TRL patch: `ORPOTrainer` scores tokens without full logits.

It has no fused head of its own: it takes the logits of all tokens, [rows, tokens, vocabulary], twice in float32. From
them it needs the log-probability of every token (of the chosen rows with their prompts, and of both completions) and
the mean logit, for its log. Our models return both without logits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from pantheraml.hooks.library_patch import LibraryPatch
from pantheraml.models.causal_lm import FastCausalLM, fast_model


def _from_token_scores(concatenated_forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(concatenated_forward)
    def forward(self: Any, model: Any, batch: dict[str, Any]) -> Any:
        fast = fast_model(self.model)
        if fast is None or not _can_score(fast) or self.aux_loss_enabled:
            return concatenated_forward(self, model, batch)
        both = self.concatenated_inputs(
            batch, is_encoder_decoder=False, padding_value=self.padding_value, device=self.accelerator.device
        )
        ids, mask, labels = (both[f"concatenated_{name}"] for name in ("input_ids", "attention_mask", "labels"))
        # all positions, padding too, whose logits are part of the logged mean
        fast.scores_no_padding = False
        targets = torch.where(labels == -100, ids, labels)
        scores = model(ids, attention_mask=mask, labels=targets, use_cache=False, fused_lm_head=True)
        chosen = batch["chosen_labels"].shape[0]
        has_token, in_completion = mask[:, 1:] == 1, labels[:, 1:] != -100
        nll_loss = -(scores.log_probs * has_token)[:chosen].sum() / has_token[:chosen].sum()
        log_probs = (scores.log_probs * in_completion).sum(-1) / in_completion.sum(-1)
        means = scores.mean_logits
        return log_probs[:chosen], log_probs[chosen:], means[:chosen], means[chosen:], nll_loss

    return forward


def _can_score(model: FastCausalLM) -> bool:
    """Return whether the model scores tokens by its own head, and as its logits do."""
    return model.why_full_logits() is None and not model.has_foreign_head() and model.score_temperature == 1.0


ORPO_HEAD = LibraryPatch(
    library="trl",
    versions=">=1.15,<1.17",
    module="trl.experimental.orpo.orpo_trainer",
    class_name="ORPOTrainer",
    name="concatenated_forward",
    make=_from_token_scores,
    fallback="ORPOTrainer computes full logits",
    required=False,
)
