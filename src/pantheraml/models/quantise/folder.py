"""Writing a model in nf4 as a Hugging Face folder in bitsandbytes' format, a part at a time.

Whoever reads bitsandbytes' folders reads these: transformers with bitsandbytes, PEFT, and `models.quantise.stored`.
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


class PackedFolder:
    """The weights of a model, in as many files as there are parts of it."""

    def __init__(self, folder: Path, parts: int) -> None:
        self._folder, self._parts = folder, parts
        self._places: dict[str, str] = {}
        self._bytes = self._written = 0

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """One more part, by the names of its tensors in the model."""
        self._written += 1
        name = f"model-{self._written:05d}-of-{self._parts:05d}.safetensors"
        here = {key: tensor.contiguous().cpu() for key, tensor in tensors.items()}
        save_file(here, self._folder / name, metadata={"format": "pt"})
        self._places |= dict.fromkeys(here, name)
        self._bytes += sum(tensor.nbytes for tensor in here.values())

    def finish(self, config: Any) -> int:
        """Say what is where, and what it is; how many bytes the weights take."""
        assert self._written == self._parts, "parts are missing"
        index = {"metadata": {"total_size": self._bytes}, "weight_map": dict(sorted(self._places.items()))}
        (self._folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
        config.save_pretrained(self._folder)
        return self._bytes


def packed_config(source: Any, dtype: torch.dtype, plain: Sequence[str]) -> Any:
    """The model's config for weights in nf4, and `dtype` where they are not; `plain` are linear layers that are not."""
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
