"""Write a model as a plain Hugging Face folder: merged weights, config, generation settings, tokenizer."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.dynamic_module_utils import custom_object_save

from pantheraml.base import log
from pantheraml.base.errors import UnsupportedModelError
from pantheraml.kernels.nf4.format import NF4Weight, storable_scales
from pantheraml.models.quantize.checkpoint_formats import nf4_checkpoint_tensors
from pantheraml.models.quantize.quantized_folder import QuantizedFolder, quantized_config
from pantheraml.models.quantize.quantized_linear import quant_formats_of, quantizable_linears
from pantheraml.models.saving.file_tensors import file_groups
from pantheraml.models.saving.merged_tensors import LazyTensor, merged_tensors, plain_class, plain_skeleton, unties_head
from pantheraml.models.saving.safetensors_stream import SHARD_BYTES, write_shards

logger = log.get(__name__)

_NF4_SHARD_BYTES = 1_000_000_000


def dequantized_notice(model: nn.Module) -> str | None:
    """Return what a save of quantized weights contains, for the log; None if the model is not quantized."""
    formats = " and ".join(quant_formats_of(model))
    if not formats:
        return None
    if not any(isinstance(module, BaseTunerLayer) for module in model.modules()):
        return f"weights were quantized to {formats} and are saved dequantized"
    return f"the adapter is merged into the dequantized {formats} weights, which it was trained on"


def write_merged(
    model: PreTrainedModel, folder: Path, tokenizer: Any = None, *, dtype: torch.dtype, shard_bytes: int = SHARD_BYTES
) -> None:
    """Write `model` with its adapters merged, in `dtype`. `model` may be the base of a PEFT model."""
    groups = file_groups(model, merged_tensors(model, dtype))
    write_shards(folder, groups, shard_bytes=shard_bytes)
    config = plain_config(model, dtype)
    if model.is_remote_code():
        custom_object_save(model, folder, config=config)
    config.save_pretrained(folder)
    _write_settings(model, folder, tokenizer)


def write_merged_nf4(model: PreTrainedModel, folder: Path, tokenizer: Any = None, *, dtype: torch.dtype) -> None:
    """Write `model` with its adapters merged and its linear layers rounded to nf4, in bitsandbytes format."""
    skeleton = plain_skeleton(model)
    quantized = set(quantizable_linears(skeleton, "nf4"))
    odd = [name for name in quantized if type(skeleton.get_submodule(name)) is not nn.Linear]
    if odd:
        raise UnsupportedModelError(
            f"The model's {odd[0]} is no nn.Linear, and the bitsandbytes format supports nothing else.",
            fix='Use save_method="merged_16bit".',
        )
    tensors = merged_tensors(model, dtype)
    if {name for group in file_groups(model, tensors) for name in group.metas} != set(tensors):
        raise UnsupportedModelError(
            f"{plain_class(model).__name__} cannot be saved in nf4: its checkpoints name or divide weights otherwise.",
            fix='Use save_method="merged_16bit".',
        )
    plain = [name for name, m in skeleton.named_modules() if isinstance(m, nn.Linear) and name not in quantized]
    writer = QuantizedFolder(folder)
    for shard in _nf4_shards(tensors, quantized, dtype):
        writer.add(shard)
    writer.finish(quantized_config(plain_config(model, dtype), dtype, plain))
    _write_settings(model, folder, tokenizer)


def _nf4_shards(
    tensors: Mapping[str, LazyTensor], quantized: set[str], dtype: torch.dtype
) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        layer, _, own = name.rpartition(".")
        if own == "weight" and layer in quantized:
            weight = NF4Weight.quantize(tensor.read().float())
            weight = weight._replace(scales=storable_scales(weight.scales.values()))
            shard |= {f"{layer}.{part}": value for part, value in nf4_checkpoint_tensors(weight, dtype).items()}
        else:
            shard[name] = tensor.read()
        if sum(value.nbytes for value in shard.values()) >= _NF4_SHARD_BYTES:
            yield shard
            shard = {}
    if shard:
        yield shard


def plain_config(model: PreTrainedModel, dtype: torch.dtype) -> Any:
    """Return the model's config as of a plain checkpoint in `dtype`."""
    config = copy.deepcopy(model.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.dtype = dtype
    config.architectures = [plain_class(model).__name__]
    if unties_head(model):
        config.get_text_config().tie_word_embeddings = config.tie_word_embeddings = False
    return config


def _write_settings(model: Any, folder: Path, tokenizer: Any) -> None:
    if model.can_generate():
        # not save_pretrained: transformers refuses to save some published settings
        model.generation_config.to_json_file(folder / "generation_config.json")
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
