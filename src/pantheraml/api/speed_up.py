"""Optimize a loaded model: fused layers, CUDA graphs, activation checkpointing."""

from __future__ import annotations

from typing import cast

from peft import PeftModel, PeftModelForCausalLM
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import ParamWrapper
from torch import nn
from transformers import PreTrainedModel

from pantheraml.api.loading_options import CHECKPOINTING, CheckpointingMode
from pantheraml.base import log
from pantheraml.base.env import launched_rank
from pantheraml.engine.compile import compile_steady_shapes
from pantheraml.engine.memory.checkpointing import apply_checkpointing
from pantheraml.models.causal_lm import FastCausalLM
from pantheraml.models.experts import speed_up_experts
from pantheraml.models.fast import (
    enable_layer_graphs,
    fuse,
    long_sequence_note,
    quantize_head_like_layers,
)
from pantheraml.models.model_kind import vision_parts
from pantheraml.models.module_walk_cache import use_cached_walk
from pantheraml.models.quantize.fp8_training import use_fp8_matmuls
from pantheraml.models.quantize.int8 import Int8Linear
from pantheraml.models.quantize.nf4 import NF4Linear
from pantheraml.models.quantize.quantized_linear import constant_buffers
from pantheraml.models.trained_copies import use_float32_copies
from pantheraml.parallel.data import ignore_in_ddp
from pantheraml.parallel.device_map import (
    is_split,
)

logger = log.get(__name__)


def prepare_adapted(fast: FastCausalLM, adapted: PeftModel, checkpointing: CheckpointingMode | None = None) -> None:
    """Optimize a model that has just got its adapters."""
    if checkpointing is None:
        checkpointing = cast(CheckpointingMode, fast.requested_checkpointing)
    use_float32_copies(adapted, cast(PreTrainedModel, fast).dtype)
    speed_up_experts(adapted)
    if type(adapted) is PeftModelForCausalLM:
        use_cached_walk(adapted)
    _speed_up(fast, adapted, checkpointing)
    on_gpu = cast(PreTrainedModel, fast).device.type == "cuda"
    on_one_gpu = on_gpu and not is_split(adapted) and not vision_parts(fast)
    if checkpointing is False and on_one_gpu and _can_compile(adapted):
        compile_steady_shapes(fast)
    # otherwise a trainer's DDP would broadcast quantized weights before every forward
    ignore_in_ddp(adapted, constant_buffers(adapted))


def _speed_up(
    fast: FastCausalLM, full_model: nn.Module, checkpointing: CheckpointingMode, *, fused: bool = True
) -> None:
    if is_split(full_model):
        logger.info("layers are not fused: the model is on several devices")
        if checkpointing in ("unsloth", "offload"):
            logger.warning(
                "use_gradient_checkpointing=%r keeps layer inputs on their devices, as True does: the offload to host"
                " memory is for models on one device",
                checkpointing,
            )
            checkpointing = True
    elif fused:
        _fuse(fast, full_model)
        enable_layer_graphs(full_model)
    if checkpointing is False:
        return
    apply_checkpointing(full_model, CHECKPOINTING[checkpointing])
    lean = CHECKPOINTING[checkpointing] in ("full", "offload")
    note = long_sequence_note(fast, rows=1, width=fast.max_seq_length or 0, lean=lean)
    if note is not None:
        logger.info(note)
    fast.lock_checkpointing(CHECKPOINTING[checkpointing])


def _can_compile(adapted: nn.Module) -> bool:
    """Return whether layers that are not fused are compiled: where our own loop compiles them as well."""
    return not any(
        isinstance(module, NF4Linear | Int8Linear | ParamWrapper)
        or (isinstance(module, LoraLayer) and _has_dropout_or_dora(module))
        for module in adapted.modules()
    )


def _has_dropout_or_dora(layer: LoraLayer) -> bool:
    return any(layer.use_dora.values()) or any(type(each) is not nn.Identity for each in layer.lora_dropout.values())


def speed_up_full(
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


def _fuse(fast: FastCausalLM, full_model: nn.Module) -> None:
    nf4 = any(isinstance(layer, NF4Linear) for layer in full_model.modules())
    on_cpu = next(full_model.parameters()).device.type == "cpu"
    # On a CPU fusing gains nothing, and fp8 matmuls of nf4 weights would round where the plain ones do not.
    part = cast(PreTrainedModel, fast).get_decoder() if vision_parts(fast) else full_model
    fused = not (nf4 and on_cpu) and fuse(part).fused > 0
    quantize_head_like_layers(fast, fused=fused)
