"""PantheraMLDistributedTrainer: TRL's SFTTrainer on every GPU, with guard, events, memory report and exact resume.

python examples/multi_gpu_training.py                          # a tiny model that is made on the spot
python examples/multi_gpu_training.py --model my-model --data my-data.jsonl --output my-run
python examples/multi_gpu_training.py --advanced               # settings for speed and memory, one by one
PANTHERAML_NPROC=2 python examples/multi_gpu_training.py       # two processes where there are no GPUs
torchrun --nproc_per_node=4 examples/multi_gpu_training.py     # the same, as is `accelerate launch`
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from datasets import load_dataset
from trl import SFTConfig

from pantheraml import FastLanguageModel, MultiGPUConfig, PantheraMLDistributedTrainer, distributed
from pantheraml.data.tiny_inputs import write_tiny_inputs


def basic(model_name: str, data: str, output: str, max_steps: int) -> PantheraMLDistributedTrainer:
    """The least that is needed: everything else is chosen, and each choice is a line in the log."""
    model, tokenizer = FastLanguageModel.from_pretrained(model_name, enable_multi_gpu=True)
    model = FastLanguageModel.get_peft_model(model)
    return PantheraMLDistributedTrainer(
        model=model,
        tokenizer=tokenizer,
        train_dataset=load_dataset("json", data_files=data, split="train"),
        args=SFTConfig(output_dir=output, max_steps=max_steps, logging_steps=5, report_to=[]),
    )


def advanced(model_name: str, data: str, output: str, max_steps: int) -> PantheraMLDistributedTrainer:
    """Settings that matter for speed and memory, with what they trade."""
    model, tokenizer = FastLanguageModel.from_pretrained(
        model_name,
        enable_multi_gpu=True,
        max_seq_length=1024,
        load_in_4bit=True,  # memory: frozen weights in 4 bits; without it fp8 (Hopper) or bf16, which are faster
        use_gradient_checkpointing="unsloth",  # memory: layer inputs wait in host memory; False is faster
    )
    model = FastLanguageModel.get_peft_model(model, r=16, lora_alpha=32, lora_dropout=0.0)
    return PantheraMLDistributedTrainer(
        model=model,
        tokenizer=tokenizer,
        train_dataset=load_dataset("json", data_files=data, split="train"),
        multi_gpu_config=MultiGPUConfig(
            bucket_cap_mb=50,  # speed: fewer, larger all-reduces; LoRA needs one either way
            check_every=10,  # safety: do all ranks hold the same weights?
            timeout_seconds=300,  # after this long without progress, the stuck rank is named
        ),
        args=SFTConfig(
            output_dir=output,
            max_steps=max_steps,
            packing=True,  # speed: no padding; documents do not attend to each other
            per_device_train_batch_size=2,  # memory: samples per GPU and pass
            gradient_accumulation_steps=2,  # the same global batch with less memory
            optim="adamw_8bit",  # memory: 2 bytes per trained parameter
            ddp_find_unused_parameters=False,  # speed: every adapter gets a gradient
            learning_rate=2e-4,
            logging_steps=5,
            save_steps=max_steps,
            report_to=[],
        ),
    )


def show_memory(when: str) -> None:
    """Memory of each GPU of this process: used by torch, free, total."""
    gpus: list[dict[str, Any]] = distributed.get_gpu_memory_info()
    for gpu in gpus:
        used = f"{gpu['allocated_mb']:,.0f} MiB used here, {gpu['free_mb']:,.0f} of {gpu['total_mb']:,.0f} free"
        print(f"rank {distributed.get_rank()}, {gpu['name']}, {when}: {used}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or hub name of a causal language model (default: a tiny one)")
    parser.add_argument("--data", help=".jsonl with text, messages, or prompt and completion")
    parser.add_argument("--output", default="runs/multi_gpu_training", help="folder for run, checkpoints and adapter")
    parser.add_argument("--max-steps", type=int, default=20)
    parser.add_argument("--advanced", action="store_true", help="set what the basic example leaves to be chosen")
    parser.add_argument("--resume", action="store_true", help="continue from the newest complete checkpoint")
    arguments = parser.parse_args()
    tiny_model, tiny_data = write_tiny_inputs(Path("runs/tiny"))

    make = advanced if arguments.advanced else basic
    model, data = arguments.model or str(tiny_model), arguments.data or str(tiny_data)
    trainer = make(model, data, arguments.output, arguments.max_steps)
    show_memory("before training")
    trainer.train(resume_from_checkpoint=arguments.resume)
    show_memory("after training")
    distributed.clear_gpu_cache()  # gives what torch has cached back to the driver, for what comes next
    trainer.save_model(arguments.output)
    if distributed.is_main_process():
        ranks = distributed.get_world_size()
        print(f"{trainer.state.global_step} steps on {ranks} process(es); the adapter is in {arguments.output}")


if __name__ == "__main__":
    main()
