"""Saving methods of fast models, under the names that Unsloth's notebooks call.

They belong to the base model. A PEFT model looks up what it does not have itself in its base, so it has them, too; the
base knows its adapters, because PEFT puts them into its layers.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from peft import PeftConfig
from peft.utils import get_peft_model_state_dict
from safetensors.torch import save_file
from transformers import PreTrainedModel

from pantheraml.base import log
from pantheraml.base.errors import ConfigError
from pantheraml.base.folders import added_files
from pantheraml.models.gguf.kinds import GgufKinds
from pantheraml.models.gguf.save import save_gguf
from pantheraml.models.saving.hub_upload import upload_folder
from pantheraml.models.saving.merged_folder import dequantized_notice, write_merged, write_merged_nf4
from pantheraml.models.saving.shard_size import parse_size

logger = log.get(__name__)

_PEFT_PREFIX = "base_model.model."
_16BIT, _4BIT, _LORA = "merged_16bit", "merged_4bit", "lora"
_METHODS = {
    "merged_16bit": _16BIT, "16bit": _16BIT, "merged_4bit": _4BIT, "merged_4bit_forced": _4BIT, "4bit": _4BIT,
    "lora": _LORA,
}  # fmt: skip
_ELSEWHERE = ("mxfp4", "nvfp4", "mxfp8", "fp8")
_UNUSED = {
    "temporary_location": "nothing is written beside the result",
    "maximum_memory_usage": "one weight at a time is in memory",
    "safe_serialization": "weights are always safetensors",
    "save_peft_format": "adapters are always in PEFT's format",
    "datasets": "no model card is written",
    "tags": "no model card is written",
    "first_conversion": "files are written directly in the requested kind",
    "is_main_process": "every process that calls it saves",
}


@dataclass(frozen=True)
class SavedLora:
    """An adapter on disk, as `load_lora` returns it for `fast_generate(lora_request=...)`."""

    path: str
    name: str


class SavingMethods:
    """Mixin before the class of a transformers model."""

    def save_pretrained_merged(
        self,
        save_directory: str | Path,
        tokenizer: Any = None,
        save_method: str | None = _16BIT,
        *,
        push_to_hub: bool = False,
        token: str | bool | None = None,
        max_shard_size: int | str = "5GB",
        private: bool | None = None,
        **others: Any,
    ) -> None:
        """Write a folder that transformers (or PEFT) can load without this package.

        `save_method`: merged_16bit, the adapters merged into 16-bit weights; merged_4bit, these rounded to nf4 in
        bitsandbytes format; lora, the adapters alone. The model itself stays as it is.
        """
        _check_others("save_pretrained_merged", others)
        if push_to_hub:
            self.push_to_hub_merged(
                str(save_directory), tokenizer, save_method, token=token, private=private, max_shard_size=max_shard_size
            )
            return
        method = _save_method(save_method)
        with _files_of(method, Path(save_directory)) as folder:
            self._write(folder, tokenizer, method, parse_size(max_shard_size))
        logger.info("saved %s to %s", method, save_directory)

    def push_to_hub_merged(
        self,
        repo_id: str,
        tokenizer: Any = None,
        save_method: str | None = _16BIT,
        *,
        token: str | bool | None = None,
        private: bool | None = None,
        max_shard_size: int | str = "5GB",
        commit_message: str = "Upload model",
        commit_description: str | None = None,
        create_pr: bool = False,
        revision: str | None = None,
        **others: Any,
    ) -> str:
        """Upload what `save_pretrained_merged` writes; return the address of the commit."""
        _check_others("push_to_hub_merged", others)
        method = _save_method(save_method)
        with tempfile.TemporaryDirectory(prefix="pantheraml-upload-") as scratch:
            folder = Path(scratch)
            self._write(folder, tokenizer, method, parse_size(max_shard_size))
            return upload_folder(
                folder, repo_id, token=token, private=private, message=commit_message, description=commit_description,
                create_pr=create_pr, revision=revision,
            )  # fmt: skip

    def save_lora(self, save_directory: str | Path) -> None:
        """Write the adapters alone, as PEFT does."""
        with _files_of(_LORA, Path(save_directory)) as folder:
            self._write_lora(folder)

    def load_lora(self, save_directory: str | Path) -> SavedLora:
        """Return the adapter in a folder for `fast_generate(lora_request=...)`; this model stays as it is."""
        folder = Path(save_directory)
        if not (folder / "adapter_config.json").is_file():
            raise ConfigError(f"There is no adapter in {folder}.", fix="Give a folder that save_lora has written.")
        return SavedLora(str(folder.resolve()), folder.resolve().name)

    def save_pretrained_gguf(
        self,
        save_directory: str | Path,
        tokenizer: Any = None,
        quantization_method: GgufKinds = "q8_0",
        *,
        push_to_hub: bool = False,
        token: str | bool | None = None,
        private: bool | None = None,
        **others: Any,
    ) -> list[str]:
        """Write the model with its adapters merged as one GGUF file per kind, for llama.cpp; return their paths.

        f32, f16, bf16 and q8_0 are written by this package; other kinds need `llama-quantize` on the path.
        """
        _check_others("save_pretrained_gguf", others)
        if push_to_hub:
            self.push_to_hub_gguf(str(save_directory), tokenizer, quantization_method, token=token, private=private)
            return []
        files = save_gguf(cast(PreTrainedModel, self), Path(save_directory), tokenizer, quantization_method)
        for file in files:
            logger.info("saved %s", file)
        return [str(file) for file in files]

    def push_to_hub_gguf(
        self,
        repo_id: str,
        tokenizer: Any = None,
        quantization_method: GgufKinds = "q8_0",
        *,
        token: str | bool | None = None,
        private: bool | None = None,
        commit_message: str = "Upload GGUF",
        commit_description: str | None = None,
        create_pr: bool = False,
        revision: str | None = None,
        **others: Any,
    ) -> str:
        """Upload what `save_pretrained_gguf` writes; return the address of the commit."""
        _check_others("push_to_hub_gguf", others)
        with tempfile.TemporaryDirectory(prefix="pantheraml-upload-") as scratch:
            folder = Path(scratch) / repo_id.rpartition("/")[2]
            save_gguf(cast(PreTrainedModel, self), folder, tokenizer, quantization_method)
            return upload_folder(
                folder, repo_id, token=token, private=private, message=commit_message, description=commit_description,
                create_pr=create_pr, revision=revision,
            )  # fmt: skip

    def _write(self, folder: Path, tokenizer: Any, method: str, shard_bytes: int) -> None:
        model = cast(PreTrainedModel, self)
        if method == _LORA:
            self._write_lora(folder)
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)
            return
        if (notice := dequantized_notice(model)) is not None:
            logger.warning("%s", notice)
        dtype = model.dtype if model.dtype in (torch.float16, torch.bfloat16) else torch.bfloat16
        if method == _16BIT:
            write_merged(model, folder, tokenizer, dtype=dtype, shard_bytes=shard_bytes)
            return
        logger.warning("merged weights are rounded to nf4: their logits are not exactly those that were trained")
        write_merged_nf4(model, folder, tokenizer, dtype=dtype)

    def _write_lora(self, folder: Path) -> None:
        configs = cast(Mapping[str, PeftConfig], getattr(self, "peft_config", None) or {})
        if not configs:
            raise ConfigError("This model has no adapters to save.", fix="Use save_pretrained_merged.")
        name = next(iter(configs))
        if len(configs) > 1:
            logger.warning("of the adapters %s only %s is saved", ", ".join(configs), name)
        weights = get_peft_model_state_dict(cast(Any, self), adapter_name=name, save_embedding_layers=False)
        on_cpu = {f"{_PEFT_PREFIX}{key}": w.detach().cpu().contiguous().clone() for key, w in weights.items()}
        save_file(on_cpu, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        config = configs[name]
        base, mode = config.base_model_name_or_path, config.inference_mode
        config.base_model_name_or_path, config.inference_mode = base or cast(Any, self).name_or_path, True
        try:
            config.save_pretrained(str(folder))
        finally:
            config.base_model_name_or_path, config.inference_mode = base, mode


_MODEL_FILES = ("model*.safetensors", "model.safetensors.index.json")
_ADAPTER_FILES = ("adapter_model.safetensors", "adapter_config.json")


def _files_of(method: str, folder: Path) -> AbstractContextManager[Path]:
    """Return a scratch folder whose files replace those of an earlier save of the same kind.

    transformers loads a folder with both an adapter and a model as the adapter over its base.
    """
    own, other = (_ADAPTER_FILES, _MODEL_FILES) if method == _LORA else (_MODEL_FILES, _ADAPTER_FILES)
    found = [path.name for pattern in other for path in folder.glob(pattern)]
    if found:
        raise ConfigError(
            f"{folder} already holds {'a model' if method == _LORA else 'an adapter'} ({found[0]}), and a folder with"
            " both is ambiguous.",
            fix="Choose another folder.",
        )
    return added_files(folder, replaces=own)


def _save_method(save_method: str | None) -> str:
    asked = (save_method or _16BIT).lower().replace(" ", "_")
    if asked in _METHODS:
        return _METHODS[asked]
    known = ", ".join(_METHODS)
    hint = "Save merged_16bit, and convert that with its own tool." if asked in _ELSEWHERE else f"Use one of {known}."
    raise ConfigError(f"save_method={save_method!r} is not supported.", fix=hint)


def _check_others(function: str, others: Mapping[str, Any]) -> None:
    for name, value in others.items():
        if name not in _UNUSED:
            raise ConfigError(f"{function} has no argument {name!r}.", fix="Remove it.")
        if value is not None:
            logger.warning("%s: %s=%r has no effect: %s", function, name, value, _UNUSED[name])
