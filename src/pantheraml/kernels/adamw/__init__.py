"""In-place AdamW step: float32 or stochastically rounded bf16 weights; float32, bf16 or 8-bit moments."""

from pantheraml.kernels.adamw.op import adamw8bit_, adamw_
from pantheraml.kernels.adamw.reference import AdamWStep, Moments8bit, reference_adamw8bit_, reference_adamw_

__all__ = ["AdamWStep", "Moments8bit", "adamw8bit_", "adamw_", "reference_adamw8bit_", "reference_adamw_"]
