"""`FastLanguageModel`: fast models for existing training code.

Names and arguments follow Unsloth as far as they go. The result is a transformers model and a PEFT model, which TRL's
`SFTTrainer` trains like any other. An argument that cannot be honored is an error; one without effect, a warning.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers import PreTrainedModel

from pantheraml import multigpu
from pantheraml.api.fast_inference import inference_engine
from pantheraml.api.loading_options import (
    CheckpointingMode,
    check_checkpointing,
    check_loaded_length,
    check_quant_format,
    checkpoint_dtype,
    chosen_dtype,
    default_fp8,
    hub_token,
    method_config,
    requested_quant_format,
    resolve_auto_map,
    tokenizer_with_length,
    translate_unsloth_loading,
    wants_multi_gpu,
)
from pantheraml.api.speed_up import prepare_adapted, speed_up_full
from pantheraml.base import log
from pantheraml.base.env import launched_rank
from pantheraml.base.errors import ConfigError, UnsupportedModelError
from pantheraml.data.chat_templates.rendering import plain_tokenizer
from pantheraml.hooks import peft, trl
from pantheraml.hooks.trainer_checks import check_trainable_dtype
from pantheraml.hooks.unsloth_arguments import (
    ADAPTER_NEUTRAL,
    ADAPTER_UNUSED,
    LOADING_NEUTRAL,
    LOADING_UNUSED,
    check_others,
    chosen_targets,
    kind_for,
)
from pantheraml.models.adapters import apply_method, base_name
from pantheraml.models.causal_lm import FastCausalLM, make_fast
from pantheraml.models.classifier import labels_of_adapter, make_fast_classifier, take_labels, use_padding_of
from pantheraml.models.fast import release_layer_graphs
from pantheraml.models.load_finetuned import adapter_base, load_adapter
from pantheraml.models.loader import kind_to_load, load_model, read_config
from pantheraml.models.model_kind import CLASSIFIER, TEXT, VISION, ModelKind, is_classifier
from pantheraml.models.packing_check import PackingSupport, isolate_documents
from pantheraml.models.peft_arguments import LayerChoice, config_arguments
from pantheraml.models.quantize.quantized_linear import quant_formats_of
from pantheraml.models.rope_scaling import RopeChange, plan_rope
from pantheraml.models.router_loss import disable_without_experts
from pantheraml.models.trained_copies import split_targets
from pantheraml.models.vllm_engine import OPTIONS as VLLM_OPTIONS
from pantheraml.parallel.device_map import (
    DeviceMap,
    MaxMemory,
    may_span_devices,
    place,
    resolve_devices,
    split,
)
from pantheraml.specs.train import ModelConfig

logger = log.get(__name__)

NO_PACKING = PackingSupport((), "rows of vision-language models have positions and masks that depend on their images")
NO_PACKED_SCORES = PackingSupport((), "a classifier scores whole rows")


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
        fast_inference: bool = False,
        rope_scaling: Mapping[str, Any] | None = None,
        auto_model: Any = None,
        random_state: int = 3407,
        **others: Any,
    ) -> tuple[PreTrainedModel, Any]:
        """Load a model and its tokenizer.

        Without `full_finetuning` every weight is frozen, and `get_peft_model` adds the trainable ones. An adapter's
        folder gives its base with the adapter, ready to be trained further.
        `max_seq_length`: length at which the tokenizer and SFTTrainer truncate; None: their own. Beyond the model's
        positions, its RoPE is scaled, with a warning; `rope_scaling` scales it as in transformers' configs.
        `dtype` None: bf16 or fp16, as the GPU supports; float32 on a CPU and for full fine-tuning. "auto": the
        checkpoint's.
        `load_in_fp8` None: yes, if nothing else is requested (another load_in_..., dtype, full_finetuning, several
        devices) and the GPU supports it; the loss matches bf16, see docs/benchmarks.md. With `full_finetuning`, True
        means fp8 matmuls in the decoder layers; their weights keep their dtype. `load_in_16bit`: no quantization.
        `fast_inference`: `model.fast_generate` uses vLLM where that is installed; else our own batched generation.
        `auto_model=AutoModelForSequenceClassification` or `num_labels` load a classifier, such as a reward model, with
        `id2label`, `label2id` and `problem_type` as in transformers. A head that the checkpoint does not have is drawn
        from `random_state`.
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
        dtype, device_map = translate_unsloth_loading(dtype, device_map, others)
        vllm_options = {name: others.pop(name) for name in VLLM_OPTIONS if fast_inference and name in others}
        kind = kind_for(auto_model, take_labels(others))
        _check_arguments(FastLanguageModel.from_pretrained, others)
        check_checkpointing(use_gradient_checkpointing)
        multi_gpu = wants_multi_gpu(enable_multi_gpu, use_multi_gpu)
        if auto_device_map:
            device_map = resolve_auto_map(device_map)
        if multi_gpu and not (may_span_devices(device_map) and launched_rank() is None):
            multigpu.start_ranks()
        device, free_memory = resolve_devices(device_map, max_memory, multi_gpu=multi_gpu)
        quant_format = requested_quant_format(load_in_4bit, load_in_8bit, load_in_fp8, load_in_16bit)
        if quant_format is None and load_in_fp8 is None and dtype is None and not (full_finetuning or load_in_16bit):
            quant_format = default_fp8(device, split=free_memory is not None)
        config = ModelConfig(path=model_name, revision=revision, trust_remote_code=trust_remote_code)
        check_quant_format(quant_format, full_finetuning, device)
        with hub_token(token):
            adapter = adapter_base(config)
            if adapter is not None:
                config = _check_adapter(*adapter, full_finetuning=full_finetuning)
            kind = _found_kind(kind, config, adapter, any_kind=auto_model is None and not others.get("text_only"))
            stored = None if adapter is None else RopeChange.read(adapter[0])
            rope = plan_rope(read_config(config, kind), max_seq_length, rope_scaling, stored=stored)
            tokenizer = tokenizer_with_length(config, max_seq_length, kind)
            model = load_model(
                config,
                dtype=chosen_dtype(
                    checkpoint_dtype(config, kind) if dtype == "auto" else dtype, full_finetuning, device
                ),
                device=device if free_memory is None else torch.device("cpu"),
                quantize="dense" if full_finetuning else quant_format,
                rope=rope,
                kind=kind,
                seed=random_state,
            )
            restore_saved_config(model, config, kind)
        disable_without_experts(model)
        model.requires_grad_(full_finetuning)
        fast, isolation = _made_fast(model, tokenizer, kind)
        fast.max_seq_length, fast.requested_checkpointing = max_seq_length, use_gradient_checkpointing
        fast.trains_in_full = full_finetuning
        fast.rope, fast.prompt_tokenizer = rope, plain_tokenizer(tokenizer)
        fast.prompt_processor = tokenizer if kind is VISION else None
        if fast_inference:
            fast.vllm_engine = inference_engine(config, model, quant_format, max_seq_length, vllm_options)
        fast.why_not_packed, fast.packed_within = isolation.reason, isolation.within
        if free_memory is not None:
            assert device_map is not None
            split(model, place(model, device_map, free_memory, max_memory))
        if full_finetuning:
            speed_up_full(fast, model, use_gradient_checkpointing, in_fp8=quant_format == "fp8")
        peft.apply()
        trl.apply()
        if adapter is not None:
            model = cast(Any, load_adapter(model, adapter[0], trainable=True))
            prepare_adapted(fast, cast(PeftModel, model))
        fast.on_adapters = None if full_finetuning else prepare_adapted
        return model, tokenizer

    @staticmethod
    def get_peft_model(
        model: PreTrainedModel,
        r: int = 16,
        target_modules: str | list[str] | None = "all-linear",
        lora_alpha: float = 16,
        lora_dropout: float = 0.0,
        bias: Literal["none", "lora_only", "all"] = "none",
        use_gradient_checkpointing: CheckpointingMode | None = None,
        random_state: int = 3407,
        use_rslora: bool = False,
        use_dora: bool = False,
        *,
        max_seq_length: int | None = None,
        target_parameters: Sequence[str] | None = None,
        modules_to_save: Sequence[str] | None = None,
        ensure_weight_tying: bool = True,
        finetune_attention_modules: bool = True,
        finetune_mlp_modules: bool = True,
        layers_to_transform: int | Sequence[int] | None = None,
        layers_pattern: str | Sequence[str] | None = None,
        exclude_modules: str | Sequence[str] | None = None,
        **others: Any,
    ) -> PeftModel:
        """Add LoRA (or DoRA) adapters in float32 to `model`, fused where that is exact.

        `use_gradient_checkpointing`: True recomputes whole layers; "selective" saves what is expensive to recompute;
        "offload" (or "unsloth") keeps layer inputs in host memory; False leaves it to the trainer's own
        `gradient_checkpointing`; None is what was passed to `from_pretrained`, or else False.
        `target_modules`: names, of which those that the model lacks are ignored if others match, or a regular
        expression for whole names. `layers_to_transform`, `layers_pattern` and `exclude_modules` choose among them, as
        in PEFT; `rank_pattern`, `alpha_pattern`, `init_lora_weights`, `lora_bias`, `trainable_token_indices` and `bias`
        are passed to PEFT. `finetune_..._modules` False leaves
        out the layers of attention or of the MLPs. `max_seq_length` replaces that of `from_pretrained`.
        `target_parameters`: stacked experts to adapt, as in PEFT.
        A model loaded with `full_finetuning=True` is returned as it is, with a warning.
        The input embedding and the output head (`embed_tokens`, `lm_head`), named in `target_modules` or
        `modules_to_save`, are trained in full, as float32 copies; tied ones as one, if `ensure_weight_tying`.
        """
        _check_arguments(FastLanguageModel.get_peft_model, _without_task(model, others))
        if use_gradient_checkpointing is not None:
            check_checkpointing(use_gradient_checkpointing)
        if getattr(model, "trains_in_full", False):
            logger.warning("get_peft_model has no effect: the model was loaded with full_finetuning=True")
            return cast(PeftModel, model)
        _check_base_model(model, use_dora=use_dora)
        layers, full_modules = split_targets(
            model, target_modules, modules_to_save, ensure_weight_tying=ensure_weight_tying
        )
        method = method_config(
            kind="dora" if use_dora else "lora",
            rank=r,
            alpha=lora_alpha,
            dropout=lora_dropout,
            rslora=use_rslora,
            target_parameters=tuple(target_parameters or ()),
            target_modules=chosen_targets(
                model,
                layers,
                attention=finetune_attention_modules,
                mlp=finetune_mlp_modules,
                choice=LayerChoice(exclude_modules, layers_to_transform, layers_pattern),
            ),
        )
        if max_seq_length is not None:
            check_loaded_length(max_seq_length, model.config)
            model.max_seq_length = max_seq_length
        on_adapters, model.on_adapters = model.on_adapters, None  # which does not know the checkpointing
        try:
            adapted: Any = apply_method(
                model,
                method,
                seed=random_state,
                full_modules=full_modules,
                lora=config_arguments({**others, "bias": bias}),
            )
        finally:
            model.on_adapters = on_adapters
        prepare_adapted(model, adapted, use_gradient_checkpointing)
        return adapted

    @staticmethod
    def for_training(model: nn.Module) -> nn.Module:
        return model.train()

    @staticmethod
    def for_inference(model: nn.Module) -> nn.Module:
        """Disable dropout, and return full logits from every forward."""
        release_layer_graphs(model)
        return model.eval()


def _found_kind(
    asked: ModelKind, config: ModelConfig, adapter: tuple[Path, ModelConfig] | None, *, any_kind: bool
) -> ModelKind:
    """Return the kind that the files are of, unless the arguments decide it."""
    labels = None if adapter is None else labels_of_adapter(adapter[0])
    if labels is not None:
        return CLASSIFIER.labelled({**labels, **asked.labels})
    return kind_to_load(config) if any_kind and not asked.classifies else asked


def _made_fast(model: PreTrainedModel, tokenizer: Any, kind: ModelKind) -> tuple[FastCausalLM, PackingSupport]:
    if kind.classifies:
        use_padding_of(tokenizer, model)
        return make_fast_classifier(model), NO_PACKED_SCORES
    isolation = prepare_for_packing(model) if kind is TEXT else NO_PACKING
    return make_fast(model), isolation


def _without_task(model: nn.Module, others: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments without a `task_type` that is the model's."""
    task = "SEQ_CLS" if is_classifier(model) else "CAUSAL_LM"
    if "task_type" in others and others["task_type"] not in (None, task):
        raise ConfigError(
            f"FastLanguageModel.get_peft_model does not support task_type={others['task_type']!r} for a "
            f"{type(model).__name__}.",
            fix="Load the model with num_labels to train a classifier."
            if others["task_type"] == "SEQ_CLS"
            else "Remove it.",
        )
    return {name: value for name, value in others.items() if name != "task_type"}


def _check_base_model(model: nn.Module, *, use_dora: bool) -> None:
    """Check the model that is to get adapters."""
    if any(isinstance(layer, BaseTunerLayer) for layer in model.modules()):
        raise ConfigError(
            "This model already has adapters.", fix="Train those, or pass the result of `model.unload()`."
        )
    if not isinstance(model, FastCausalLM):
        raise ConfigError(
            f"get_peft_model needs a model from FastLanguageModel.from_pretrained, not a {type(model).__name__}.",
            fix="Load it with FastLanguageModel.from_pretrained, or use peft.get_peft_model.",
        )
    check_trainable_dtype(cast(nn.Module, model))
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


def _check_arguments(function: Callable[..., Any], others: Mapping[str, Any]) -> None:
    loading = function is FastLanguageModel.from_pretrained
    check_others(
        others,
        LOADING_NEUTRAL if loading else ADAPTER_NEUTRAL,
        LOADING_UNUSED if loading else ADAPTER_UNUSED,
        function=function.__name__,
        parameters=inspect.signature(function).parameters,
    )


def prepare_for_packing(model: PreTrainedModel) -> PackingSupport:
    """Return whether rows of several documents are correct; if they are, documents are isolated from now on."""
    isolation = isolate_documents(model)  # for rows of any length, as the trainer decides
    if isolation.masked is not None:
        logger.info("attention in packed batches needs a mask: %s", isolation.masked)
    if isolation.refused is not None:
        raise UnsupportedModelError(f"The model cannot be trained on text: {isolation.refused}.", fix="Use a decoder.")
    if not isolation.modes:
        logger.warning("rows with several documents (packing, padding_free) are rejected: %s", isolation.reason)
    return isolation


def restore_saved_config(model: PreTrainedModel, config: ModelConfig, kind: ModelKind) -> None:
    """Undo config changes made while loading: they would be saved with the model."""
    saved, own = read_config(config, kind).get_text_config(), model.config.get_text_config()
    if hasattr(saved, "use_cache"):
        own.use_cache = saved.use_cache
    else:  # an encoder's
        del own.use_cache
    model.name_or_path = model.config.name_or_path = base_name(config)
