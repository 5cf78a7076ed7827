"""Arguments of the loaders: checked, and resolved to what is loaded."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from pydantic import ValidationError

from pantheraml.base import env, log
from pantheraml.base.env import multi_gpu_requested
from pantheraml.base.errors import ConfigError, DeviceError, UnsupportedModelError
from pantheraml.models.chat_inputs import accept_both_forms, answer_as_processor
from pantheraml.models.loader import kind_of, load_tokenizer, read_config
from pantheraml.models.model_kind import VISION, ModelKind
from pantheraml.models.processor import load_processor
from pantheraml.models.quantize.quantized_linear import QuantFormat
from pantheraml.models.rope import supported_positions
from pantheraml.parallel.device_map import (
    DeviceMap,
)
from pantheraml.planner.precision import (
    TORCH_NAMES,
    Capability,
    choose_fp8,
    choose_precision,
    parse_precision,
    why_no_fp8,
)
from pantheraml.specs.section_errors import without_fix
from pantheraml.specs.train import Checkpointing, MethodConfig, ModelConfig

logger = log.get(__name__)

CheckpointingMode = bool | Literal["unsloth", "offload", "selective"]

CHECKPOINTING: Mapping[CheckpointingMode, Checkpointing] = {
    True: "full", "unsloth": "offload", "offload": "offload", "selective": "selective",
}  # fmt: skip


def check_checkpointing(mode: CheckpointingMode) -> None:
    if mode is not False and mode not in CHECKPOINTING:
        known = ", ".join(repr(mode) for mode in (False, *CHECKPOINTING))
        raise ConfigError(
            f"use_gradient_checkpointing={mode!r} is not one of {known}.",
            fix="Use True, False or one of the names above.",
        )


@contextlib.contextmanager
def hub_token(token: str | bool | None) -> Iterator[None]:
    """Use `token` for downloads; None and True: the one that `hf auth login` or HF_TOKEN has set."""
    if token is False:
        raise ConfigError("token=False is not supported.", fix="Unset HF_TOKEN, or log out with `hf auth logout`.")
    with env.changed({"HF_TOKEN": token}) if isinstance(token, str) and token else contextlib.nullcontext():
        yield


def method_config(**fields: Any) -> MethodConfig:
    try:
        return MethodConfig(**fields)
    except ValidationError as err:
        names = {"rank": "r", "alpha": "lora_alpha", "dropout": "lora_dropout", "rslora": "use_rslora"}
        first = err.errors()[0]
        field = str(first["loc"][0])
        raise ConfigError(
            f"{names.get(field, field)}={fields[field]!r}: {without_fix(first['msg'])}.",
            fix="See method in docs/configuration.md for the values it takes.",
        ) from err


def resolve_auto_map(device_map: DeviceMap | None) -> DeviceMap:
    if device_map not in (None, "auto"):
        raise ConfigError(
            f'auto_device_map means device_map="auto", but device_map is {device_map!r}.', fix="Set only one."
        )
    return "auto"


def translate_unsloth_loading(
    dtype: torch.dtype | str | None, device_map: DeviceMap | None, others: dict[str, Any]
) -> tuple[torch.dtype | str | None, DeviceMap | None]:
    """Return `dtype`, also by its old name, and `device_map`, also by Unsloth's name; each with one line."""
    if "torch_dtype" in others:
        old = others.pop("torch_dtype")
        if None not in (old, dtype) and old != dtype:
            raise ConfigError("from_pretrained got torch_dtype and dtype, which disagree.", fix="Remove torch_dtype.")
        logger.warning("from_pretrained: torch_dtype is called dtype")
        dtype = old if dtype is None else dtype
    if device_map == "unsloth":
        logger.warning('device_map="unsloth" is read as "balanced": the loss needs no room for logits beside the head')
        device_map = "balanced"
    return dtype, device_map


def wants_multi_gpu(enable: bool | None, use: bool | None) -> bool:
    if enable is not None and use is not None and enable != use:
        raise ConfigError(
            "enable_multi_gpu and use_multi_gpu are aliases, but their values differ.", fix="Set only one."
        )
    requested = use if enable is None else enable
    return multi_gpu_requested() if requested is None else requested


def requested_quant_format(four_bit: bool, eight_bit: bool, fp8: bool | None, sixteen_bit: bool) -> QuantFormat | None:
    """Return the quantization format of frozen weights; None: as in the checkpoint."""
    kinds: dict[QuantFormat, bool | None] = {"nf4": four_bit, "int8": eight_bit, "fp8": fp8}
    requested = [kind for kind, enabled in kinds.items() if enabled]
    if len(requested) + sixteen_bit > 1:
        raise ConfigError(
            "load_in_4bit, load_in_8bit, load_in_fp8 and load_in_16bit are mutually exclusive.", fix="Choose one."
        )
    return requested[0] if requested else None


def default_fp8(device: torch.device, *, split: bool) -> QuantFormat | None:
    """Return fp8 where it was measured to be faster at the same loss; otherwise weights stay as in the checkpoint."""
    if device.type != "cuda":
        return None
    unfit = "the model is on several devices" if split else None
    chosen, reason = choose_fp8(_capabilities(device), unfit=unfit)
    logger.info("frozen weights %s: %s", "are quantized to fp8" if chosen else "keep the checkpoint's dtype", reason)
    return "fp8" if chosen else None


def _capabilities(device: torch.device) -> list[Capability | None]:
    return [torch.cuda.get_device_capability(device)] if device.type == "cuda" else []


def check_quant_format(quant_format: QuantFormat | None, full: bool, device: torch.device) -> None:
    if full and quant_format not in (None, "fp8"):
        raise ConfigError(
            f"full_finetuning trains every weight, but {quant_format} weights cannot be trained.",
            fix="Remove full_finetuning, and use get_peft_model.",
        )
    problem = why_no_fp8(_capabilities(device)) if quant_format == "fp8" else None
    if problem is not None:
        raise DeviceError(
            f"load_in_fp8 is not possible on {torch.cuda.get_device_name(device)}: {problem}.",
            fix="Use load_in_4bit or no quantization.",
        )


def tokenizer_with_length(config: ModelConfig, max_seq_length: int | None, kind: ModelKind) -> Any:
    """Load the tokenizer, or the processor of a vision-language model.

    For the text model inside a vision-language one, the tokenizer also answers as the processor that scripts expect.
    """
    loaded = load_processor(config) if kind is VISION else load_tokenizer(config)
    if kind is not VISION and kind_of(config) is VISION:
        loaded = answer_as_processor(loaded)
    tokenizer = accept_both_forms(loaded.tokenizer if kind is VISION else loaded)
    if max_seq_length is not None:
        tokenizer.model_max_length = max_seq_length
    return loaded


def checkpoint_dtype(config: ModelConfig, kind: ModelKind) -> torch.dtype | None:
    """Return the dtype that the checkpoint's config names, if any."""
    source = read_config(config, kind)
    dtype: torch.dtype | None = getattr(source.get_text_config(), "dtype", None) or getattr(source, "dtype", None)
    return dtype


def check_loaded_length(requested: int, config: Any) -> None:
    """Check a `max_seq_length` that comes after the model was loaded, when its RoPE can no longer be scaled."""
    if not isinstance(requested, int) or requested < 1:
        raise ConfigError(
            f"max_seq_length={requested!r} is not a positive integer.",
            fix="Pass the number of tokens of the longest sequence, such as 2048.",
        )
    positions = supported_positions(config)
    if positions is not None and requested > positions:
        raise UnsupportedModelError(
            f"max_seq_length={requested} is more than the {positions} positions of the loaded model.",
            fix=f"Use max_seq_length={positions} or less, or pass {requested} to from_pretrained, to scale its RoPE.",
        )


def chosen_dtype(requested: torch.dtype | str | None, full: bool, device: torch.device) -> torch.dtype:
    """Return the dtype of the weights, by the rule of `pantheraml train`; weights to be trained are float32.

    On a CPU, fp16 is for generating and saving alone: `get_peft_model` and trainers refuse such a model.
    """
    given = parse_precision(requested)
    if given == "fp16" and device.type == "cpu" and not full:
        logger.warning(
            "fp16 on a CPU: the model can generate and be saved, but not be trained; that needs fp32 or bf16"
        )
        return torch.float16
    precision, reason = choose_precision(given, "cuda" if device.type == "cuda" else "cpu", _capabilities(device))
    if full and given is None:
        precision, reason = "fp32", "small weight updates are lost in bf16"
    if given is None:
        logger.info("dtype is %s: %s", TORCH_NAMES[precision], reason)
    dtype: torch.dtype = getattr(torch, TORCH_NAMES[precision])
    return dtype
