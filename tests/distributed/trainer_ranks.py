"""Rank script of test_trainer: PantheraMLTrainer on all launched ranks, with the global batch of a single process.

`trainer_ranks OUTPUT MODEL [CHECKPOINT]`: rank r writes OUTPUT/rank-r.json. With CHECKPOINT, it is resumed from.
"""

from __future__ import annotations

import gc
import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset
from datasets.utils.logging import disable_progress_bar
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback, set_seed
from trl import SFTConfig

from pantheraml.base.env import process_rank
from pantheraml.base.errors import CheckpointError, ConfigError, DriftError
from pantheraml.specs.multi_gpu import MultiGPUConfig
from pantheraml.trainer import PantheraMLDistributedTrainer
from tests import toy

STEPS, BATCH, KILLED = 6, 8, 5


class Killed(Exception):
    pass


class Kill(TrainerCallback):  # type: ignore[misc]  # transformers is not typed
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == KILLED:
            raise Killed


class Corrupt(TrainerCallback):  # type: ignore[misc]
    """Changes a weight of the last rank."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        place = process_rank()
        if state.global_step == 1 and place.rank == place.world_size - 1:
            next(value for value in kwargs["model"].parameters() if value.requires_grad).data.add_(1e-3)


def make(
    model_folder: Path, output: Path, gpus: dict[str, Any] | None = None, *, dropout: float = 0.0,
    callbacks: list[TrainerCallback] | None = None, **settings: Any,
) -> Any:  # fmt: skip
    set_seed(0)
    base = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", lora_dropout=dropout)
    return PantheraMLDistributedTrainer(
        model=get_peft_model(base, lora),
        tokenizer=AutoTokenizer.from_pretrained(model_folder),
        train_dataset=Dataset.from_list(toy.arithmetic(64)),
        args=SFTConfig(
            output_dir=str(output),
            **{
                "max_steps": STEPS,
                "per_device_train_batch_size": BATCH // 2 // process_rank().world_size,
                "gradient_accumulation_steps": 2,
                "learning_rate": 1e-2,
                "adam_epsilon": 1e-3,  # or AdamW makes full steps of rounding
                "max_grad_norm": 0.0,  # clipping would hide a wrong scale
                "logging_steps": 1,
                "save_strategy": "no",
                "report_to": [],
                "disable_tqdm": True,
                "use_cpu": True,
                "bf16": False,
                **settings,
            },
        ),
        callbacks=callbacks,
        multi_gpu_config=None if gpus is None else MultiGPUConfig(**gpus),
    )


def result(run: Any) -> dict[str, Any]:
    weights = torch.cat([value.detach().flatten() for value in run.model.parameters() if value.requires_grad])
    losses = [entry["loss"] for entry in run.state.log_history if "loss" in entry]
    return {"weights": weights.tolist(), "loss": losses, "wrapped": type(run.model_wrapped).__name__}


def trained(*args: Any, resume: Any = None, **kwargs: Any) -> dict[str, Any]:
    run = make(*args, **kwargs)
    run.train(resume_from_checkpoint=resume)
    return result(run)


def spoiled(model_folder: Path, output: Path) -> dict[str, Any]:
    """The last rank's gradient is NaN in step 2, and is left out."""
    run = make(model_folder, output, {"leave_out_nonfinite": True})
    place, passes = process_rank(), [0]

    def spoil(gradient: Tensor) -> Tensor:
        passes[0] += 1
        return gradient * math.nan if passes[0] == 3 else gradient

    if place.rank == place.world_size - 1:
        next(value for value in run.model.parameters() if value.requires_grad).register_hook(spoil)
    run.train()
    return result(run)


def error_of(kind: type[Exception], *args: Any, **kwargs: Any) -> str:
    try:
        trained(*args, **kwargs)
    except kind as err:
        return str(err)
    return ""


def on_several_ranks(output: Path, model: Path) -> dict[str, Any]:
    saving = {"save_strategy": "steps", "save_steps": 3, "dropout": 0.2}
    found = {
        "median": trained(model, output / "median", {"aggregation": "median"}),
        "rank means": trained(model, output / "means", average_tokens_across_devices=False),
        "weighted": trained(model, output / "weighted", {"aggregation": "weighted", "aggregation_weights": [2, 2]}),
        "left out": spoiled(model, output / "left-out"),
        "straight": trained(model, output / "straight", **saving),
        "drift": error_of(DriftError, model, output / "drift", {"check_every": 2}, callbacks=[Corrupt()]),
        "trimmed": error_of(ConfigError, model, output / "trimmed", {"aggregation": "trimmed_mean"}),
        "no checkpoint": error_of(CheckpointError, model, output / "none", resume=True),
        "processes": error_of(ConfigError, model, output / "three", {"world_size": 3}),
    }
    killed = make(model, output / "killed", callbacks=[Kill()], **saving)
    try:
        killed.train()
    except Killed:
        found["resumed"] = trained(model, output / "killed", resume=True, **saving)
    return found


def main() -> None:
    output, model, *checkpoint = map(Path, sys.argv[1:])
    disable_progress_bar()
    found = {"mean": trained(model, output / "mean", save_strategy="steps", save_steps=3)}
    if process_rank().world_size > 1:
        found |= on_several_ranks(output, model)
    if checkpoint:
        found["from two ranks"] = trained(model, output / "other", resume=str(checkpoint[0]))
    (output / f"rank-{process_rank().rank}.json").write_text(json.dumps(found))
    gc.collect()  # a reducer that outlives the group may deadlock
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
