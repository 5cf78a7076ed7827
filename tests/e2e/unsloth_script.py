"""Script of test_e2e_unsloth: Unsloth's own model and TRL's trainer; all that is ours is `enable_multi_gpu`.

`unsloth_script FIRST MODEL BATCH PASSES AGGREGATION OUTPUT`: FIRST is the library that is imported first; a step has
BATCH samples, which each rank accumulates in PASSES.
Each rank writes what it found into the folder OUTPUT.
"""

# ruff: noqa: E402  # the order of imports is what is tested

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

FIRST, MODEL, BATCH, PASSES, AGGREGATION, OUTPUT = sys.argv[1:]
RANKS = int(os.environ.get("WORLD_SIZE", "1"))


def enable() -> Any:
    import pantheraml

    pantheraml.enable_multi_gpu(
        num_gpus=RANKS, batch_size_per_gpu=int(BATCH) // RANKS // int(PASSES), gradient_aggregation=AGGREGATION
    )
    return pantheraml


if FIRST == "pantheraml":
    pantheraml = enable()
from unsloth import FastLanguageModel

if FIRST == "unsloth":
    pantheraml = enable()

import torch
from datasets import Dataset
from transformers import Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer

model, tokenizer = FastLanguageModel.from_pretrained(MODEL, max_seq_length=64, load_in_4bit=False, dtype=torch.float32)
model = FastLanguageModel.get_peft_model(
    model, r=4, target_modules=["q_proj", "v_proj"], use_gradient_checkpointing=True, random_state=1
)
trainer = SFTTrainer(
    model=model,
    processing_class=tokenizer,
    train_dataset=Dataset.from_list([{"text": f"{i} + {i * 3} = {i * 4}"} for i in range(32)]),
    args=SFTConfig(
        output_dir="run", max_steps=4, per_device_train_batch_size=1, learning_rate=0.1, max_grad_norm=0.0,
        optim="sgd", lr_scheduler_type="constant", logging_steps=1, save_strategy="no", report_to=[], bf16=False,
        gradient_accumulation_steps=int(PASSES), disable_tqdm=True, packing=False,
        ddp_backend=os.environ.get("DDP_BACKEND") if RANKS > 1 else None,
    ),
)  # fmt: skip
# a checkpointed layer runs once more in backward, the embedding does not
calls = {"embed_tokens": 0, "layers.0.self_attn": 0}
computed_in = set()


def count(name: str) -> Any:
    def hook(*_: Any) -> None:
        calls[name] += 1
        computed_in.add(str(torch.get_autocast_dtype("cuda")) if torch.is_autocast_enabled("cuda") else "as loaded")

    return hook


for name, module in model.named_modules():
    for counted in calls:
        if name.endswith(counted):
            module.register_forward_pre_hook(count(counted))
statistics = pantheraml.unsloth_train(trainer)
weights = torch.cat([value.detach().flatten() for value in model.parameters() if value.requires_grad])
pantheraml.disable_multi_gpu()
another = Trainer(model, TrainingArguments("another", per_device_train_batch_size=7, report_to="none"))
found = {
    "loss": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
    "mean_loss": statistics.training_loss,
    "weights": weights.tolist(),
    "samples": trainer.args.per_device_train_batch_size,
    "wrapped": type(trainer.model_wrapped).__name__,
    "model": type(trainer.model).__module__,
    "forwards": calls["embed_tokens"],
    "attention_calls": calls["layers.0.self_attn"],
    "computed_in": sorted(computed_in),
    "reverted": another.args.per_device_train_batch_size == 7,
}
Path(OUTPUT, f"{os.environ.get('RANK', '0')}.json").write_text(json.dumps(found))
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
