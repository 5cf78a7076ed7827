"""MultiGPUTrainer: any model and any DataLoader on several GPUs, without TRL. The way for new projects.

python examples/direct_trainer_usage.py                        # a tiny model that is made on the spot
python examples/direct_trainer_usage.py --model my-model --data my-data.jsonl --output my-adapter
PANTHERAML_NPROC=2 python examples/direct_trainer_usage.py     # two processes where there are no GPUs
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from pantheraml import AggregationMethod, FastLanguageModel, MultiGPUTrainer, distributed
from pantheraml.data.tiny_inputs import write_tiny_inputs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or hub name of a causal language model (default: a tiny one)")
    parser.add_argument("--data", help=".jsonl with prompt and completion")
    parser.add_argument("--output", default="runs/direct_trainer_usage", help="folder for the adapter")
    parser.add_argument("--epochs", type=int, default=2)
    arguments = parser.parse_args()
    tiny_model, tiny_data = write_tiny_inputs(Path("runs/tiny"))

    model, tokenizer = FastLanguageModel.from_pretrained(arguments.model or str(tiny_model))
    model = FastLanguageModel.get_peft_model(model, r=16, lora_alpha=32)

    def collate(rows: list[dict[str, str]]) -> dict[str, Any]:
        """Tokens, padded to the longest row; prompt and padding are no targets."""
        texts = [row["prompt"] + row["completion"] + tokenizer.eos_token for row in rows]
        batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="right")
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        for index, row in enumerate(rows):
            labels[index, : len(tokenizer(row["prompt"])["input_ids"])] = -100
        return {**batch, "labels": labels}

    lines = Path(arguments.data or tiny_data).read_text(encoding="utf-8").splitlines()
    loader = DataLoader([json.loads(line) for line in lines], batch_size=4, shuffle=True, collate_fn=collate)

    with MultiGPUTrainer(
        model=model,
        num_gpus=None,  # all
        optimizer_config={"class": torch.optim.AdamW, "kwargs": {"lr": 2e-4, "weight_decay": 0.01}},
        aggregation_method=AggregationMethod.MEAN,
        max_grad_norm=1.0,
    ) as trainer:
        trainer.setup()  # a plain script becomes one process per GPU here
        for _ in range(arguments.epochs):
            stats = trainer.train_epoch(loader)
            if distributed.is_main_process():
                print("epoch {epoch}: loss {loss:.3f}, {samples} samples on {world_size} process(es)".format(**stats))
        if distributed.is_main_process():
            model.save_pretrained(arguments.output)
            print(f"The adapter is in {arguments.output}")


if __name__ == "__main__":
    main()
