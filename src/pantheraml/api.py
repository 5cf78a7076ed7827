"""`FastLanguageModel`: fast models for existing training code.

Names and arguments follow Unsloth as far as they go. The result is a transformers model and a PEFT model, which TRL's
`SFTTrainer` trains like any other. An argument that cannot be honored is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, cast

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from pydantic import ValidationError
from torch import nn
from transformers import PreTrainedModel

from pantheraml import multigpu
from pantheraml.base import log
from pantheraml.base.env import launched_rank, multi_gpu_requested, process_rank
from pantheraml.base.errors import ConfigError, DeviceError, UnsupportedModelError
from pantheraml.engine.compile import compile_steady_shapes
from pantheraml.engine.memory.checkpointing import apply_checkpointing
from pantheraml.hooks import trl
from pantheraml.models.adapters import apply_method, base_name
from pantheraml.models.causal_lm import FastCausalLM, make_fast
from pantheraml.models.fast import (
    enable_layer_graphs,
    fuse,
    quantize_head_like_layers,
    release_layer_graphs,
    second_layouts,
    why_one_layout,
)
from pantheraml.models.loader import load_model, load_tokenizer, read_config
from pantheraml.models.module_walk_cache import use_cached_walk
from pantheraml.models.packing_check import PackingSupport, isolate_documents
from pantheraml.models.quantize.fp8 import FP8Linear
from pantheraml.models.quantize.fp8_training import use_fp8_matmuls
from pantheraml.models.quantize.nf4 import NF4Linear
from pantheraml.models.quantize.quantized_linear import QuantFormat, constant_buffers, quant_formats_of
from pantheraml.parallel.data import ignore_in_ddp
from pantheraml.parallel.device_map import (
    STRATEGIES,
    Device,
    DeviceMap,
    MaxMemory,
    is_split,
    memory_for_weights,
    named_devices,
    place,
    place_in_group,
    split,
)
from pantheraml.planner.choose import FP8_CAPABILITY
from pantheraml.planner.fp8_layout_choice import layouts_for
from pantheraml.specs.plan import Layouts
from pantheraml.specs.train import Checkpointing, MethodConfig, ModelConfig

logger = log.get(__name__)

CheckpointingMode = bool | Literal["unsloth", "offload", "selective"]

_CHECKPOINTING: Mapping[CheckpointingMode, Checkpointing] = {
    True: "full", "unsloth": "offload", "offload": "offload", "selective": "selective",
}  # fmt: skip
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

# Arguments that scripts written for Unsloth pass, with the values that have no effect.
_LOADING_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "token": (None,), "rope_scaling": (None,), "fix_tokenizer": (True,), "resize_model_vocab": (None,),
    "fast_inference": (False,),
}  # fmt: skip
_ADAPTER_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "layers_to_transform": (None,), "layers_pattern": (None,), "modules_to_save": (None,),
    "init_lora_weights": (True,), "loftq_config": (None, {}),
}  # fmt: skip


class FastLanguageModel:
    """`from_pretrained` loads a model, `get_peft_model` adds adapters; train it with any trainer."""

    @staticmethod
    def from_pretrained(
        model_name: str,
        max_seq_length: int | None = None,
        dtype: torch.dtype | str | None = None,
        load_in_4bit: bool = False,
        load_in_8bit: bool = False,
        load_in_fp8: bool | None = None,
        full_finetuning: bool = False,
        device_map: DeviceMap | None = None,
        *,
        revision: str | None = None,
        trust_remote_code: bool = False,
        use_gradient_checkpointing: CheckpointingMode = False,
        enable_multi_gpu: bool | None = None,
        use_multi_gpu: bool | None = None,
        auto_device_map: bool = False,
        max_memory: MaxMemory | None = None,
        **others: Any,
    ) -> tuple[PreTrainedModel, Any]:
        """Load a model and its tokenizer.

        Without `full_finetuning` every weight is frozen, and `get_peft_model` adds the trainable ones.
        `max_seq_length`: length at which the tokenizer truncates; None leaves the tokenizer's own.
        `dtype` None: bf16 or fp16, as the GPU supports; float32 on a CPU and for full fine-tuning.
        `load_in_fp8` None: yes, if nothing else is requested (another load_in_..., dtype, full_finetuning, several
        devices) and the GPU supports it; the loss matches bf16, see docs/benchmarks.md. With `full_finetuning`, True
        means fp8 matmuls in the decoder layers; their weights keep their dtype.
        `device_map` None: this process's GPU, or the CPU if there is none. Or a device, or a mapping from modules to
        devices; or auto, balanced, sequential, which spread the layers over all GPUs if multi-GPU is enabled, and mean
        the first GPU if not. `max_memory` then limits the weights on each device. A rank has one device.
        `auto_device_map` is an alias of `device_map="auto"`.
        `enable_multi_gpu` (or `use_multi_gpu`) True: a script started as a single process is relaunched as one process
        per GPU, see `pantheraml.multigpu`, unless `device_map` spreads the model; None: as PANTHERAML_ENABLE_MULTIGPU
        says.
        """
        _reject_unsupported(others, _LOADING_NEUTRAL, "from_pretrained")
        multi_gpu = _multi_gpu(enable_multi_gpu, use_multi_gpu)
        if auto_device_map:
            device_map = _resolve_auto_map(device_map)
        if multi_gpu and not (_may_span_devices(device_map) and launched_rank() is None):
            multigpu.enable_multi_gpu()
        device, free_memory = _resolve_devices(device_map, max_memory, multi_gpu=multi_gpu)
        quant_format = _quant_format(load_in_4bit, load_in_8bit, load_in_fp8)
        if quant_format is None and load_in_fp8 is None and dtype is None and not full_finetuning:
            quant_format = _default_fp8(device, split=free_memory is not None)
        _check_quant_format(quant_format, full_finetuning, use_gradient_checkpointing, device)
        config = ModelConfig(path=model_name, revision=revision, trust_remote_code=trust_remote_code)
        tokenizer = _tokenizer(config, max_seq_length)
        model = load_model(
            config,
            dtype=_dtype(dtype, full_finetuning, device),
            device=device if free_memory is None else torch.device("cpu"),
            quantize="dense" if full_finetuning else quant_format,
        )
        _restore_saved_config(model, config)
        model.requires_grad_(full_finetuning)
        isolation = _prepare_for_packing(model)
        fast = make_fast(model)
        fast.why_not_packed, fast.packed_within = isolation.reason, isolation.within
        if free_memory is not None:
            assert device_map is not None
            split(model, place(model, device_map, free_memory, max_memory))
        if full_finetuning:
            _speed_up_full(fast, model, use_gradient_checkpointing, in_fp8=quant_format == "fp8")
        trl.apply()
        return model, tokenizer

    @staticmethod
    def get_peft_model(
        model: PreTrainedModel,
        r: int = 16,
        target_modules: str | list[str] = "all-linear",
        lora_alpha: float = 16,
        lora_dropout: float = 0.0,
        bias: str = "none",
        use_gradient_checkpointing: CheckpointingMode = False,
        random_state: int = 3407,
        use_rslora: bool = False,
        use_dora: bool = False,
        **others: Any,
    ) -> PeftModel:
        """Add LoRA (or DoRA) adapters in float32 to `model`, fused where that is exact.

        `use_gradient_checkpointing`: True recomputes whole layers; "selective" saves what is expensive to recompute;
        "offload" (or "unsloth") keeps layer inputs in host memory; False leaves it to the trainer's own
        `gradient_checkpointing`.
        """
        _reject_unsupported(others, _ADAPTER_NEUTRAL, "get_peft_model")
        _check_base_model(model, use_dora=use_dora)
        if bias != "none":
            raise ConfigError(f"bias={bias!r} is not supported: biases are never trained.", fix='Use bias="none".')
        method = _method(
            kind="dora" if use_dora else "lora",
            rank=r,
            alpha=lora_alpha,
            dropout=lora_dropout,
            rslora=use_rslora,
            target_modules=target_modules,
        )
        adapted: Any = apply_method(model, method, seed=random_state)
        use_cached_walk(adapted)
        _speed_up(model, adapted, use_gradient_checkpointing)
        ignore_in_ddp(
            adapted, constant_buffers(adapted)
        )  # otherwise a trainer's DDP would broadcast quantized weights before every forward
        return adapted

    @staticmethod
    def for_training(model: nn.Module) -> nn.Module:
        return model.train()

    @staticmethod
    def for_inference(model: nn.Module) -> nn.Module:
        """Disable dropout, and return full logits from every forward."""
        release_layer_graphs(model)
        return model.eval()


def _prepare_for_packing(model: PreTrainedModel) -> PackingSupport:
    """Return whether rows of several documents are correct; if they are, documents are isolated from now on."""
    isolation = isolate_documents(model)  # for rows of any length, as the trainer decides
    if isolation.masked is not None:
        logger.info("attention in packed batches needs a mask: %s", isolation.masked)
    if isolation.refused is not None:
        raise UnsupportedModelError(f"The model cannot be trained on text: {isolation.refused}.", fix="Use a decoder.")
    if not isolation.modes:
        logger.warning("rows with several documents (packing, padding_free) are rejected: %s", isolation.reason)
    return isolation


def _check_base_model(model: nn.Module, *, use_dora: bool) -> None:
    """Check the model that is to get adapters."""
    if any(isinstance(layer, BaseTunerLayer) for layer in model.modules()):
        raise ConfigError(
            "This model already has adapters.", fix="Train those, or pass the result of `model.unload()`."
        )
    if not isinstance(model, FastCausalLM):
        raise ConfigError(
            f"get_peft_model needs a model from FastLanguageModel.from_pretrained, not a {type(model).__name__}."
        )
    if use_dora and (formats := quant_formats_of(cast(nn.Module, model))):
        raise ConfigError(
            f"use_dora=True needs unquantized weights, but this model's are in {' and '.join(formats)}.",
            fix="Load it with dtype=torch.bfloat16, without load_in_4bit, load_in_8bit or load_in_fp8.",
        )


def _speed_up(
    fast: FastCausalLM, full_model: nn.Module, checkpointing: CheckpointingMode, *, fused: bool = True
) -> None:
    if is_split(full_model):
        logger.info("layers are not fused: the model is on several devices")
        if checkpointing in ("unsloth", "offload"):
            raise ConfigError(
                f"use_gradient_checkpointing={checkpointing!r} needs one device, but the model is on several.",
                fix='Use True or "selective".',
            )
    elif fused:
        _fuse(fast, full_model, checkpointing)
        fast.prelaunch = enable_layer_graphs(full_model)
    if checkpointing is False:
        return
    if checkpointing not in _CHECKPOINTING:
        known = ", ".join(repr(mode) for mode in (False, *_CHECKPOINTING))
        raise ConfigError(f"use_gradient_checkpointing={checkpointing!r} is not one of {known}.")
    apply_checkpointing(full_model, _CHECKPOINTING[checkpointing])
    fast.lock_checkpointing(_CHECKPOINTING[checkpointing])


def _speed_up_full(
    fast: FastCausalLM, model: PreTrainedModel, checkpointing: CheckpointingMode, *, in_fp8: bool
) -> None:
    if in_fp8:
        use_fp8_matmuls(model)
    # With bf16 matmuls compiled layers are faster, but checkpointed layers are not compiled. In a multi-process run the
    # trainer may shard the weights, which fused layers need whole.
    recomputes = checkpointing not in (False, "selective") and model.device.type == "cuda" and launched_rank() is None
    _speed_up(fast, model, checkpointing, fused=in_fp8 or recomputes)
    if checkpointing is False and model.device.type == "cuda" and not is_split(model):
        compile_steady_shapes(model)


def _fuse(fast: FastCausalLM, full_model: nn.Module, checkpointing: CheckpointingMode) -> None:
    nf4 = any(isinstance(layer, NF4Linear) for layer in full_model.modules())
    on_cpu = next(full_model.parameters()).device.type == "cpu"
    layouts = _fp8_layouts(full_model, checkpointing)
    # On a CPU fusing gains nothing, and fp8 matmuls of nf4 weights would round where the plain ones do not.
    fused = not (nf4 and on_cpu) and fuse(full_model, layouts=layouts).fused > 0
    quantize_head_like_layers(fast, fused=fused)
    if layouts == 2 and second_layouts(full_model):
        logger.info("MLP fp8 weights are stored in two layouts: %s", layouts_for("none")[1])


def _fp8_layouts(full_model: nn.Module, checkpointing: CheckpointingMode) -> Layouts:
    if not any(isinstance(layer, FP8Linear) for layer in full_model.modules()):
        return 1
    layouts, reason = layouts_for(_CHECKPOINTING.get(checkpointing, "none"))
    if layouts == 2 and (too_large := why_one_layout(full_model)) is not None:
        layouts, reason = 1, too_large
    if layouts == 1:
        logger.info("MLP fp8 weights are stored in one layout: %s", reason)
    return layouts


def _reject_unsupported(others: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]], function: str) -> None:
    for name, value in others.items():
        if name not in neutral:
            raise ConfigError(f"FastLanguageModel.{function} has no argument {name!r}.")
        if value not in neutral[name]:
            fix = "Set HF_TOKEN in the environment." if name == "token" else "Remove it."
            argument = name if name == "token" else f"{name}={value!r}"
            raise ConfigError(f"FastLanguageModel.{function} does not support {argument}.", fix=fix)


def _method(**fields: Any) -> MethodConfig:
    try:
        return MethodConfig(**fields)
    except ValidationError as err:
        names = {"rank": "r", "alpha": "lora_alpha", "dropout": "lora_dropout", "rslora": "use_rslora"}
        first = err.errors()[0]
        field = str(first["loc"][0])
        raise ConfigError(f"{names.get(field, field)}={fields[field]!r}: {first['msg']}.") from err


def _resolve_auto_map(device_map: DeviceMap | None) -> DeviceMap:
    if device_map not in (None, "auto"):
        raise ConfigError(
            f'auto_device_map means device_map="auto", but device_map is {device_map!r}.', fix="Set only one."
        )
    return "auto"


def _may_span_devices(device_map: DeviceMap | None) -> bool:
    """Return whether a device map may put one model on several devices."""
    if isinstance(device_map, Mapping):
        return list(device_map) != [""]
    return isinstance(device_map, str) and device_map in STRATEGIES


def _resolve_devices(
    device_map: DeviceMap | None, max_memory: MaxMemory | None, *, multi_gpu: bool
) -> tuple[torch.device, dict[Device, int] | None]:
    """Return this process's device, and the free memory of the devices to place the model on, unless it is all on
    one.
    """
    own_device = torch.device("cuda", process_rank().local_rank) if torch.cuda.device_count() else torch.device("cpu")
    is_single_process = launched_rank() is None
    if max_memory is not None and (device_map is None or not is_single_process):
        raise ConfigError("max_memory needs a device_map and a single process.", fix="Remove it.")
    if device_map is None:
        return own_device, None
    free_memory = memory_for_weights()
    named = named_devices(device_map, free_memory)
    if (
        named
        and not _may_span_devices(device_map)
        and max_memory is None
        and (is_single_process or named == [torch.device("cpu")])
    ):
        return named[0], None
    if not is_single_process:
        place_in_group(device_map, "cpu" if own_device.type == "cpu" else own_device.index)
        return own_device, None
    if not named and not multi_gpu:
        free_memory = dict(list(free_memory.items())[:1])
    fits_one_device = not named and len(free_memory) == 1 and max_memory is None
    return named[0] if named else own_device, None if fits_one_device else free_memory


def _multi_gpu(enable: bool | None, use: bool | None) -> bool:
    if enable is not None and use is not None and enable != use:
        raise ConfigError(
            "enable_multi_gpu and use_multi_gpu are aliases, but their values differ.", fix="Set only one."
        )
    requested = use if enable is None else enable
    return multi_gpu_requested() if requested is None else requested


def _quant_format(four_bit: bool, eight_bit: bool, fp8: bool | None) -> QuantFormat | None:
    """Return the quantization format of frozen weights; None: as in the checkpoint."""
    kinds: dict[QuantFormat, bool | None] = {"nf4": four_bit, "int8": eight_bit, "fp8": fp8}
    requested = [kind for kind, enabled in kinds.items() if enabled]
    if len(requested) > 1:
        raise ConfigError("load_in_4bit, load_in_8bit and load_in_fp8 are mutually exclusive.", fix="Choose one.")
    return requested[0] if requested else None


def _default_fp8(device: torch.device, *, split: bool) -> QuantFormat | None:
    """Return fp8 where it was measured to be faster at the same loss; otherwise weights stay as in the checkpoint."""
    if device.type != "cuda" or split:
        return None
    capability = torch.cuda.get_device_capability(device)
    if capability < FP8_CAPABILITY:
        logger.info("frozen weights keep the checkpoint's dtype: fp8 needs compute capability 9.0 or newer")
        return None
    logger.info("frozen weights are quantized to fp8: compute capability %s.%s has fp8 tensor cores", *capability)
    return "fp8"


def _check_quant_format(
    quant_format: QuantFormat | None, full: bool, checkpointing: CheckpointingMode, device: torch.device
) -> None:
    if full and quant_format not in (None, "fp8"):
        raise ConfigError(
            f"full_finetuning trains every weight, but {quant_format} weights cannot be trained.",
            fix="Remove full_finetuning, and use get_peft_model.",
        )
    if checkpointing is not False and not full:
        raise ConfigError(
            "from_pretrained takes use_gradient_checkpointing only with full_finetuning=True.",
            fix="Pass it to get_peft_model.",
        )
    if quant_format == "fp8" and device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability < FP8_CAPABILITY:
            raise DeviceError(
                f"load_in_fp8 needs compute capability {FP8_CAPABILITY[0]}.{FP8_CAPABILITY[1]} or newer; "
                f"{torch.cuda.get_device_name(device)} has {capability[0]}.{capability[1]}.",
                fix="Use load_in_4bit or no quantization.",
            )


def _tokenizer(config: ModelConfig, max_seq_length: int | None) -> Any:
    positions = getattr(read_config(config).get_text_config(), "max_position_embeddings", None)
    _check_length(max_seq_length, positions)
    tokenizer = load_tokenizer(config)
    if max_seq_length is not None:
        tokenizer.model_max_length = max_seq_length
    return tokenizer


def _restore_saved_config(model: PreTrainedModel, config: ModelConfig) -> None:
    """Undo config changes made while loading: they would be saved with the model."""
    model.config.get_text_config().use_cache = read_config(config).get_text_config().use_cache
    model.name_or_path = model.config.name_or_path = base_name(config)


def _check_length(requested: int | None, max_positions: int | None) -> None:
    if requested is not None and (not isinstance(requested, int) or requested < 1):
        raise ConfigError(f"max_seq_length={requested!r} is not a positive integer.")
    if requested is not None and max_positions is not None and requested > max_positions:
        raise UnsupportedModelError(
            f"max_seq_length={requested} is more than the {max_positions} positions that the model supports.",
            fix=f"Use max_seq_length={max_positions} or less.",
        )


def _dtype(requested: torch.dtype | str | None, full: bool, device: torch.device) -> torch.dtype:
    if isinstance(requested, str):
        requested = _DTYPES.get(requested.removeprefix("torch."), requested)
    if requested is not None and requested not in _DTYPES.values():
        raise ConfigError(f"dtype={requested!r} is not one of {', '.join(_DTYPES)}.")
    if isinstance(requested, torch.dtype):
        return requested
    if full:
        chosen, reason = torch.float32, "small weight updates are lost in bf16"
    elif device.type != "cuda":
        chosen, reason = torch.float32, "CPU arithmetic is exact in float32 and rarely faster in bf16"
    elif torch.cuda.get_device_capability(device) >= (8, 0):
        chosen, reason = torch.bfloat16, "the GPU has bf16 tensor cores"
    else:
        chosen, reason = torch.float16, "the GPU has no bf16"
    logger.info("dtype is %s: %s", chosen, reason)
    return chosen
