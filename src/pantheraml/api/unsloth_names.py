"""Names that Unsloth scripts import besides its loaders."""

from __future__ import annotations

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
    log.start_for_scripts()
    logger.info("PatchDPOTrainer does nothing: TRL's DPOTrainer trains these models as it is")
