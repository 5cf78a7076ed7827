"""What ranks know about a bad step beyond its numbers, put together by one exchange that only such a step takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pantheraml.engine.feed import StepBatches
from pantheraml.engine.guard.verdict import Anomaly, Suspect, suspect
from pantheraml.parallel.exchange import all_gather_json
from pantheraml.parallel.local import NamedParameters
from pantheraml.parallel.process_group import World


@dataclass(frozen=True)
class Evidence:
    """The same on all ranks."""

    tensor: str | None
    """The gradient that the anomaly shows in, whichever rank holds it; None if it shows in none."""
    samples: list[list[int]]
    """Of every rank: what its passes were over."""


def gather_evidence(parts: NamedParameters, batches: StepBatches, anomaly: Anomaly | None, world: World) -> Evidence:
    """`parts`: what this rank holds of the parameters, with their gradients. A collective."""
    own = suspect(parts, anomaly), [int(sample) for samples in batches.own_samples for sample in samples]
    everyone = [own] if world.size == 1 else all_gather_json(own, world.patient_group)
    suspects = [None if one is None else Suspect(*one) for one, _ in everyone]
    return Evidence(_worst(suspects, world.layout.stage_ranks), [samples for _, samples in everyone])


def _worst(suspects: Sequence[Suspect | None], stage_ranks: int) -> str | None:
    """The largest; of several that are not finite the first in the model, whose stages have their ranks in order."""
    found = [(-one.size, rank // stage_ranks, one.number, one.name) for rank, one in enumerate(suspects) if one]
    return min(found)[-1] if found else None
