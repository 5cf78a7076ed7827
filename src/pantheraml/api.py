"""`FastLanguageModel`: fast models for existing training code.

Names and arguments follow Unsloth as far as they go. The result is a transformers model and a PEFT model, which TRL's
`SFTTrainer` trains like any other. An argument that cannot be honored is an error; one without effect, a warning.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, cast

import torch
from peft import PeftModel, PeftModelForCausalLM
from peft.tuners.tuners_utils import BaseTunerLayer
from pydantic import ValidationError
from torch import nn
from transformers import PreTrainedModel

from pantheraml import multigpu
from pantheraml.base import env, log
from pantheraml.base.env import launched_rank, multi_gpu_requested
from pantheraml.base.errors import ConfigError, DeviceError, UnsupportedModelError
from pantheraml.engine.compile import compile_steady_shapes
from pantheraml.engine.memory.checkpointing import apply_checkpointing
from pantheraml.hooks import peft, trl
from pantheraml.hooks.unsloth_arguments import (
    ADAPTER_NEUTRAL,
    ADAPTER_UNUSED,
    LOADING_NEUTRAL,
    LOADING_UNUSED,
    check_auto_model,
    check_others,
    chosen_targets,
)
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
from pantheraml.models.load_finetuned import adapter_base, load_adapter
from pantheraml.models.loader import load_model, load_tokenizer, read_config
from pantheraml.models.module_walk_cache import use_cached_walk
from pantheraml.models.packing_check import PackingSupport, isolate_documents
from pantheraml.models.quantize.fp8 import FP8Linear
from pantheraml.models.quantize.fp8_training import use_fp8_matmuls
from pantheraml.models.quantize.nf4 import NF4Linear
from pantheraml.models.quantize.quantized_linear import QuantFormat, constant_buffers, quant_formats_of
from pantheraml.parallel.data import ignore_in_ddp
from pantheraml.parallel.device_map import (
    DeviceMap,
    MaxMemory,
    is_split,
    may_span_devices,
    place,
    resolve_devices,
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
BF16_CAPABILITY = (8, 0)
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


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
        token: str | bool | None = None,
        load_in_16bit: bool = False,
        use_gradient_checkpointing: CheckpointingMode = False,
        enable_multi_gpu: bool | None = None,
        use_multi_gpu: bool | None = None,
        auto_device_map: bool = False,
        max_memory: MaxMemory | None = None,
        auto_model: Any = None,
        **others: Any,
    ) -> tuple[PreTrainedModel, Any]:
        """Load a model and its tokenizer.

        Without `full_finetuning` every weight is frozen, and `get_peft_model` adds the trainable ones. An adapter's
        folder gives its base with the adapter, ready to be trained further.
        `max_seq_length`: length at which the tokenizer and SFTTrainer truncate; None: their own.
        `dtype` None: bf16 or fp16, as the GPU supports; float32 on a CPU and for full fine-tuning. "auto": the
        checkpoint's.
        `load_in_fp8` None: yes, if nothing else is requested (another load_in_..., dtype, full_finetuning, several
        devices) and the GPU supports it; the loss matches bf16, see docs/benchmarks.md. With `full_finetuning`, True
        means fp8 matmuls in the decoder layers; their weights keep their dtype. `load_in_16bit`: no quantization.
        `token` is used to download this model. `use_gradient_checkpointing` is the default of `get_peft_model`.
        `device_map` None: this process's GPU, or the CPU if there is none. Or a device, or a mapping from modules to
        devices; or auto, balanced, sequential, which spread the layers over all GPUs if multi-GPU is enabled, and mean
        the first GPU if not. `max_memory` then limits the weights on each device. A rank has one device.
        `auto_device_map` is an alias of `device_map="auto"`.
        `enable_multi_gpu` (or `use_multi_gpu`) True: a script started as a single process is relaunched as one process
        per GPU, see `pantheraml.multigpu`, unless `device_map` spreads the model; None: as PANTHERAML_ENABLE_MULTIGPU
        says.
        """
        log.start_for_scripts()
        _check_arguments(FastLanguageModel.from_pretrained, others)
        check_auto_model(auto_model)
        _check_checkpointing(use_gradient_checkpointing)
        multi_gpu = _multi_gpu(enable_multi_gpu, use_multi_gpu)
        if auto_device_map:
            device_map = _resolve_auto_map(device_map)
        if multi_gpu and not (may_span_devices(device_map) and launched_rank() is None):
            multigpu.enable_multi_gpu()
        device, free_memory = resolve_devices(device_map, max_memory, multi_gpu=multi_gpu)
        quant_format = _quant_format(load_in_4bit, load_in_8bit, load_in_fp8, load_in_16bit)
        if quant_format is None and load_in_fp8 is None and dtype is None and not (full_finetuning or load_in_16bit):
            quant_format = _default_fp8(device, split=free_memory is not None)
        config = ModelConfig(path=model_name, revision=revision, trust_remote_code=trust_remote_code)
        _check_quant_format(quant_format, full_finetuning, device)
        with _hub_token(token):
            adapter = adapter_base(config)
            if adapter is not None:
                config = _check_adapter(*adapter, full_finetuning=full_finetuning)
            tokenizer = _tokenizer(config, max_seq_length)
            model = load_model(
                config,
                dtype=_dtype(_checkpoint_dtype(config) if dtype == "auto" else dtype, full_finetuning, device),
                device=device if free_memory is None else torch.device("cpu"),
                quantize="dense" if full_finetuning else quant_format,
            )
            _restore_saved_config(model, config)
        model.requires_grad_(full_finetuning)
        isolation = _prepare_for_packing(model)
        fast = make_fast(model)
        fast.max_seq_length, fast.requested_checkpointing = max_seq_length, use_gradient_checkpointing
        fast.why_not_packed, fast.packed_within = isolation.reason, isolation.within
        if free_memory is not None:
            assert device_map is not None
            split(model, place(model, device_map, free_memory, max_memory))
        if full_finetuning:
            _speed_up_full(fast, model, use_gradient_checkpointing, in_fp8=quant_format == "fp8")
        peft.apply()
        trl.apply()
        if adapter is not None:
            model = cast(Any, load_adapter(model, adapter[0], trainable=True))
            _prepare_adapted(fast, cast(PeftModel, model))
        fast.on_adapters = None if full_finetuning else _prepare_adapted
        return model, tokenizer

    @staticmethod
    def get_peft_model(
        model: PreTrainedModel,
        r: int = 16,
        target_modules: str | list[str] | None = "all-linear",
        lora_alpha: float = 16,
        lora_dropout: float = 0.0,
        bias: str = "none",
        use_gradient_checkpointing: CheckpointingMode | None = None,
        random_state: int = 3407,
        use_rslora: bool = False,
        use_dora: bool = False,
        *,
        max_seq_length: int | None = None,
        finetune_attention_modules: bool = True,
        finetune_mlp_modules: bool = True,
        **others: Any,
    ) -> PeftModel:
        """Add LoRA (or DoRA) adapters in float32 to `model`, fused where that is exact.

        `use_gradient_checkpointing`: True recomputes whole layers; "selective" saves what is expensive to recompute;
        "offload" (or "unsloth") keeps layer inputs in host memory; False leaves it to the trainer's own
        `gradient_checkpointing`; None is what was passed to `from_pretrained`, or else False.
        `target_modules`: names that the model lacks are ignored if others match. `finetune_..._modules` False leaves
        out the layers of attention or of the MLPs. `max_seq_length` replaces that of `from_pretrained`.
        """
        _check_arguments(FastLanguageModel.get_peft_model, others)
        if use_gradient_checkpointing is not None:
            _check_checkpointing(use_gradient_checkpointing)
        _check_base_model(model, use_dora=use_dora)
        if bias != "none":
            raise ConfigError(f"bias={bias!r} is not supported: biases are never trained.", fix='Use bias="none".')
        method = _method(
            kind="dora" if use_dora else "lora",
            rank=r,
            alpha=lora_alpha,
            dropout=lora_dropout,
            rslora=use_rslora,
            target_modules=chosen_targets(
                model, target_modules, attention=finetune_attention_modules, mlp=finetune_mlp_modules
            ),
        )
        if max_seq_length is not None:
            _check_length(max_seq_length, _max_positions(model.config))
            model.max_seq_length = max_seq_length
        on_adapters, model.on_adapters = model.on_adapters, None  # which does not know the checkpointing
        try:
            adapted: Any = apply_method(model, method, seed=random_state)
        finally:
            model.on_adapters = on_adapters
        _prepare_adapted(model, adapted, use_gradient_checkpointing)
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


def _check_adapter(folder: Path, base: ModelConfig, *, full_finetuning: bool) -> ModelConfig:
    if full_finetuning:
        raise ConfigError(
            f"{folder} holds an adapter, and full_finetuning trains a whole model.",
            fix="Remove full_finetuning to train the adapter, or merge it into its base first.",
        )
    logger.info("%s holds an adapter: loading it on its base %s", folder, base.path)
    return base


def _prepare_adapted(fast: FastCausalLM, adapted: PeftModel, checkpointing: CheckpointingMode | None = None) -> None:
    """Make a model fast that has just got its adapters."""
    if checkpointing is None:
        checkpointing = cast(CheckpointingMode, fast.requested_checkpointing)
    if type(adapted) is PeftModelForCausalLM:
        use_cached_walk(adapted)
    _speed_up(fast, adapted, checkpointing)
    # otherwise a trainer's DDP would broadcast quantized weights before every forward
    ignore_in_ddp(adapted, constant_buffers(adapted))


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


def _check_arguments(function: Callable[..., Any], others: Mapping[str, Any]) -> None:
    loading = function is FastLanguageModel.from_pretrained
    check_others(
        others,
        LOADING_NEUTRAL if loading else ADAPTER_NEUTRAL,
        LOADING_UNUSED if loading else ADAPTER_UNUSED,
        function=function.__name__,
        parameters=inspect.signature(function).parameters,
    )


def _check_checkpointing(mode: CheckpointingMode) -> None:
    if mode is not False and mode not in _CHECKPOINTING:
        known = ", ".join(repr(mode) for mode in (False, *_CHECKPOINTING))
        raise ConfigError(f"use_gradient_checkpointing={mode!r} is not one of {known}.")


@contextlib.contextmanager
def _hub_token(token: str | bool | None) -> Iterator[None]:
    """Use `token` for downloads; None and True: the one that `hf auth login` or HF_TOKEN has set."""
    if token is False:
        raise ConfigError("token=False is not supported.", fix="Unset HF_TOKEN, or log out with `hf auth logout`.")
    with env.changed({"HF_TOKEN": token}) if isinstance(token, str) and token else contextlib.nullcontext():
        yield


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


def _multi_gpu(enable: bool | None, use: bool | None) -> bool:
    if enable is not None and use is not None and enable != use:
        raise ConfigError(
            "enable_multi_gpu and use_multi_gpu are aliases, but their values differ.", fix="Set only one."
        )
    requested = use if enable is None else enable
    return multi_gpu_requested() if requested is None else requested


def _quant_format(four_bit: bool, eight_bit: bool, fp8: bool | None, sixteen_bit: bool) -> QuantFormat | None:
    """Return the quantization format of frozen weights; None: as in the checkpoint."""
    kinds: dict[QuantFormat, bool | None] = {"nf4": four_bit, "int8": eight_bit, "fp8": fp8}
    requested = [kind for kind, enabled in kinds.items() if enabled]
    if len(requested) + sixteen_bit > 1:
        raise ConfigError(
            "load_in_4bit, load_in_8bit, load_in_fp8 and load_in_16bit are mutually exclusive.", fix="Choose one."
        )
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


def _check_quant_format(quant_format: QuantFormat | None, full: bool, device: torch.device) -> None:
    if full and quant_format not in (None, "fp8"):
        raise ConfigError(
            f"full_finetuning trains every weight, but {quant_format} weights cannot be trained.",
            fix="Remove full_finetuning, and use get_peft_model.",
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
    _check_length(max_seq_length, _max_positions(read_config(config)))
    tokenizer = load_tokenizer(config)
    if max_seq_length is not None:
        tokenizer.model_max_length = max_seq_length
    return tokenizer


def _max_positions(config: Any) -> int | None:
    positions: int | None = getattr(config.get_text_config(), "max_position_embeddings", None)
    return positions


def _checkpoint_dtype(config: ModelConfig) -> torch.dtype | None:
    """Return the dtype that the checkpoint's config names, if any."""
    dtype: torch.dtype | None = getattr(read_config(config).get_text_config(), "dtype", None)
    return dtype


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
        raise ConfigError(f"dtype={requested!r} is not one of {', '.join(_DTYPES)}, auto.")
    if isinstance(requested, torch.dtype):
        return requested
    if full:
        chosen, reason = torch.float32, "small weight updates are lost in bf16"
    elif device.type != "cuda":
        chosen, reason = torch.float32, "CPU arithmetic is exact in float32 and rarely faster in bf16"
    elif torch.cuda.get_device_capability(device) >= BF16_CAPABILITY:
        chosen, reason = torch.bfloat16, "the GPU has bf16 tensor cores"
    else:
        chosen, reason = torch.float16, "the GPU has no bf16"
    logger.info("dtype is %s: %s", chosen, reason)
    return chosen


FastModel = FastLanguageModel
"""Unsloth's name for a loader of any kind of model; here, of decoders."""


def is_bfloat16_supported() -> bool:
    """Return whether this process can train in bf16: with a GPU that has it, or on a CPU."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability() >= BF16_CAPABILITY


def PatchDPOTrainer() -> None:
    """Do nothing: TRL's DPOTrainer trains our models as it is."""
    log.start_for_scripts()
    logger.info("PatchDPOTrainer does nothing: TRL's DPOTrainer trains these models as it is")
