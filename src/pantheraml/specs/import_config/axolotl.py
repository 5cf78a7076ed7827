"""Axolotl's config file."""

from __future__ import annotations

import math

from pantheraml.specs.import_config import axolotl_keys
from pantheraml.specs.import_config.axolotl_data import translate_data
from pantheraml.specs.import_config.draft import Draft
from pantheraml.specs.import_config.hf_training import (
    Names,
    batch,
    project,
    report_to,
    sharding,
    translate_training,
)
from pantheraml.specs.import_config.lora import set_targets
from pantheraml.specs.train import SPLIT_STRATEGIES

_NAMES = Names(
    epochs="num_epochs",
    schedule="lr_scheduler",
    optimizer="optimizer",
    workers="dataset_processes",
    evaluation_data=("val_set_size", "test_datasets"),
    default_epochs=1,
    default_schedule="cosine",
    default_save_steps=None,
    default_warmup=(
        "Axolotl warms up over 3 % of the steps, at most 100, if nothing is set; here over none: set"
        " train.warmup_steps."
    ),
    ratio_rounds_up=False,
)
_LORA_KEYS = (
    "lora_r",
    "lora_alpha",
    "lora_dropout",
    "lora_target_modules",
    "lora_target_linear",
    "lora_target_parameters",
    "lora_modules_to_save",
    "lora_fan_in_fan_out",
    "lora_model_dir",
    "peft_use_dora",
    "peft_use_rslora",
)
_FINE_PLUGINS = ("LigerPlugin", "CutCrossEntropyPlugin", "KernelsPlugin")
_DEGREES = {
    "dp_shard_size": "shard",
    "dp_replicate_size": "replicate",
    "tensor_parallel_size": "tensor",
    "context_parallel_size": "context",
    "sequence_parallel_degree": "context",
}


def translate(draft: Draft) -> None:
    _refuse_other_training(draft)
    _model(draft)
    translate_data(draft)
    _lengths(draft)
    _method(draft)
    _precision(draft)
    _parallel(draft)
    _batch(draft)
    translate_training(draft, _NAMES)
    _checkpointing(draft)
    _minimum_rate(draft)
    _trackers(draft)
    _plugins(draft)
    draft.table(axolotl_keys.NOT_NEEDED, draft.unneeded)
    draft.table(axolotl_keys.NOT_SUPPORTED, draft.unsupported_if_on)


def _refuse_other_training(draft: Draft) -> None:
    only = "import-config converts supervised fine-tuning; use TRL's trainer for this one (docs/trl.md)."
    for key in ("rl", "reward_model", "process_reward_model"):
        if draft.get(key):
            shown = f": {draft.get(key)}" if key == "rl" else ""
            draft.refuse(key, f"asks for another kind of training{shown}", fix=only)
        draft.unneeded(key, "off")
    kind = draft.text("model_type") or ""
    if "SequenceClassification" in kind or "TokenClassification" in kind or draft.get("num_labels"):
        draft.refuse(draft.first("num_labels", "model_type"), "asks for a classifier, not a language model", fix=only)
    if kind and not kind.endswith("ForCausalLM"):
        draft.unsupported("model_type", "models are loaded as causal language models")
    draft.unneeded("model_type", "the class follows from the model's config.json")
    draft.unneeded("tokenizer_type", "the class follows from the tokenizer's files")
    draft.unneeded("num_labels", "off")


def _model(draft: Draft) -> None:
    if not draft.text("base_model"):
        draft.refuse("base_model", "is missing", fix="Name the model that the run starts from.")
    draft.put("model.path", draft.get("base_model"), "base_model")
    tokenizer = draft.text("tokenizer_config")
    if tokenizer and tokenizer != draft.get("base_model"):
        draft.put("model.tokenizer", tokenizer, "tokenizer_config")
    draft.unneeded("tokenizer_config", "the tokenizer of the model")
    if draft.get("base_model_config") == draft.get("base_model"):
        draft.unneeded("base_model_config", "the config of the model")
    draft.unsupported("base_model_config", "the model's own config.json is used")
    for key in ("revision_of_model", "model_revision"):
        if draft.has(key):
            draft.put("model.revision", str(draft.get(key)), key)
    if draft.flag("trust_remote_code"):
        draft.put("model.trust_remote_code", True, "trust_remote_code", reason="runs code of the model repository")
    draft.unneeded("trust_remote_code", "off")
    if draft.get("device_map") in SPLIT_STRATEGIES:
        draft.put("model.device_map", draft.get("device_map"), "device_map")
    else:
        draft.unsupported("device_map", "devices are assigned by pantheraml train; see model.device_map")
    tokens = draft.get("special_tokens")
    others = [name for name in tokens if name != "pad_token"] if isinstance(tokens, dict) else []
    if tokens and (others or not isinstance(tokens, dict)):
        advice = "the tokenizer is used as it is: set model.tokenizer to a folder with these tokens"
        draft.unsupported("special_tokens", f"{advice} ({', '.join(map(str, others))})" if others else advice)
    else:
        draft.unneeded("special_tokens", "padding bears no loss, whichever token it is")


def _lengths(draft: Draft) -> None:
    length = draft.integer("sequence_len")
    draft.put("data.seq_len", 512 if length is None else length, "sequence_len")
    draft.put("data.packing", bool(draft.flag("sample_packing")), "sample_packing")
    long = draft.get("excess_length_strategy") or "drop"
    if long in ("truncate", "raise"):
        draft.put("data.on_long_row", {"truncate": "truncate", "raise": "stop"}[long], "excess_length_strategy")
    else:
        advice = "rows longer than data.seq_len are truncated and counted, not dropped (data.on_long_row)"
        draft.unsupported("excess_length_strategy", advice)
        if not draft.has("excess_length_strategy"):
            draft.notes.append(f"Axolotl drops rows longer than sequence_len; here {advice.partition(' are ')[0]} are"
                               " truncated and counted (data.on_long_row).")  # fmt: skip


def _method(draft: Draft) -> None:
    adapter = draft.get("adapter")
    four, eight = bool(draft.flag("load_in_4bit")), bool(draft.flag("load_in_8bit"))
    if adapter in (None, "", "none"):
        draft.put("method.kind", "full", "adapter", comment="no adapter" if not draft.has("adapter") else "")
        for key in ("load_in_4bit", "load_in_8bit"):
            draft.unsupported_if_on(key, "quantized weights cannot be trained without an adapter")
        for key in _LORA_KEYS:
            draft.unneeded(key, "no adapter is trained")
        return
    if adapter not in ("lora", "qlora"):
        draft.refuse("adapter", f"asks for {adapter}", fix="import-config knows lora, qlora and no adapter.")
    quantized = adapter == "qlora" or four
    if adapter == "qlora" and draft.get("load_in_4bit") is False:
        draft.refuse("load_in_4bit", "is false, but adapter: qlora needs 4 bits", fix="Set it to true, or use lora.")
    dora = bool(draft.flag("peft_use_dora"))
    kind = "qlora" if quantized else "dora" if dora else "lora"
    draft.put("method.kind", kind, "adapter", *(["load_in_4bit"] if four else []),
              *(["peft_use_dora"] if kind == "dora" else []))  # fmt: skip
    draft.unsupported_if_on("peft_use_dora", "DoRA over a 4-bit model is not supported; method.kind is qlora")
    draft.unneeded("load_in_4bit", "off")
    if eight and kind == "lora":
        draft.put("model.precision", "int8", "load_in_8bit")
    else:
        draft.unsupported_if_on("load_in_8bit", f"8-bit base weights need method.kind=lora, and this is {kind}")
    _lora(draft)


def _lora(draft: Draft) -> None:
    if draft.has("lora_r"):
        draft.put("method.rank", draft.integer("lora_r"), "lora_r")
    if draft.has("lora_alpha"):
        draft.put("method.alpha", draft.number("lora_alpha"), "lora_alpha")
    if not draft.has("lora_r") or not draft.has("lora_alpha"):
        draft.notes.append("Axolotl has no default for lora_r and lora_alpha; here rank 16 and alpha 32 are used.")
    draft.put("method.dropout", draft.number("lora_dropout") or 0.0, "lora_dropout")
    if draft.flag("peft_use_rslora"):
        draft.put("method.rslora", True, "peft_use_rslora")
    draft.unneeded("peft_use_rslora", "off")
    if draft.has("lora_target_parameters"):
        draft.put("method.target_parameters", draft.get("lora_target_parameters"), "lora_target_parameters")
    modules = draft.get("lora_target_modules")
    if draft.flag("lora_target_linear"):
        draft.put("method.target_modules", "all-linear", "lora_target_linear")
        draft.unneeded("lora_target_modules", "lora_target_linear covers every linear layer")
        return
    draft.unneeded("lora_target_linear", "off")
    set_targets(draft, "lora_target_modules", modules)


def _precision(draft: Draft) -> None:
    keys = ("bf16", "bfloat16", "fp16", "float16")
    given = {key: draft.get(key) for key in keys}
    half = given["fp16"] is True or given["float16"] is True
    wants_bf16 = given["bfloat16"] is True or given["bf16"] in (True, "full", "true")
    automatic = given["bf16"] in (None, "auto") and not half
    if "model.precision" in draft.settings:  # int8
        for key in keys:
            draft.unneeded(key, "int8 weights compute in bf16 where the GPU has it, else in fp16")
        return
    if wants_bf16 or automatic:
        source = "bfloat16" if given["bfloat16"] is True else "bf16"
        auto = "set auto for a choice by the GPU: fp16, bf16, fp8 base weights" if automatic else ""
        draft.put("model.precision", "bf16", source, reason=auto)
    elif half:
        draft.put("model.precision", "fp16", "fp16" if given["fp16"] is True else "float16")
    else:
        draft.put("model.precision", "fp32", comment="bf16: false, and no fp16")
        draft.part_of("bf16", "model.precision")
    for key in keys:
        draft.unneeded(key, "off" if given[key] is False else "follows from the other precision")
    sharded = any(draft.get(key) for key in ("fsdp", "fsdp_config", "deepspeed"))
    full = draft.settings["method.kind"].value == "full"
    if full and not sharded and draft.settings["model.precision"].value == "bf16":
        draft.put("train.weights", "bf16", comment="Axolotl trains bf16 weights (here with stochastic rounding)")
    if draft.has("torch_dtype"):
        draft.unneeded("torch_dtype", "follows from bf16 and fp16")


def _parallel(draft: Draft) -> None:
    for key, name in _DEGREES.items():
        degree = draft.integer(key)
        if degree is not None and degree > 0:
            draft.put(f"parallel.{name}", degree, key)
        else:
            draft.unneeded(key, "off")
    shard = draft.integer("dp_shard_size")
    sharding(draft, shard, "fsdp", "fsdp_config", "deepspeed")
    draft.unneeded("fsdp_version", "sharding is FSDP2")


def _batch(draft: Draft) -> None:
    micro = draft.integer("micro_batch_size")
    micro = 1 if micro is None else micro
    steps = draft.integer("gradient_accumulation_steps")
    whole = draft.integer("batch_size")
    draft.unneeded("batch_size", "gradient_accumulation_steps is given")
    if steps is None and whole and micro > 0:
        steps = max(1, whole // micro)
        draft.part_of("batch_size", "train.global_batch_size")
    degrees = [draft.integer(key) for key in ("dp_shard_size", "dp_replicate_size")]
    known = [degree for degree in degrees if degree is not None and degree > 0]
    ranks = math.prod(known) if known else None
    keys = ["dp_shard_size", "dp_replicate_size"]
    batch(draft, micro, 1 if steps is None else steps, ranks, "micro_batch_size", "gradient_accumulation_steps", *keys)


def _checkpointing(draft: Draft) -> None:
    given, offload = draft.get("gradient_checkpointing"), draft.get("activation_offloading")
    kinds = {True: "full", False: "none", None: "none", "offload": "offload", "unsloth": "offload"}
    kind = kinds.get(given) if isinstance(given, bool | str | None) else None
    if kind is None:
        draft.unsupported("gradient_checkpointing", "not one of true, false, offload; train.activation_checkpointing")
        kind = "full"
    if offload in (True, "legacy", "hidden_states") and kind != "none":
        kind = "offload"
        draft.put("train.activation_checkpointing", kind, "gradient_checkpointing", "activation_offloading")
        return
    draft.unsupported_if_on("activation_offloading", "use train.activation_checkpointing=offload (host memory)")
    if given not in (None, False) or draft.has("gradient_checkpointing"):
        draft.put("train.activation_checkpointing", kind, "gradient_checkpointing")


def _minimum_rate(draft: Draft) -> None:
    ratio = draft.number("cosine_min_lr_ratio")
    schedule = draft.settings.get("train.schedule")
    if ratio is not None and schedule is not None and schedule.value == "cosine":
        draft.put("train.min_learning_rate_ratio", ratio, "cosine_min_lr_ratio")
    draft.unneeded("cosine_min_lr_ratio", "the schedule is not cosine")


def _trackers(draft: Draft) -> None:
    names = {"wandb": "wandb_project", "mlflow": "mlflow_experiment_name", "trackio": "trackio_project_name"}
    for sink, key in (*names.items(), ("tensorboard", "use_tensorboard")):
        use = draft.get(f"use_{sink}")
        disabled = use is False or (sink == "wandb" and draft.get("wandb_mode") == "disabled")
        if (use or draft.get(key)) and not disabled:
            report_to(draft, sink, f"use_{sink}", key)
            if key in names.values() and draft.get(key):
                project(draft, key)
        draft.unneeded(f"use_{sink}", "off")
        draft.unneeded(key, "off")
    if draft.get("wandb_mode") in ("disabled", "online"):
        draft.unneeded("wandb_mode", "follows from report.sinks")
    else:
        draft.unsupported("wandb_mode", "set the environment variable WANDB_MODE")


def _plugins(draft: Draft) -> None:
    plugins = draft.get("plugins") or []
    if not isinstance(plugins, list):
        draft.refuse("plugins", "takes a list of names")
    others = [str(name) for name in plugins if not str(name).endswith(_FINE_PLUGINS)]
    if others:
        draft.unsupported("plugins", f"there is no counterpart of {', '.join(others)}")
    else:
        draft.unneeded("plugins", "fused kernels are chosen automatically (train.fused)")
