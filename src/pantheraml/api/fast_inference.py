"""`fast_inference=True`: vLLM for `model.fast_generate` where it is installed, else our own batched generation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel

from pantheraml.base import log
from pantheraml.models.adapters import base_name
from pantheraml.models.vllm_engine import NoVllm, VllmEngine, why_not_vllm
from pantheraml.specs.train import ModelConfig

logger = log.get(__name__)


def inference_engine(
    config: ModelConfig,
    model: PreTrainedModel,
    quant_format: str | None,
    max_seq_length: int | None,
    options: Mapping[str, Any],
) -> VllmEngine | NoVllm:
    """Start vLLM on the model's checkpoint; without it, with a line that says why, if it cannot be used."""
    reason = why_not_vllm(model.device)
    if reason is not None:
        logger.info("fast_generate uses PantheraML's own batched generation: %s", reason)
        return NoVllm()
    logger.info("fast_generate uses vLLM, which loads its own copy of the weights")
    return VllmEngine(
        base_name(config), dtype=model.dtype, quant_format=quant_format, max_seq_length=max_seq_length, options=options
    )
