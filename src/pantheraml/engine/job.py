"""What a training run is: the inputs of its loop, and its length."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pantheraml.base.events import Emit
from pantheraml.data.dataset import TokenDataset
from pantheraml.data.origin import Origins
from pantheraml.engine.fault_injection import FaultInjector
from pantheraml.engine.guard.watchdog import StopFlag, Watchdog
from pantheraml.engine.step.step import Stepper
from pantheraml.specs.plan import Plan
from pantheraml.specs.resume import reproducibility_settings
from pantheraml.specs.train import TrainConfig


@dataclass(frozen=True)
class RunLength:
    """Length of a run: optimizer steps and, if set in epochs, the number of samples it ends after."""

    steps: int
    samples: int | None


def run_length(config: TrainConfig, sequences: int) -> RunLength:
    if config.train.max_steps is not None:
        return RunLength(steps=config.train.max_steps, samples=None)
    samples = max(1, math.ceil(config.train.epochs * sequences))
    return RunLength(steps=math.ceil(samples / config.train.global_batch_size), samples=samples)


@dataclass(frozen=True)
class Job:
    """Inputs of the training loop."""

    config: TrainConfig
    plan: Plan
    run_dir: Path
    stepper: Stepper
    train_data: TokenDataset
    eval_data: TokenDataset | None
    model_fingerprint: str
    """Fingerprint of the initial weights."""
    emit: Emit
    stop: StopFlag
    watch: Watchdog = field(default_factory=Watchdog)
    """Receives a beat whenever this rank makes progress."""
    faults: FaultInjector | None = None
    """Failures to inject, in tests."""
    origins: Origins | None = None
    """Maps training sequences to the files and rows they came from."""

    @property
    def identity(self) -> Mapping[str, Any]:
        """Settings that must not change between a checkpoint and its resume: they determine samples and weights."""
        return {
            "model": self.model_fingerprint,
            "data": self.train_data.fingerprint,
            **reproducibility_settings(self.config),
        }
