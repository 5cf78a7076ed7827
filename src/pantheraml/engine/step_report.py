"""What ranks tell each other about a step before it is taken, and what follows from that.

From where these numbers are known until the update begins a GPU has nothing to do. So what the decision on the step
does not need is worked out when somebody asks for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pantheraml.engine.guard.groups import Norms
from pantheraml.engine.guard.verdict import StepNumbers


class RankNumbers(NamedTuple):
    """One rank's row of the step's exchange."""

    loss: float
    """Summed over the targets whose loss is found here."""
    squares: float
    """This rank's share of the squared gradient norm."""
    tokens: float
    targets: float
    stop_requested: float
    memory_bytes: float
    """Peak allocated on a GPU, resident on a CPU."""
    seconds: float
    """Of its own passes, without waiting for others; 0 where that is not measured."""
    sequences: float
    """The most that it had memory for in a pass; infinite: not known."""
    update: float
    weights: float
    """Its shares of the squared norms of the last measured update, and of the weights then; 0: none was measured."""


def step_numbers(ranks: Sequence[RankNumbers], target_tokens: int, left_out: tuple[int, ...]) -> StepNumbers:
    """What a rank brought that was left out is neither in the gradient nor in the loss."""
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
    """Whether ranks have parts of the same sequences."""
    groups: Norms | None = None
    """Norms layer by layer, where they were asked for."""
    aux_loss: float | None = None
    """Of a mixture of experts: its load-balancing loss, which is in the loss times its coefficient."""

    @property
    def tokens(self) -> int:
        """Of the global batch, padding excluded."""
        return int(sum(rank.tokens for rank in self.ranks))

    @property
    def memory_bytes(self) -> int:
        """The largest memory of any process."""
        return max(self.rank_memory_bytes)

    @property
    def rank_losses(self) -> list[float | None]:
        """Per target token of each rank; None where it has none, or shares their sequences with others."""
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
    def most_at_a_time(self) -> int | None:
        """The fewest sequences of a pass that some rank had to make do with; None: not known."""
        fewest = min(rank.sequences for rank in self.ranks)
        return None if math.isinf(fewest) else int(fewest)
