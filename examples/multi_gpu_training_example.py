"""An SFTTrainer script in both ways to use several GPUs: one process per GPU, or one model spread over the GPUs.

UNSLOTH_ENABLE_MULTIGPU=1 python examples/multi_gpu_training_example.py    # one process per GPU (DDP): fastest
python examples/multi_gpu_training_example.py --mode ddp                   # the same, by the parameter
python examples/multi_gpu_training_example.py --mode split                 # layers over the GPUs: larger models
python examples/multi_gpu_training_example.py --mode single                # one GPU, as without any of this
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from datasets import load_dataset
from trl import SFTConfig, SFTTrainer

from pantheraml import FastLanguageModel, get_multi_gpu_config
from pantheraml.data.tiny_inputs import write_tiny_inputs

PLACEMENT: dict[str, dict[str, Any]] = {
    "env": {},  # as the environment variable says
    "single": {"enable_multi_gpu": False},
    "ddp": {"enable_multi_gpu": True},
    "split": {"device_map": "auto"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=PLACEMENT, default="env")
    parser.add_argument("--model", help="folder or hub name of a causal language model (default: a tiny one)")
    parser.add_argument("--data", help=".jsonl with text, messages, or prompt and completion")
    parser.add_argument("--output", default="runs/multi_gpu_training_example", help="folder for the adapter")
    parser.add_argument("--max-steps", type=int, default=20)
    arguments = parser.parse_args()
    tiny_model, tiny_data = write_tiny_inputs(Path("runs/tiny"))

    model, tokenizer = FastLanguageModel.from_pretrained(
        model_name=arguments.model or str(tiny_model),
        max_seq_length=2048,
        load_in_4bit=True,
        **PLACEMENT[arguments.mode],
    )
    model = FastLanguageModel.get_peft_model(
        model,
        r=16,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        lora_alpha=16,
        lora_dropout=0,
        bias="none",
        use_gradient_checkpointing="unsloth",
    )
    trainer = SFTTrainer(
        model=model,
        processing_class=tokenizer,
        train_dataset=load_dataset("json", data_files=arguments.data or str(tiny_data), split="train"),
        args=SFTConfig(
            per_device_train_batch_size=2,
            gradient_accumulation_steps=4,
            max_steps=arguments.max_steps,
            learning_rate=2e-4,
            output_dir=arguments.output,
            ddp_find_unused_parameters=False,
            save_strategy="no",
            report_to=[],
        ),
    )
    trainer.train()
    trainer.save_model(arguments.output)
    config = get_multi_gpu_config()
    if config["rank"] == 0:
        processes, gpus = config["world_size"], config["num_gpus"]
        print(f"{trainer.state.global_step} steps; {processes} process(es), {gpus} GPU(s) visible")
        print(f"The adapter is in {arguments.output}")


if __name__ == "__main__":
    main()
