"""Write a model as a GGUF file, one tensor at a time, with its adapters merged."""

from __future__ import annotations

import math
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from pantheraml.base import log
from pantheraml.base.errors import ConfigError, ModelError, StorageError, UnsupportedModelError
from pantheraml.base.folders import added_files
from pantheraml.models.gguf.families import GgufFamily, gguf_family
from pantheraml.models.gguf.kinds import OWN_KINDS, SAVE_MERGED, TOOL, GgufKinds, parse_kinds
from pantheraml.models.gguf.rope_keys import add_rope_keys, head_size, main_rope, rope_size, rope_tensors
from pantheraml.models.gguf.vocabulary import add_vocabulary, read_vocabulary
from pantheraml.models.saving.merged_folder import dequantized_notice
from pantheraml.models.saving.merged_tensors import LazyTensor, merged_tensors, unties_head

logger = log.get(__name__)

_FILE_TYPES = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "bf16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0"}


@dataclass(frozen=True)
class FileTensor:
    """A tensor of the file: its type in `gguf.GGMLQuantizationType`, and how to get its values in float32."""

    name: str
    shape: tuple[int, ...]
    kind: str
    read: Callable[[], Tensor]


def save_gguf(model: PreTrainedModel, folder: Path, tokenizer: Any, requested: GgufKinds) -> list[Path]:
    """Write `NAME.KIND.gguf` for each kind into `folder`, where NAME is the folder's name; return the files."""
    kinds = parse_kinds(requested)
    tokenizer = text_tokenizer(tokenizer)
    check_gguf(model.config, tokenizer)
    folder = folder.absolute()
    names = [f"{folder.name}.{kind.upper()}.gguf" for kind in kinds]
    with added_files(folder) as scratch:
        for kind, name in zip(kinds, names, strict=True):
            _write(model, scratch / name, tokenizer, kind)
    return [folder / name for name in names]


def write_gguf_file(model: PreTrainedModel, output: Path, tokenizer: Any, kind: str) -> None:
    """Write one file of a checked kind."""
    output = output.absolute()
    with added_files(output.parent, name=output.name) as scratch:
        _write(model, scratch / output.name, text_tokenizer(tokenizer), kind)


def text_tokenizer(tokenizer: Any) -> Any:
    """Return the tokenizer, or that of a processor."""
    if tokenizer is None:
        raise ConfigError("A GGUF file contains the tokenizer, and none is given.", fix="Pass the tokenizer, too.")
    return getattr(tokenizer, "tokenizer", tokenizer)


def check_gguf(config: Any, tokenizer: Any) -> None:
    """Raise whatever is known to prevent the conversion, before any work."""
    family = gguf_family(config)
    main_rope(config)
    if family.interleaved_rope and rope_size(config) != head_size(config):
        raise UnsupportedModelError(
            "A Llama model that rotates parts of its heads cannot be converted to GGUF.", fix=SAVE_MERGED
        )
    read_vocabulary(tokenizer, config.vocab_size)


def _write(model: PreTrainedModel, file: Path, tokenizer: Any, kind: str) -> None:
    if kind in OWN_KINDS:
        _write_own(model, file, tokenizer, kind)
        return
    tool = shutil.which(TOOL)
    assert tool is not None, "checked by parse_kinds"
    with tempfile.TemporaryDirectory(dir=file.parent) as scratch:
        full = Path(scratch) / "bf16.gguf"
        _write_own(model, full, tokenizer, "bf16")
        done = subprocess.run([tool, str(full), str(file), kind.upper()], capture_output=True, text=True, check=False)
        if done.returncode != 0 or not file.is_file():
            last = (done.stderr or done.stdout).strip().splitlines()[-1:]
            raise ModelError(
                f"{TOOL} failed with exit code {done.returncode}: {' '.join(last)}",
                where=str(file),
                fix="Write q8_0 or bf16, which need no llama-quantize, or update llama.cpp.",
            )


def _write_own(model: PreTrainedModel, file: Path, tokenizer: Any, kind: str) -> None:
    import gguf

    family, config = gguf_family(model.config), model.config
    if family.tied_only and unties_head(model):
        raise UnsupportedModelError(
            f"A {config.model_type} model with a trained output head of its own cannot be converted to GGUF.",
            fix="Use a merged save and another engine.",
        )
    if (notice := dequantized_notice(model)) is not None:
        logger.warning("%s", notice)
    arch = gguf.MODEL_ARCH[family.arch]
    tensors = list(_file_tensors(model, family, arch, kind))
    vocabulary = read_vocabulary(tokenizer, config.vocab_size)
    writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[arch])
    try:
        _add_keys(writer, config, kind)
        add_vocabulary(writer, tokenizer, vocabulary)
        for tensor in tensors:
            quant_type = gguf.GGMLQuantizationType[tensor.kind]
            shape = gguf.quant_shape_to_byte_shape(tensor.shape, quant_type)
            size = math.prod(shape)
            writer.add_tensor_info(tensor.name, shape, np.dtype("uint8"), size, raw_dtype=quant_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor in tensors:
            writer.write_tensor_data(_encoded(tensor))
    except OSError as err:
        raise StorageError(f"Writing {file.name} failed: {err}.", where=str(file), fix="Free disk space.") from err
    finally:
        writer.close()


def _encoded(tensor: FileTensor) -> Any:
    import gguf

    values = tensor.read()
    if tensor.kind == "F16" and float(values.abs().max()) > torch.finfo(torch.float16).max:
        raise ModelError(f"{tensor.name} has values beyond the range of f16.", fix="Use bf16 or q8_0.")
    encoded = gguf.quants.quantize(values.numpy(), gguf.GGMLQuantizationType[tensor.kind])
    return encoded.view("uint8")


def _add_keys(writer: Any, config: Any, kind: str) -> None:
    import gguf

    writer.add_name(Path(config.name_or_path or config.model_type).name)
    writer.add_file_type(gguf.LlamaFileType[_FILE_TYPES[kind]])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_size(config))
    writer.add_value_length(head_size(config))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    add_rope_keys(writer, config)
    match config.model_type:
        case "gemma2":
            writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
            writer.add_final_logit_softcapping(config.final_logit_softcapping)
        case "gemma3_text" if config.final_logit_softcapping is not None:
            writer.add_final_logit_softcapping(config.final_logit_softcapping)
        case "granite":
            writer.add_attention_scale(config.attention_multiplier)
            writer.add_embedding_scale(config.embedding_multiplier)
            writer.add_residual_scale(config.residual_multiplier)
            writer.add_logit_scale(config.logits_scaling)
        case "phi3":
            writer.add_sliding_window(config.sliding_window or 0)
    if config.model_type in ("gemma2", "gemma3_text"):
        writer.add_sliding_window(config.sliding_window)
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])


def _file_tensors(model: PreTrainedModel, family: GgufFamily, arch: Any, kind: str) -> Iterator[FileTensor]:
    import gguf

    config = model.config
    for name, factors in rope_tensors(config).items():
        yield FileTensor(name, tuple(factors.shape), "F32", partial(_same, factors))
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for name, tensor in merged_tensors(model, torch.float32).items():
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if target is None:
            raise UnsupportedModelError(
                f"llama.cpp has no tensor for {name} of this {config.model_type} model.", fix=SAVE_MERGED
            )
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        layer = name.split(".")[-2]
        yield FileTensor(
            target,
            tuple(tensor.shape),
            _kind_of(tensor, kind),
            _reader(
                tensor,
                heads=heads.get(layer) if family.interleaved_rope else None,
                offset=family.norm_offset and name.endswith("norm.weight"),
            ),
        )


def _same(values: Tensor) -> Tensor:
    return values


def _kind_of(tensor: LazyTensor, kind: str) -> str:
    """Vectors stay in float32; rows that are no multiple of a q8_0 block are in f16."""
    if len(tensor.shape) == 1:
        return "F32"
    return "F16" if kind == "q8_0" and tensor.shape[-1] % 32 else kind.upper()


def _reader(tensor: LazyTensor, *, heads: int | None, offset: bool) -> Callable[[], Tensor]:
    def read() -> Tensor:
        values = tensor.read()
        if heads is not None:
            values = _interleaved(values, heads)
        return values + 1 if offset else values

    return read


def _interleaved(weight: Tensor, heads: int) -> Tensor:
    """Reorder the rows of each head: transformers rotates row i with row i + half, llama.cpp row 2i with row 2i + 1."""
    halves = weight.unflatten(0, (heads, 2, -1))
    return halves.transpose(1, 2).flatten(0, 2).contiguous()
