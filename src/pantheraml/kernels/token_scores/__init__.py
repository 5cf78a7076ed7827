"""Per-token log-probability, entropy, top-1 hit and mean logit under a linear output head, without full logits."""

from pantheraml.kernels.linear_cross_entropy.deferred_grad import DeferredGrad
from pantheraml.kernels.token_scores.op import TokenScores, fp8_token_scores, token_scores
from pantheraml.kernels.token_scores.reference import reference_token_scores

__all__ = ["DeferredGrad", "TokenScores", "fp8_token_scores", "reference_token_scores", "token_scores"]
