"""`FastLanguageModel`: a fast model for the training code that people already have.

Names and arguments are those of Unsloth, as far as they go. What comes back is a transformers model and a PEFT model,
and TRL's `SFTTrainer` trains them as it trains any other. An argument that cannot be honoured is an error.
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
from pantheraml.engine.checkpointing import apply_checkpointing
from pantheraml.engine.compile import compile_steady_shapes
from pantheraml.hooks import trl
from pantheraml.models.adapters import apply_method, base_name
from pantheraml.models.asked_each_step import answer_sooner
from pantheraml.models.causal_lm import FastCausalLM, make_fast
from pantheraml.models.fast import (
    fuse,
    quantise_head_like_layers,
    record_passes,
    release_recordings,
    second_layouts,
    why_one_layout,
)
from pantheraml.models.loader import load_model, load_tokenizer, read_config
from pantheraml.models.packing import Verdict, keep_documents_apart
from pantheraml.models.quantise.fp8 import FP8Linear
from pantheraml.models.quantise.nf4 import NF4Linear
from pantheraml.models.quantise.packed import Packing, constant_buffers, packed_in
from pantheraml.models.quantise.trained_fp8 import use_fp8_products
from pantheraml.parallel.data import leave_out
from pantheraml.parallel.split import (
    STRATEGIES,
    Device,
    DeviceMap,
    MaxMemory,
    free_room,
    is_split,
    named_devices,
    place,
    place_in_group,
    split,
)
from pantheraml.planner.choose import FP8_CAPABILITY
from pantheraml.planner.layouts import layouts_for
from pantheraml.specs.plan import Layouts
from pantheraml.specs.train import Checkpointing, MethodConfig, ModelConfig

logger = log.get(__name__)

CheckpointingMode = bool | Literal["unsloth", "offload", "selective"]

_CHECKPOINTING: Mapping[CheckpointingMode, Checkpointing] = {
    True: "full", "unsloth": "offload", "offload": "offload", "selective": "selective",
}  # fmt: skip
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

# Arguments that scripts written for Unsloth pass, with the values that ask for nothing.
_LOADING_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "token": (None,), "rope_scaling": (None,), "fix_tokenizer": (True,), "resize_model_vocab": (None,),
    "fast_inference": (False,),
}  # fmt: skip
_ADAPTER_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "layers_to_transform": (None,), "layers_pattern": (None,), "modules_to_save": (None,),
    "init_lora_weights": (True,), "loftq_config": (None, {}),
}  # fmt: skip


class FastLanguageModel:
    """`from_pretrained` loads, `get_peft_model` adds adapters; then train it with the trainer of your choice."""

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
        """The model, and its tokenizer.

        Without `full_finetuning` every weight is frozen, for `get_peft_model` to add what is trained.
        `max_seq_length` is the length at which the tokenizer truncates; None leaves the tokenizer's own.
        `dtype` None: bf16 or fp16, as the GPU can; float32 on a CPU and for full fine-tuning.
        `load_in_fp8` None: yes if nothing else is asked for (another load_in_..., dtype, full_finetuning, several
        devices) and the GPU can; the loss stays that of bf16, see docs/benchmarks.md. With `full_finetuning` True means
        that decoder layers multiply in fp8; their weights stay as they are.
        `device_map` None: this process's GPU, or the CPU if there is none. Or a device, or a mapping from modules to
        devices; or auto, balanced, sequential, which spread the layers over all GPUs if multi-GPU is switched on, and
        mean the first if it is not. `max_memory` then says what weights may take on each. A rank has one device.
        `auto_device_map` is another name for `device_map="auto"`.
        `enable_multi_gpu` (or `use_multi_gpu`) True: a script that was started alone is started again as one process
        per GPU, see `pantheraml.multigpu`, unless `device_map` spreads the model; None: as PANTHERAML_ENABLE_MULTIGPU
        says.
        """
        _refuse(others, _LOADING_NEUTRAL, "from_pretrained")
        multi_gpu = _multi_gpu(enable_multi_gpu, use_multi_gpu)
        if auto_device_map:
            device_map = _automatic_map(device_map)
        if multi_gpu and not (_spreads(device_map) and launched_rank() is None):
            multigpu.enable_multi_gpu()
        device, room = _devices(device_map, max_memory, multi_gpu=multi_gpu)
        packing = _packing(load_in_4bit, load_in_8bit, load_in_fp8)
        if packing is None and load_in_fp8 is None and dtype is None and not full_finetuning:
            packing = _fp8_if_faster(device, split=room is not None)
        _check_kind(packing, full_finetuning, use_gradient_checkpointing, device)
        config = ModelConfig(path=model_name, revision=revision, trust_remote_code=trust_remote_code)
        tokenizer = _tokenizer(config, max_seq_length)
        model = load_model(
            config,
            dtype=_dtype(dtype, full_finetuning, device),
            device=device if room is None else torch.device("cpu"),
            quantise="dense" if full_finetuning else packing,
        )
        _as_its_folder_says(model, config)
        model.requires_grad_(full_finetuning)
        apart = _prepare_for_packed_rows(model)
        fast = make_fast(model)
        fast.why_not_packed, fast.packed_within = apart.reason, apart.within
        if room is not None:
            assert device_map is not None
            split(model, place(model, device_map, room, max_memory))
        if full_finetuning:
            _speed_up_full(fast, model, use_gradient_checkpointing, in_fp8=packing == "fp8")
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
        """`model` with LoRA (or DoRA) adapters in float32, fused where that is exact.

        `use_gradient_checkpointing`: True recomputes whole layers, "selective" keeps what is dear to recompute,
        "offload" (or "unsloth") keeps layer inputs in host memory; False leaves it to the trainer, whose own
        `gradient_checkpointing` is then obeyed.
        """
        _refuse(others, _ADAPTER_NEUTRAL, "get_peft_model")
        _check_base(model, use_dora=use_dora)
        if bias != "none":
            raise ConfigError(f"bias={bias!r} is not supported: biases are never trained.", todo='Use bias="none".')
        method = _method(
            kind="dora" if use_dora else "lora",
            rank=r,
            alpha=lora_alpha,
            dropout=lora_dropout,
            rslora=use_rslora,
            target_modules=target_modules,
        )
        adapted: Any = apply_method(model, method, seed=random_state)
        answer_sooner(adapted)
        _speed_up(model, adapted, use_gradient_checkpointing)
        leave_out(adapted, constant_buffers(adapted))  # a trainer's DDP would send packed weights before every pass
        return adapted

    @staticmethod
    def for_training(model: nn.Module) -> nn.Module:
        return model.train()

    @staticmethod
    def for_inference(model: nn.Module) -> nn.Module:
        """Dropout off, and full logits in every forward."""
        release_recordings(model)
        return model.eval()


def _prepare_for_packed_rows(model: PreTrainedModel) -> Verdict:
    """Whether several documents in a row would be wrong; where not, they are kept apart from now on."""
    apart = keep_documents_apart(model)  # for rows of any length: the trainer makes them
    if apart.masked is not None:
        logger.info("attention in packed batches needs a mask: %s", apart.masked)
    if apart.refused is not None:
        raise UnsupportedModelError(f"The model cannot be trained on text: {apart.refused}.", todo="Use a decoder.")
    if not apart.ways:
        logger.warning("rows of several documents are refused (packing, padding_free): %s", apart.reason)
    return apart


def _check_base(model: nn.Module, *, use_dora: bool) -> None:
    """What is to get adapters."""
    if any(isinstance(layer, BaseTunerLayer) for layer in model.modules()):
        raise ConfigError(
            "This model has adapters already.", todo="Train those, or give the result of `model.unload()`."
        )
    if not isinstance(model, FastCausalLM):
        raise ConfigError(
            f"get_peft_model needs a model from FastLanguageModel.from_pretrained, not a {type(model).__name__}."
        )
    if use_dora and (packed := packed_in(cast(nn.Module, model))):
        raise ConfigError(
            f"use_dora=True needs plain weights, and this model's are in {' and '.join(packed)}.",
            todo="Load it with dtype=torch.bfloat16, and without load_in_4bit, load_in_8bit or load_in_fp8.",
        )


def _speed_up(fast: FastCausalLM, whole: nn.Module, checkpointing: CheckpointingMode, *, fused: bool = True) -> None:
    if is_split(whole):
        logger.info("layers are not fused: they are on several devices")
        if checkpointing in ("unsloth", "offload"):
            raise ConfigError(
                f"use_gradient_checkpointing={checkpointing!r} is for one device, and the model is on several.",
                todo='Use True or "selective".',
            )
    elif fused:
        _fuse(fast, whole, checkpointing)
        fast.early = record_passes(whole)
    if checkpointing is False:
        return
    if checkpointing not in _CHECKPOINTING:
        known = ", ".join(repr(mode) for mode in (False, *_CHECKPOINTING))
        raise ConfigError(f"use_gradient_checkpointing={checkpointing!r} is not one of {known}.")
    apply_checkpointing(whole, _CHECKPOINTING[checkpointing])
    fast.keep_checkpointing(_CHECKPOINTING[checkpointing])


def _speed_up_full(
    fast: FastCausalLM, model: PreTrainedModel, checkpointing: CheckpointingMode, *, in_fp8: bool
) -> None:
    if in_fp8:
        use_fp8_products(model)
    # With products in bf16 compiled layers are faster; those that are computed again are not compiled. Of several
    # processes each may be given a part of the weights by its trainer, which fused layers hold whole.
    again = checkpointing not in (False, "selective") and model.device.type == "cuda" and launched_rank() is None
    _speed_up(fast, model, checkpointing, fused=in_fp8 or again)
    if checkpointing is False and model.device.type == "cuda" and not is_split(model):
        compile_steady_shapes(model)


def _fuse(fast: FastCausalLM, whole: nn.Module, checkpointing: CheckpointingMode) -> None:
    nf4 = any(isinstance(layer, NF4Linear) for layer in whole.modules())
    on_cpu = next(whole.parameters()).device.type == "cpu"
    layouts = _fp8_layouts(whole, checkpointing)
    # On a CPU fusing gains nothing, and products of nf4 weights in fp8 would round where the plain ones do not.
    fused = not (nf4 and on_cpu) and fuse(whole, layouts=layouts).fused > 0
    quantise_head_like_layers(fast, fused=fused)
    if layouts == 2 and second_layouts(whole):
        logger.info("the MLPs' fp8 weights are kept in two layouts: %s", layouts_for("none")[1])


def _fp8_layouts(whole: nn.Module, checkpointing: CheckpointingMode) -> Layouts:
    if not any(isinstance(layer, FP8Linear) for layer in whole.modules()):
        return 1
    layouts, reason = layouts_for(_CHECKPOINTING.get(checkpointing, "none"))
    if layouts == 2 and (why_one := why_one_layout(whole)) is not None:
        layouts, reason = 1, why_one
    if layouts == 1:
        logger.info("the MLPs' fp8 weights are kept in one layout: %s", reason)
    return layouts


def _refuse(others: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]], function: str) -> None:
    for name, value in others.items():
        if name not in neutral:
            raise ConfigError(f"FastLanguageModel.{function} has no argument {name!r}.")
        if value not in neutral[name]:
            instead = "Set HF_TOKEN in the environment." if name == "token" else "Leave it out."
            given = name if name == "token" else f"{name}={value!r}"
            raise ConfigError(f"FastLanguageModel.{function} does not support {given}.", todo=instead)


def _method(**fields: Any) -> MethodConfig:
    try:
        return MethodConfig(**fields)
    except ValidationError as err:
        names = {"rank": "r", "alpha": "lora_alpha", "dropout": "lora_dropout", "rslora": "use_rslora"}
        first = err.errors()[0]
        field = str(first["loc"][0])
        raise ConfigError(f"{names.get(field, field)}={fields[field]!r}: {first['msg']}.") from err


def _automatic_map(device_map: DeviceMap | None) -> DeviceMap:
    if device_map not in (None, "auto"):
        raise ConfigError(
            f'auto_device_map means device_map="auto", but device_map is {device_map!r}.', todo="Keep one."
        )
    return "auto"


def _spreads(device_map: DeviceMap | None) -> bool:
    """Whether a device map may put one model on several devices."""
    if isinstance(device_map, Mapping):
        return list(device_map) != [""]
    return isinstance(device_map, str) and device_map in STRATEGIES


def _devices(
    device_map: DeviceMap | None, max_memory: MaxMemory | None, *, multi_gpu: bool
) -> tuple[torch.device, dict[Device, int] | None]:
    """This process's device, and those that the model is to be placed on, if that is not simply all of it there."""
    own = torch.device("cuda", process_rank().local_rank) if torch.cuda.device_count() else torch.device("cpu")
    alone = launched_rank() is None
    if max_memory is not None and (device_map is None or not alone):
        raise ConfigError("max_memory goes with a device_map in a process that is alone.", todo="Leave it out.")
    if device_map is None:
        return own, None
    room = free_room()
    named = named_devices(device_map, room)
    if named and not _spreads(device_map) and max_memory is None and (alone or named == [torch.device("cpu")]):
        return named[0], None
    if not alone:
        place_in_group(device_map, "cpu" if own.type == "cpu" else own.index)
        return own, None
    if not named and not multi_gpu:
        room = dict(list(room.items())[:1])
    simple = not named and len(room) == 1 and max_memory is None
    return named[0] if named else own, None if simple else room


def _multi_gpu(enable: bool | None, use: bool | None) -> bool:
    if enable is not None and use is not None and enable != use:
        raise ConfigError(
            "enable_multi_gpu and use_multi_gpu are two names of one thing, and differ.", todo="Keep one."
        )
    asked = use if enable is None else enable
    return multi_gpu_requested() if asked is None else asked


def _packing(four_bit: bool, eight_bit: bool, fp8: bool | None) -> Packing | None:
    """What frozen weights are packed in; None: as the checkpoint has them."""
    kinds: dict[Packing, bool | None] = {"nf4": four_bit, "int8": eight_bit, "fp8": fp8}
    asked = [kind for kind, wanted in kinds.items() if wanted]
    if len(asked) > 1:
        raise ConfigError("load_in_4bit, load_in_8bit and load_in_fp8 exclude each other.", todo="Choose one.")
    return asked[0] if asked else None


def _fp8_if_faster(device: torch.device, *, split: bool) -> Packing | None:
    """fp8 where it was measured to be faster at the same loss; else weights stay as the checkpoint has them."""
    if device.type != "cuda" or split:
        return None
    found = torch.cuda.get_device_capability(device)
    if found < FP8_CAPABILITY:
        logger.info("frozen weights stay as the checkpoint has them: fp8 needs compute capability 9.0 or newer")
        return None
    logger.info("frozen weights are kept in fp8: compute capability %s.%s has fp8 tensor cores", *found)
    return "fp8"


def _check_kind(packing: Packing | None, full: bool, checkpointing: CheckpointingMode, device: torch.device) -> None:
    if full and packing not in (None, "fp8"):
        raise ConfigError(
            f"full_finetuning trains every weight, and {packing} weights cannot be trained.",
            todo="Leave full_finetuning out, and use get_peft_model.",
        )
    if checkpointing is not False and not full:
        raise ConfigError("use_gradient_checkpointing belongs to get_peft_model, unless full_finetuning=True.")
    if packing == "fp8" and device.type == "cuda":
        found = torch.cuda.get_device_capability(device)
        if found < FP8_CAPABILITY:
            raise DeviceError(
                f"load_in_fp8 needs compute capability {FP8_CAPABILITY[0]}.{FP8_CAPABILITY[1]} or newer; "
                f"{torch.cuda.get_device_name(device)} has {found[0]}.{found[1]}.",
                todo="Use load_in_4bit or no quantisation.",
            )


def _tokenizer(config: ModelConfig, max_seq_length: int | None) -> Any:
    positions = getattr(read_config(config).get_text_config(), "max_position_embeddings", None)
    _check_length(max_seq_length, positions)
    tokenizer = load_tokenizer(config)
    if max_seq_length is not None:
        tokenizer.model_max_length = max_seq_length
    return tokenizer


def _as_its_folder_says(model: PreTrainedModel, config: ModelConfig) -> None:
    """Loading changed these; they are saved with the model, and not ours to change."""
    model.config.get_text_config().use_cache = read_config(config).get_text_config().use_cache
    model.name_or_path = model.config.name_or_path = base_name(config)


def _check_length(asked: int | None, limit: int | None) -> None:
    if asked is not None and (not isinstance(asked, int) or asked < 1):
        raise ConfigError(f"max_seq_length={asked!r} is not a length.")
    if asked is not None and limit is not None and asked > limit:
        raise UnsupportedModelError(
            f"max_seq_length={asked} is more than the {limit} positions that the model knows.",
            todo=f"Use max_seq_length={limit} or less.",
        )


def _dtype(asked: torch.dtype | str | None, full: bool, device: torch.device) -> torch.dtype:
    if isinstance(asked, str):
        asked = _DTYPES.get(asked.removeprefix("torch."), asked)
    if asked is not None and asked not in _DTYPES.values():
        raise ConfigError(f"dtype={asked!r} is not one of {', '.join(_DTYPES)}.")
    if isinstance(asked, torch.dtype):
        return asked
    if full:
        chosen, reason = torch.float32, "bf16 cannot hold a small update of a weight"
    elif device.type != "cuda":
        chosen, reason = torch.float32, "CPU arithmetic is exact in float32 and rarely faster in bf16"
    elif torch.cuda.get_device_capability(device) >= (8, 0):
        chosen, reason = torch.bfloat16, "the GPU has bf16 tensor cores"
    else:
        chosen, reason = torch.float16, "the GPU has no bf16"
    logger.info("dtype is %s: %s", chosen, reason)
    return chosen
