"""Small configs of every transformers causal language model that `models.tiny_model` can shrink."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

from pantheraml.models.tiny_model import tiny_config

MOST_PARAMETERS = 2_000_000


def tiny_configs() -> Iterator[tuple[str, Any]]:
    """Yield model type and config, each once; those that cannot be shrunk are skipped."""
    seen = set()
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING:
        # a config or model may raise anything for sizes that do not fit it
        with contextlib.suppress(Exception):
            config = tiny_config(kind())
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config)
            if kind.model_type not in seen and sum(map(torch.Tensor.numel, model.parameters())) <= MOST_PARAMETERS:
                seen.add(kind.model_type)
                yield kind.model_type, config
