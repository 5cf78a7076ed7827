"""A training loop of your own on several GPUs: wrapped model, sharded data, and one verdict on every step.

python examples/custom_loop.py                                 # a tiny model that is made on the spot
python examples/custom_loop.py --model my-model --data my-data.jsonl --output my-adapter
PANTHERAML_NPROC=2 python examples/custom_loop.py              # two processes where there are no GPUs
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from pantheraml import FastLanguageModel, distributed
from pantheraml.data.tiny_inputs import write_tiny_inputs
from pantheraml.performance import OptimizationLevel, PerformanceConfig, create_performance_optimizer
from pantheraml.stability import GradientClippingConfig, NaNHandlingConfig, create_training_wrapper


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or hub name of a causal language model (default: a tiny one)")
    parser.add_argument("--data", help=".jsonl with prompt and completion")
    parser.add_argument("--output", default="runs/custom_loop", help="folder for the adapter")
    parser.add_argument("--max-steps", type=int, default=20)
    arguments = parser.parse_args()
    tiny_model, tiny_data = write_tiny_inputs(Path("runs/tiny"))

    # First: a plain script becomes one process per GPU here, from its beginning.
    performance = create_performance_optimizer(PerformanceConfig(optimization_level=OptimizationLevel.BASIC))
    guard = create_training_wrapper(
        GradientClippingConfig(clipping="global_norm", max_grad_norm=1.0), NaNHandlingConfig(on_nonfinite="skip")
    )

    model, tokenizer = FastLanguageModel.from_pretrained(arguments.model or str(tiny_model))
    model = FastLanguageModel.get_peft_model(model, r=16, lora_alpha=32)
    wrapped = performance.wrap_model_for_multi_gpu(model)
    optimizer = torch.optim.AdamW((p for p in wrapped.parameters() if p.requires_grad), lr=2e-4)

    def collate(rows: list[dict[str, str]]) -> dict[str, Any]:
        texts = [row["prompt"] + row["completion"] + tokenizer.eos_token for row in rows]
        batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="right")
        return {**batch, "labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}

    lines = Path(arguments.data or tiny_data).read_text(encoding="utf-8").splitlines()
    loader = DataLoader([json.loads(line) for line in lines], batch_size=4, shuffle=True, collate_fn=collate)
    batches = performance.optimize_training_pipeline(wrapped, loader, optimizer)

    step = 0
    while step < arguments.max_steps:
        for batch in batches:
            result = guard(wrapped, wrapped(**batch).loss, optimizer)  # backward, verdict, clipping, optimizer step
            step += 1
            if distributed.is_main_process() and (step % 5 == 0 or result.action != "step"):
                print(f"step {step}: {result.action}, loss {result.loss:.3f}, gradient norm {result.grad_norm:.3f}")
            if step == arguments.max_steps:
                break

    if distributed.is_main_process():
        model.save_pretrained(arguments.output)
        ranks = distributed.get_world_size()
        print(f"{step} steps on {ranks} process(es); the adapter is in {arguments.output}")
    performance.cleanup()


if __name__ == "__main__":
    main()
