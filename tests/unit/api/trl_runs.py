"""Short runs of TRL's trainers on a tiny model, recorded step by step, to compare our models with plain PEFT."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback, set_seed
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

from pantheraml import FastLanguageModel
from tests import toy

STEPS = 6
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TRAINERS: dict[str, tuple[Any, Any]] = {
    "sft": (SFTTrainer, SFTConfig),
    "dpo": (DPOTrainer, DPOConfig),
    "kto": (KTOTrainer, KTOConfig),
    "orpo": (ORPOTrainer, ORPOConfig),
    "grpo": (GRPOTrainer, GRPOConfig),
    "rloo": (RLOOTrainer, RLOOConfig),
}
SAMPLING = ("grpo", "rloo")

SETTINGS: dict[str, Any] = {
    "max_steps": STEPS,
    "per_device_train_batch_size": 4,
    "learning_rate": 3e-3,
    # AdamW divides a gradient by its own size, so where that is near 0 it turns rounding into a full step: two
    # implementations of attention alone, with the plain model, then differ by 4e-4 after 6 steps (docs/trainers.md).
    # This epsilon is a tenth of a usual element of the gradient, and 1,000 times its rounding.
    "adam_epsilon": 1e-3,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
    "use_cpu": True,
    "bf16": False,
}


def rows(kind: str) -> Dataset:
    pairs = [(row["prompt"], row["completion"]) for row in toy.arithmetic(16)]
    if kind in SAMPLING:
        return Dataset.from_list([{"prompt": prompt} for prompt, _ in pairs])
    if kind in ("dpo", "orpo"):
        return Dataset.from_list([{"prompt": p, "chosen": c, "rejected": c[::-1] + "0"} for p, c in pairs])
    if kind == "kto":
        return Dataset.from_list(
            [{"prompt": p, "completion": c, "label": i % 2 == 0} for i, (p, c) in enumerate(pairs)]
        )
    return Dataset.from_list([{"prompt": p, "completion": c} for p, c in pairs])


def make_trainer(kind: str, model: Any, folder: Path, output: Path, *, peft_config: Any = None, **changes: Any) -> Any:
    trainer, config = TRAINERS[kind]
    settings = {**SETTINGS, **changes}
    more: dict[str, Any] = {}
    if kind in SAMPLING:
        settings |= {"max_completion_length": 8, "num_generations": 2, "beta": 0.1}
        more["reward_funcs"] = lambda completions, **_: [float(len(c)) for c in completions]
    return trainer(
        model=model,
        args=config(output_dir=str(output), **settings),
        train_dataset=rows(kind),
        processing_class=AutoTokenizer.from_pretrained(folder),
        peft_config=peft_config,
        **more,
    )


def loaded(folder: Path, **arguments: Any) -> Any:
    model, _ = FastLanguageModel.from_pretrained(str(folder), **{"device_map": "cpu", **arguments})
    return model


def fast_model(folder: Path, *, checkpointing: Any = False, **loading: Any) -> Any:
    return FastLanguageModel.get_peft_model(
        loaded(folder, **loading),
        r=4,
        lora_alpha=8,
        target_modules=TARGETS,
        use_gradient_checkpointing=checkpointing,
    )


def lora(**changes: Any) -> LoraConfig:
    return LoraConfig(r=4, lora_alpha=8, **{"task_type": "CAUSAL_LM", "target_modules": TARGETS, **changes})


def plain_base(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def plain_model(folder: Path, like: Any) -> Any:
    return plain_peft(plain_base(folder), lora(), like)


def plain_peft(base: Any, config: LoraConfig, like: Any) -> Any:
    """Return `base` with adapters of the same values as those of `like`."""
    plain = get_peft_model(base, config)
    set_peft_model_state_dict(plain, get_peft_model_state_dict(like))
    return plain


def dequantized(model: Any, folder: Path, place: Path) -> Path:
    """Save the weights that `model` computes with, as a plain folder; its adapters add nothing yet."""
    model.merge_and_unload().save_pretrained(place)
    AutoTokenizer.from_pretrained(folder).save_pretrained(place)
    return place


@dataclass
class Record(TrainerCallback):  # type: ignore[misc]  # transformers is not typed
    """Gradients of every step, as the optimizer gets them, and the weights after the last."""

    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    start: dict[str, torch.Tensor] = field(default_factory=dict)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trained = [(n, p) for n, p in kwargs["model"].named_parameters() if p.requires_grad]
        self.gradients.append({name: p.grad.clone() for name, p in trained if p.grad is not None})


def recorded(run: Any) -> Record:
    record = Record(start=_adapters(run.model))
    run.add_callback(record)
    set_seed(0)
    run.train()
    record.weights = _adapters(run.model)
    record.losses = [entry["loss"] for entry in run.state.log_history if "loss" in entry]
    return record


def _adapters(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in get_peft_model_state_dict(model).items()}


def gradient_error(ours: Record, theirs: Record) -> float:
    """Largest difference of a tensor's gradient in one step, relative to its norm over all steps."""
    assert len(ours.gradients) == len(theirs.gradients) > 0
    errors = []
    for name in theirs.gradients[0]:
        mine, other = ([step[name].double() for step in run.gradients] for run in (ours, theirs))
        norm = torch.stack(other).norm()
        errors += [float((m - o).norm() / norm) for m, o in zip(mine, other, strict=True)]
    return max(errors)


def weight_error(ours: Record, theirs: Record) -> float:
    assert ours.weights.keys() == theirs.weights.keys()
    return max(float((ours.weights[name] - theirs.weights[name]).abs().max()) for name in theirs.weights)


def largest_update(record: Record) -> float:
    return max(float((record.weights[name] - record.start[name]).abs().max()) for name in record.weights)
