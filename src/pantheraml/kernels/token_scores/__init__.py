"""Log-probability, entropy and rank of each target under a linear output head, without ever holding the full logits."""

from pantheraml.kernels.linear_cross_entropy.later import Later
from pantheraml.kernels.token_scores.op import TokenScores, fp8_token_scores, token_scores
from pantheraml.kernels.token_scores.reference import reference_token_scores

__all__ = ["Later", "TokenScores", "fp8_token_scores", "reference_token_scores", "token_scores"]
