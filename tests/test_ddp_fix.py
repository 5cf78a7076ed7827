"""Train with DDP, LoRA and activation checkpointing: `torchrun --nproc_per_node=2 tests/test_ddp_fix.py`.

Reentrant checkpointing runs its backward twice as DDP sees it: "Expected to mark a variable ready only once", unless
the graph is static. Also `python tests/test_ddp_fix.py`, in one process. tests/distributed/test_ddp_checkpointing.py
compares the results with one process, in every mode.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig

from pantheraml import UnslothTrainer
from tests import toy

STEPS = 3


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = toy.write_llama(Path(folder, "model"))
        args = SFTConfig(
            output_dir=folder,
            max_steps=STEPS,
            gradient_checkpointing=True,
            gradient_checkpointing_kwargs={"use_reentrant": True},
            use_cpu=not torch.cuda.is_available(),
            bf16=False,
            report_to=[],
            disable_tqdm=True,
        )
        trainer = UnslothTrainer(
            model=AutoModelForCausalLM.from_pretrained(model),
            tokenizer=AutoTokenizer.from_pretrained(model),
            train_dataset=Dataset.from_list(toy.arithmetic(64)),
            peft_config=LoraConfig(target_modules="all-linear"),
            args=args,
        )
        trainer.train()
    wrapped = type(trainer.model_wrapped).__name__
    rank = f"rank {os.environ.get('RANK', '0')} of {trainer.args.world_size}"
    print(f"{rank}: {trainer.state.global_step} steps with {wrapped} and reentrant checkpointing", flush=True)


if __name__ == "__main__":
    main()
