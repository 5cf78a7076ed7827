"""Write an nf4 model as a Hugging Face folder in bitsandbytes format, one shard at a time.

transformers with bitsandbytes, PEFT and `models.quantize.checkpoint_formats` can read it.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor


class QuantizedFolder:
    """Writer of a sharded safetensors checkpoint."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._shards: list[list[str]] = []
        self._bytes = 0

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Write the next shard; keys are the tensors' names in the model."""
        on_cpu = {key: tensor.contiguous().cpu() for key, tensor in tensors.items()}
        save_file(on_cpu, self._folder / _scratch_name(len(self._shards)), metadata={"format": "pt"})
        self._shards.append(list(on_cpu))
        self._bytes += sum(tensor.nbytes for tensor in on_cpu.values())

    def finish(self, config: Any) -> int:
        """Name the shards, write the index and config; return the total size of the weights in bytes."""
        weight_map: dict[str, str] = {}
        for number, names in enumerate(self._shards):
            final = f"model-{number + 1:05d}-of-{len(self._shards):05d}.safetensors"
            (self._folder / _scratch_name(number)).rename(self._folder / final)
            weight_map |= dict.fromkeys(names, final)
        index = {"metadata": {"total_size": self._bytes}, "weight_map": dict(sorted(weight_map.items()))}
        (self._folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
        config.save_pretrained(self._folder)
        return self._bytes


def _scratch_name(number: int) -> str:
    return f"shard-{number}.safetensors"


def quantized_config(source: Any, dtype: torch.dtype, plain: Sequence[str]) -> Any:
    """Return the config of the nf4 model: `dtype` for unquantized weights, `plain` names the linear layers left
    unquantized."""
    config = copy.deepcopy(source)
    config.dtype = dtype
    config.quantization_config = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": str(dtype).removeprefix("torch."),
        "bnb_4bit_quant_storage": "uint8",
        "llm_int8_skip_modules": list(plain),
    }
    return config
