"""Names that Unsloth scripts import besides its loaders."""

from __future__ import annotations

from typing import Any

import torch

from pantheraml.base import log
from pantheraml.planner.precision import BF16_CAPABILITY

logger = log.get(__name__)


def is_bfloat16_supported() -> bool:
    """Return whether this process can train in bf16: with a GPU that has it, or on a CPU."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability() >= BF16_CAPABILITY


is_bf16_supported = is_bfloat16_supported


def PatchDPOTrainer() -> None:
    """Do nothing: TRL's DPOTrainer trains our models as it is."""
    _say_needless("PatchDPOTrainer", "DPOTrainer")


def PatchKTOTrainer() -> None:
    """Do nothing: TRL's KTOTrainer trains our models as it is."""
    _say_needless("PatchKTOTrainer", "KTOTrainer")


def PatchFastRL(*_: Any, **__: Any) -> None:
    """Do nothing, whatever it is passed: TRL's trainers train our models as they are."""
    _say_needless("PatchFastRL", "trainers")


def _say_needless(name: str, trainer: str) -> None:
    log.start_for_scripts()
    logger.info("%s does nothing: TRL's %s can train these models without it", name, trainer)
