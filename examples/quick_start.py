"""One call at the top of a script makes it train on every GPU: the way for scripts that you have already.

python examples/quick_start.py                                 # a tiny model that is made on the spot
python examples/quick_start.py --model my-model --data my-data.jsonl --output my-adapter
PANTHERAML_NPROC=2 python examples/quick_start.py              # two processes where there are no GPUs
"""

from __future__ import annotations

import argparse
from pathlib import Path

from datasets import load_dataset

import pantheraml
from pantheraml import FastLanguageModel, unsloth_train
from pantheraml.data.tiny_inputs import write_tiny_inputs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or hub name of a causal language model (default: a tiny one)")
    parser.add_argument("--data", help=".jsonl with text, messages, or prompt and completion")
    parser.add_argument("--output", default="runs/quick_start", help="folder for the adapter")
    parser.add_argument("--max-steps", type=int, default=20)
    arguments = parser.parse_args()
    tiny_model, tiny_data = write_tiny_inputs(Path("runs/tiny"))

    # 1. From here on, this script runs once per GPU: nothing slow belongs above this line.
    pantheraml.enable_multi_gpu(
        num_gpus=None,  # all; a number takes that many
        batch_size_per_gpu=4,
        gradient_aggregation="mean",  # the gradient of one GPU with the same global batch
    )

    # 2. Load the model and add LoRA adapters. On a GPU, frozen weights are fp8 or bf16; load_in_4bit=True saves more.
    model, tokenizer = FastLanguageModel.from_pretrained(arguments.model or str(tiny_model), max_seq_length=2048)
    model = FastLanguageModel.get_peft_model(model, r=16, lora_alpha=32)

    # 3. Train. Keywords are arguments of TRL's SFTTrainer and SFTConfig; a trainer of your own works, too.
    stats = unsloth_train(
        model=model,
        tokenizer=tokenizer,
        train_dataset=load_dataset("json", data_files=arguments.data or str(tiny_data), split="train"),
        max_steps=arguments.max_steps,
        learning_rate=2e-4,
        ddp_find_unused_parameters=False,
        logging_steps=5,
        save_strategy="no",
        report_to=[],
        output_dir=arguments.output,
    )

    if pantheraml.get_multi_gpu_config()["rank"] == 0:
        model.save_pretrained(arguments.output)
        print(f"{stats.global_step} steps, mean loss {stats.training_loss:.3f}; the adapter is in {arguments.output}")


if __name__ == "__main__":
    main()
