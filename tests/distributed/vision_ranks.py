"""Rank script of test_vision: FastVisionModel and PantheraMLDistributedTrainer, with the global batch of one process.

`vision_ranks OUTPUT FAMILY MODEL`: rank r writes the adapter to OUTPUT/rank-r.safetensors, and losses beside it.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

import torch.distributed as dist
from peft import get_peft_model_state_dict
from safetensors.torch import save_file
from transformers import set_seed
from trl import SFTConfig

from pantheraml import FastVisionModel, PantheraMLDistributedTrainer
from pantheraml.base.env import process_rank
from pantheraml.trainer import UnslothVisionDataCollator
from tests import toy_vision

STEPS, BATCH = 4, 4


def main() -> None:
    output, family, folder = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    place = process_rank()
    set_seed(0)
    model, processor = FastVisionModel.from_pretrained(folder, device_map="cpu")
    model = FastVisionModel.get_peft_model(model, r=4, lora_alpha=8)
    trainer = PantheraMLDistributedTrainer(
        model=model,
        tokenizer=processor,
        data_collator=UnslothVisionDataCollator(model, processor),
        train_dataset=toy_vision.rows(8, square=family in toy_vision.SQUARE),
        args=SFTConfig(
            output_dir=str(output / "run"),
            max_steps=STEPS,
            per_device_train_batch_size=BATCH // place.world_size,
            learning_rate=1e-2,
            optim="sgd",  # AdamW would hide a wrong scale
            max_grad_norm=0.0,  # clipping would as well
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            remove_unused_columns=False,
            dataset_text_field="",
            dataset_kwargs={"skip_prepare_dataset": True},
            max_length=256,
        ),
    )
    trainer.train()
    weights = {name: value.contiguous() for name, value in get_peft_model_state_dict(trainer.model).items()}
    save_file(weights, output / f"rank-{place.rank}.safetensors")
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    found = {"loss": losses, "wrapped": type(trainer.model_wrapped).__name__}
    (output / f"rank-{place.rank}.json").write_text(json.dumps(found))
    del trainer, model
    gc.collect()  # a reducer that outlives the group may deadlock
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
