"""LLaMA-Factory's config file (`llamafactory-cli train FILE`)."""

from __future__ import annotations

from pantheraml.specs.import_config import llama_factory_keys
from pantheraml.specs.import_config.draft import Draft
from pantheraml.specs.import_config.hf_training import (
    SINKS,
    Names,
    batch,
    has_eval,
    project,
    report_to,
    sharding,
    translate_training,
)
from pantheraml.specs.import_config.llama_factory_data import translate_data
from pantheraml.specs.import_config.lora import set_targets

_NAMES = Names(
    epochs="num_train_epochs",
    schedule="lr_scheduler_type",
    optimizer="optim",
    workers="preprocessing_num_workers",
    evaluation_data=("val_size", "eval_dataset"),
    default_epochs=3,
    default_schedule="linear",
    default_save_steps=500,
)
_LORA_KEYS = ("lora_rank", "lora_alpha", "lora_dropout", "lora_target", "use_dora", "use_rslora")


def translate(draft: Draft) -> None:
    _refuse_other_training(draft)
    _model(draft)
    translate_data(draft)
    _lengths(draft)
    _method(draft)
    _precision(draft)
    sharding(draft, None, "deepspeed", "fsdp", "fsdp_config")
    draft.unneeded("fsdp_transformer_layer_cls_to_wrap", "decoder layers are found by themselves")
    micro = draft.integer("per_device_train_batch_size")
    steps = draft.integer("gradient_accumulation_steps")
    batch(draft, 8 if micro is None else micro, 1 if steps is None else steps, None, "per_device_train_batch_size",
          "gradient_accumulation_steps")  # fmt: skip
    translate_training(draft, _NAMES)
    _checkpointing(draft)
    _trackers(draft)
    draft.unneeded("do_eval", "the run evaluates if there is evaluation data" if has_eval(draft) else "off")
    draft.table(llama_factory_keys.NOT_NEEDED, draft.unneeded)
    draft.table(llama_factory_keys.NOT_SUPPORTED, draft.unsupported_if_on)


def _refuse_other_training(draft: Draft) -> None:
    stage = draft.get("stage") or "sft"
    if stage != "sft":
        draft.refuse(
            "stage",
            f"is {stage}",
            fix="import-config converts stage: sft; use TRL's trainer for others (docs/trl.md).",
        )
    if not draft.flag("do_train"):
        what = {"export_dir": "exports a model", "do_predict": "predicts", "infer_backend": "is for chat"}
        key = next((key for key in what if draft.has(key)), "do_train")
        draft.refuse(
            key,
            f"shows a file that {what[key]}" if key in what else "is not true",
            fix="Give the file of a training run (do_train: true).",
        )
    draft.unneeded("do_train", "`pantheraml train` trains")
    draft.unneeded("stage", "sft is what `pantheraml train` does")


def _model(draft: Draft) -> None:
    if not draft.text("model_name_or_path"):
        draft.refuse("model_name_or_path", "is missing", fix="Name the model that the run starts from.")
    draft.put("model.path", draft.get("model_name_or_path"), "model_name_or_path")
    if draft.has("model_revision") and draft.get("model_revision") != "main":
        draft.put("model.revision", str(draft.get("model_revision")), "model_revision")
    draft.unneeded("model_revision", "main, as here")
    if draft.flag("trust_remote_code"):
        draft.put("model.trust_remote_code", True, "trust_remote_code", reason="runs code of the model repository")
    draft.unneeded("trust_remote_code", "off")
    if draft.flag("train_from_scratch"):
        draft.put("model.init", "random", "train_from_scratch")
    draft.unneeded("train_from_scratch", "off")


def _lengths(draft: Draft) -> None:
    length = draft.integer("cutoff_len")
    draft.put("data.seq_len", 2048 if length is None else length, "cutoff_len")
    neat = bool(draft.flag("neat_packing"))
    packing = neat or bool(draft.flag("packing"))
    draft.put("data.packing", packing, "packing", *(["neat_packing"] if neat else []))
    draft.unneeded("neat_packing", "documents never attend to each other here")
    if packing and not neat:
        draft.notes.append("Packed documents do not attend to each other here, as with neat_packing: true.")


def _method(draft: Draft) -> None:
    kind = draft.get("finetuning_type") or "lora"
    if kind not in ("lora", "full"):
        draft.refuse("finetuning_type", f"is {kind}", fix="import-config converts lora and full.")
    bits = draft.get("quantization_bit")
    if draft.get("quantization_method") in (None, "bnb", "bitsandbytes"):
        draft.unneeded("quantization_method", "bits are chosen by method.kind and model.precision")
    draft.unsupported("quantization_method", "only bitsandbytes' 4 and 8 bits have a counterpart here")
    if draft.get("quantization_type") in (None, "nf4"):
        draft.unneeded("quantization_type", "nf4, as here")
    draft.unsupported("quantization_type", "4-bit weights are nf4 here")
    if kind == "full":
        draft.put("method.kind", "full", "finetuning_type")
        draft.unsupported_if_on("quantization_bit", "quantized weights cannot be trained without an adapter")
        for key in _LORA_KEYS:
            draft.unneeded(key, "no adapter is trained")
        return
    dora = bool(draft.flag("use_dora"))
    ours = "qlora" if bits == 4 else "dora" if dora else "lora"
    draft.put("method.kind", ours, "finetuning_type", *(["quantization_bit"] if bits == 4 else []),
              *(["use_dora"] if ours == "dora" else []))  # fmt: skip
    draft.unsupported_if_on("use_dora", "DoRA over a 4-bit model is not supported; method.kind is qlora")
    if bits == 8 and ours == "lora":
        draft.put("model.precision", "int8", "quantization_bit")
    else:
        draft.unsupported_if_on("quantization_bit", f"{bits} bits with {ours} have no counterpart here")
    _lora(draft)


def _lora(draft: Draft) -> None:
    rank, alpha = draft.integer("lora_rank"), draft.number("lora_alpha")
    rank = 8 if rank is None else rank
    draft.put("method.rank", rank, "lora_rank")
    twice = "" if alpha is not None else f"default of {draft.tool}: twice the rank"
    draft.put("method.alpha", float(2 * rank) if alpha is None else alpha, "lora_alpha", comment=twice)
    draft.put("method.dropout", draft.number("lora_dropout") or 0.0, "lora_dropout")
    if draft.flag("use_rslora"):
        draft.put("method.rslora", True, "use_rslora")
    draft.unneeded("use_rslora", "off")
    target = draft.get("lora_target")
    names = [part.strip() for part in target.split(",")] if isinstance(target, str) else target
    if names in (None, "all", ["all"]):
        draft.put("method.target_modules", "all-linear", "lora_target")
    else:
        set_targets(draft, "lora_target", names)


def _precision(draft: Draft) -> None:
    pure = bool(draft.flag("pure_bf16"))
    keys = ("pure_bf16", "bf16", "fp16")
    if "model.precision" in draft.settings:  # int8
        for key in keys:
            draft.unneeded(key, "int8 weights compute in bf16 where the GPU has it, else in fp16")
        return
    if pure or draft.flag("bf16"):
        draft.put("model.precision", "bf16", "pure_bf16" if pure else "bf16")
    elif draft.flag("fp16"):
        draft.put("model.precision", "fp16", "fp16")
    else:
        draft.put("model.precision", "fp32", comment="neither bf16 nor fp16")
    if pure and draft.settings["method.kind"].value == "full":
        draft.put("train.weights", "bf16", "pure_bf16", reason="updates use stochastic rounding")
    for key in keys:
        draft.unneeded(key, "off" if draft.get(key) is False else "follows from the other precision")


def _checkpointing(draft: Draft) -> None:
    off = bool(draft.flag("disable_gradient_checkpointing"))
    if draft.flag("use_unsloth_gc") and not off:
        draft.put("train.activation_checkpointing", "offload", "use_unsloth_gc")
    else:
        kind = "none" if off else "full"
        draft.put("train.activation_checkpointing", kind, "disable_gradient_checkpointing")
    draft.unneeded("gradient_checkpointing", "LLaMA-Factory goes by disable_gradient_checkpointing")


def _trackers(draft: Draft) -> None:
    given = draft.get("report_to")
    names = [given] if isinstance(given, str) else given if isinstance(given, list) else []
    wanted = [str(name) for name in names if name != "none"]
    known = [name for name in SINKS if name in wanted]
    for name in known:
        report_to(draft, name, "report_to")
    others = [name for name in wanted if name not in SINKS]
    if others:
        draft.unsupported_part("report_to", f"{', '.join(others)}: not one of the trackers {', '.join(SINKS)}")
    draft.unneeded("report_to", "none")
    if draft.has("project"):
        project(draft, "project")
    if draft.has("trackio_space_id"):
        draft.unsupported("trackio_space_id", "set it in the environment of the tracker")
