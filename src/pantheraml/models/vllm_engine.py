"""vLLM behind `model.fast_generate`, where vLLM is installed.

vLLM loads its own copy of the checkpoint, beside the model that is trained. It has not been run in our tests, which
have no vLLM: arguments follow its documentation (`LLM`, `LLM.generate`, `LoRARequest`).
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from pantheraml.base import log
from pantheraml.base.errors import ConfigError
from pantheraml.models.sampling_params import SamplingParams

logger = log.get(__name__)

OPTIONS = ("gpu_memory_utilization", "max_lora_rank", "float8_kv_cache", "disable_log_stats")
"""Arguments of `from_pretrained` that configure vLLM."""
_MEMORY_FRACTION, _MAX_LORA_RANK = 0.5, 64
_QUANTIZATION = {"nf4": "bitsandbytes", "fp8": "fp8", None: None}


def why_not_vllm(device: torch.device) -> str | None:
    """Return why vLLM cannot be used, or None."""
    if importlib.util.find_spec("vllm") is None:
        return "vLLM is not installed"
    return None if device.type == "cuda" else "vLLM needs a GPU"


class NoVllm:
    """`model.vllm_engine` without vLLM: the model itself generates, so that there is no second copy to free."""

    def sleep(self, level: int = 1) -> None:
        """Do nothing."""

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Do nothing."""


class VllmEngine:
    """vLLM's `LLM`, called with adapters as `model.load_lora` returns them. Other attributes are those of `LLM`."""

    def __init__(
        self,
        folder: str,
        *,
        dtype: torch.dtype,
        quant_format: str | None,
        max_seq_length: int | None,
        options: Mapping[str, Any],
    ) -> None:
        if quant_format not in _QUANTIZATION:
            raise ConfigError(
                f"fast_inference=True does not support {quant_format} weights.",
                fix="Use load_in_4bit.",
            )
        self._vllm: Any = importlib.import_module("vllm")
        self._adapters: dict[str, Any] = {}
        self._llm = self._vllm.LLM(
            model=folder,
            dtype=str(dtype).removeprefix("torch."),
            quantization=_QUANTIZATION[quant_format],
            max_model_len=max_seq_length,
            gpu_memory_utilization=options.get("gpu_memory_utilization") or _MEMORY_FRACTION,
            enable_lora=True,
            max_lora_rank=options.get("max_lora_rank") or _MAX_LORA_RANK,
            kv_cache_dtype="fp8" if options.get("float8_kv_cache") else "auto",
            disable_log_stats=options.get("disable_log_stats", True),
            enable_sleep_mode=True,
        )

    def generate(self, prompts: Any, sampling_params: Any, lora_request: Any) -> Any:
        if isinstance(sampling_params, SamplingParams):
            sampling_params = self._vllm.SamplingParams(**vars(sampling_params))
        return self._llm.generate(prompts, sampling_params, lora_request=self._adapter(lora_request), use_tqdm=False)

    def _adapter(self, request: Any) -> Any:
        """Return vLLM's own request. An adapter is read once per path and name: a changed folder needs a new name."""
        if request is None or hasattr(request, "lora_int_id"):
            return request
        key = f"{request.name}:{request.path}"
        if key not in self._adapters:
            kind = importlib.import_module("vllm.lora.request").LoRARequest
            self._adapters[key] = kind(request.name, len(self._adapters) + 1, str(request.path))
        return self._adapters[key]

    def __getattr__(self, name: str) -> Any:  # sleep, wake_up
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._llm, name)
