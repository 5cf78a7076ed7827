"""Per-rank numbers of a step, gathered before the optimizer step, and the report made of them.

The GPU is idle from the moment these numbers are known until the optimizer step is launched, so everything that the
decision does not need is computed lazily.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pantheraml.engine.guard.norms import Norms
from pantheraml.engine.guard.policy import StepNumbers


class RankNumbers(NamedTuple):
    """One rank's row of the step's all-gather."""

    loss: float
    """Summed over the targets whose loss this rank computes."""
    squares: float
    """This rank's share of the squared gradient norm."""
    tokens: float
    targets: float
    stop_requested: float
    memory_bytes: float
    """Peak allocated on a GPU, resident on a CPU."""
    seconds: float
    """Time of its own passes, without waiting for other ranks; 0 if not measured."""
    sequences: float
    """Micro-batch size that fits into its memory; infinite: unknown."""
    memory_left: float
    """Share of its device's memory; infinite: not read in this step."""
    update: float
    weights: float
    """Shares of the squared norms of the last measured update and of the weights; 0: none was measured."""


def step_numbers(ranks: Sequence[RankNumbers], target_tokens: int, left_out: tuple[int, ...]) -> StepNumbers:
    """Combine the ranks' rows. Excluded ranks (`left_out`) count neither in the gradient nor in the loss."""
    weights = sum(rank.weights for rank in ranks)
    return StepNumbers(
        loss_sums=[0.0 if index in left_out else rank.loss for index, rank in enumerate(ranks)],
        grad_norm=math.sqrt(sum(rank.squares for rank in ranks)),
        target_tokens=target_tokens - int(sum(ranks[index].targets for index in left_out)),
        stop_requested=any(rank.stop_requested for rank in ranks),
        update_ratio=math.sqrt(sum(rank.update for rank in ranks) / weights) if weights else None,
        left_out=left_out,
    )


@dataclass(frozen=True)
class StepReport:
    numbers: StepNumbers
    ranks: Sequence[RankNumbers]
    shares_sequences: bool
    """Whether ranks hold parts of the same sequences (context parallel)."""
    groups: Norms | None = None
    """Norms per layer, if requested."""
    aux_loss: float | None = None
    """Load-balancing loss of a mixture of experts, before its coefficient; the loss includes it."""

    @property
    def tokens(self) -> int:
        """Tokens of the global batch, without padding."""
        return int(sum(rank.tokens for rank in self.ranks))

    @property
    def memory_bytes(self) -> int:
        """Largest memory use of any rank."""
        return max(self.rank_memory_bytes)

    @property
    def rank_losses(self) -> list[float | None]:
        """Loss per target token of each rank; None for ranks without targets, or with parts of sequences only."""
        shared = self.shares_sequences
        return [None if shared or not rank.targets else rank.loss / rank.targets for rank in self.ranks]

    @property
    def rank_tokens(self) -> list[float]:
        return [rank.tokens for rank in self.ranks]

    @property
    def rank_seconds(self) -> list[float]:
        return [rank.seconds for rank in self.ranks]

    @property
    def rank_memory_bytes(self) -> list[int]:
        return [int(rank.memory_bytes) for rank in self.ranks]

    @property
    def memory_left(self) -> float:
        """Smallest share of a device's memory that any rank has left; infinite: not read in this step."""
        return min(rank.memory_left for rank in self.ranks)

    @property
    def max_sequences(self) -> int | None:
        """Smallest micro-batch size that some rank had to fall back to; None: unknown."""
        fewest = min(rank.sequences for rank in self.ranks)
        return None if math.isinf(fewest) else int(fewest)
