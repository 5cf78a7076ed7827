"""Load a fine-tuned model, to generate with it or to export it as one plain model."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from peft import PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from torch import nn
from transformers import PreTrainedModel

from pantheraml.base.errors import ConfigError, ModelError
from pantheraml.base.folders import committed_folder, require_empty
from pantheraml.models.adapter_file import ADAPTER_ERRORS, read_adapter
from pantheraml.models.adapter_patterns import require_bounded
from pantheraml.models.adapters import ADAPTER, base_quantization
from pantheraml.models.base_identity import verified_base
from pantheraml.models.gguf.kinds import parse_kinds
from pantheraml.models.gguf.save import check_gguf, write_gguf_file
from pantheraml.models.loader import has_tokenizer, load_model, load_tokenizer, model_folder, read_config
from pantheraml.models.quantize.checkpoint_formats import detect_checkpoint_format
from pantheraml.models.quantize.quantized_linear import LORA_LAYERS
from pantheraml.models.saved_embeddings import restore_embeddings
from pantheraml.models.saving.merged_folder import write_merged
from pantheraml.models.trained_copies import use_float32_copies
from pantheraml.specs.train import MethodConfig, ModelConfig


def load_finetuned_model(
    model_config: ModelConfig, method: MethodConfig, finetuned_dir: Path, *, dtype: torch.dtype, device: torch.device
) -> nn.Module:
    """Load the model as it was trained: the base (quantized if it was) with its adapter, or the full model."""
    if method.kind == "full":
        return load_model(_as_plain(model_config, finetuned_dir), dtype=dtype, device=device)
    base = load_model(model_config, dtype=dtype, device=device, quantize=base_quantization(model_config, method))
    return load_adapter(base, finetuned_dir).eval()


def load_to_merge(
    model_config: ModelConfig,
    method: MethodConfig,
    finetuned_dir: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    plain_base: bool = False,
) -> PreTrainedModel:
    """Load the model whose adapter, if it has one, is to be merged while it is saved.

    An adapter over nf4 was trained against the quantized base, so it is merged into the dequantized weights, unless
    `plain_base` selects the weights before quantization.
    """
    if method.kind == "full":
        model = load_finetuned_model(model_config, method, finetuned_dir, dtype=dtype, device=device)
    else:
        quant_format = base_quantization(model_config, method)
        if plain_base:
            _require_plain_base(model_config, quant_format)
            quant_format = None
        base = load_model(model_config, dtype=dtype, device=device, quantize=quant_format or "dense")
        model = load_adapter(base, finetuned_dir).get_base_model()
    loaded = cast(PreTrainedModel, model)
    # training disables the cache; the saved config has the base model's setting
    loaded.config.get_text_config().use_cache = read_config(model_config).get_text_config().use_cache
    return loaded


def export_merged(
    model_config: ModelConfig,
    method: MethodConfig,
    finetuned_dir: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    output: Path,
    plain_base: bool = False,
) -> None:
    """Write a plain Hugging Face folder, weights and tokenizer, that needs neither PEFT nor this package."""
    require_empty(output)
    tokenizer = finetuned_tokenizer(model_config, finetuned_dir)
    model = load_to_merge(model_config, method, finetuned_dir, dtype=dtype, device=device, plain_base=plain_base)
    with committed_folder(output) as folder:
        write_merged(model, folder, tokenizer, dtype=dtype)


def export_gguf(
    model_config: ModelConfig,
    method: MethodConfig,
    finetuned_dir: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    output: Path,
    kind: str,
    plain_base: bool = False,
) -> None:
    """Write the file `output` in GGUF format, with the adapter merged."""
    (parsed,) = parse_kinds(kind)
    tokenizer = finetuned_tokenizer(model_config, finetuned_dir)
    check_gguf(read_config(model_config), tokenizer)
    model = load_to_merge(model_config, method, finetuned_dir, dtype=dtype, device=device, plain_base=plain_base)
    write_gguf_file(model, output, tokenizer, parsed)


def finetuned_tokenizer(model_config: ModelConfig, finetuned_dir: Path) -> Any:
    """Return the tokenizer that was saved with the trained weights."""
    return load_tokenizer(_as_plain(model_config, finetuned_dir))


def _require_plain_base(model_config: ModelConfig, quant_format: str | None) -> None:
    """ConfigError unless the adapter was trained over 4-bit weights of a base that has unquantized weights."""
    if quant_format is None:
        raise ConfigError(
            "--base plain is for adapters trained over 4-bit weights, and this one was not.",
            fix="Omit it: the adapter is merged into the plain weights anyway.",
        )
    checkpoint_format = detect_checkpoint_format(read_config(model_config))
    if checkpoint_format is not None:
        raise ConfigError(
            f"The base has no plain weights: its checkpoint is quantized in {checkpoint_format.quant_format}.",
            where=model_config.path,
            fix="Omit --base, or load the adapter onto the plain model with PEFT.",
        )


def _as_plain(model_config: ModelConfig, folder: Path) -> ModelConfig:
    """Return the same settings for a model in `folder` with its own tokenizer."""
    changes = {"path": str(folder), "tokenizer": None, "init": "pretrained", "revision": None}
    return model_config.model_copy(update=changes)


def adapter_base(model_config: ModelConfig) -> tuple[Path, ModelConfig] | None:
    """Return the folder of an adapter, and its base with the adapter's tokenizer if there is one; None for a model."""
    folder = model_folder(model_config)
    if not (folder / "adapter_config.json").is_file() or (folder / "config.json").is_file():
        return None
    config, _ = read_adapter(folder)
    if config.base_model_name_or_path is None:
        raise ModelError(
            f"The adapter in {folder} does not name its base model.",
            fix="Set base_model_name_or_path in its adapter_config.json.",
        )
    tokenizer = str(folder) if has_tokenizer(folder) else None
    changes = {"path": config.base_model_name_or_path, "revision": config.revision, "tokenizer": tokenizer}
    # adapters saved by other tools have no record of their base, which then cannot be verified
    base, _ = verified_base(model_config.model_copy(update=changes), folder)
    return folder, base


def load_adapter(base: PreTrainedModel, folder: Path, *, trainable: bool = False) -> PeftModel:
    """Return `base` with the adapter in `folder`, which must fit it tensor for tensor."""
    config, weights = read_adapter(folder)
    config.inference_mode = not trainable
    # PEFT warns if the base path differs from the one in training; whether it fits is checked below
    config.base_model_name_or_path = None
    config._register_custom_module(LORA_LAYERS)
    require_bounded(config, [name for name, _ in base.named_modules()], folder)
    with torch.random.fork_rng(devices=[]):
        weights = restore_embeddings(base, config, weights, folder)
        try:
            adapted = cast(PeftModel, get_peft_model(base, config, adapter_name=ADAPTER))
        except ADAPTER_ERRORS as err:
            raise ModelError(
                f"The adapter in {folder} does not fit its base model: {err}",
                fix="Use the base model that the adapter was trained on.",
            ) from err
    use_float32_copies(adapted, base.dtype)  # before their weights are loaded, which would be rounded
    expected = get_peft_model_state_dict(adapted, adapter_name=ADAPTER, save_embedding_layers=False)
    if {name: w.shape for name, w in expected.items()} != {name: w.shape for name, w in weights.items()}:
        raise ModelError(
            f"The adapter in {folder} does not fit its base model: the names or shapes of its weights differ.",
            fix="Use the base model that the adapter was trained on.",
        )
    set_peft_model_state_dict(adapted, weights, adapter_name=ADAPTER)
    return adapted
