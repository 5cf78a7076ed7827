"""Rank script of test_trainer_settings: transformers' Trainer with what enable_multi_gpu sets."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Sampler, SequentialSampler
from transformers import Trainer, TrainingArguments

import pantheraml
from pantheraml import distributed
from tests.distributed.module_trainer_ranks import Texts, flat, make_causal

BATCH, STEPS, RATE = 2, 2, 0.5
CASES: dict[str, dict[str, Any]] = {
    "mean": {"gradient_aggregation": "mean"},
    "median": {"gradient_aggregation": "median"},
    "weighted": {"gradient_aggregation": "weighted", "aggregation_weights": [1.0, 3.0]},
    "median-accumulated": {"gradient_aggregation": "median", "accumulate": 2},
}


class InOrder(Trainer):
    def _get_train_sampler(self, *_: Any) -> Sampler[int]:
        return SequentialSampler(self.train_dataset)


class Rows(Texts):
    """Some rows of `Texts`, all with targets."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return super().__getitem__(index % 9)


def train(case: dict[str, Any], folder: str) -> dict[str, Any]:
    settings = {name: value for name, value in case.items() if name != "accumulate"}
    pantheraml.enable_multi_gpu(batch_size_per_gpu=BATCH, **settings)
    distributed.setup()
    args = TrainingArguments(
        folder, use_cpu=True, max_steps=STEPS, learning_rate=RATE, lr_scheduler_type="constant", optim="sgd",
        max_grad_norm=0.0, gradient_accumulation_steps=case.get("accumulate", 1), per_device_train_batch_size=7,
        save_strategy="no", report_to="none", disable_tqdm=True,
    )  # fmt: skip
    trainer = InOrder(make_causal(), args, train_dataset=Rows())
    trainer.train()
    found = {"weights": flat(trainer.model), "batch": trainer.args.per_device_train_batch_size}
    pantheraml.disable_multi_gpu()
    distributed.cleanup()
    trainer.accelerator.free_memory()
    return found


def main() -> None:
    torch.set_num_threads(1)
    name, root = sys.argv[1], sys.argv[2]
    rank = distributed.get_rank()
    found = train(CASES[name], f"{root}/out")
    Path(root, f"{name}-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
