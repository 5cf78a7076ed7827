"""Settings for several GPUs that are computed from the hardware, and TRL's own arguments beside them.

python examples/advanced_config.py                             # a tiny model that is made on the spot
python examples/advanced_config.py --model my-model --model-size 7B --data my-data.jsonl --output my-adapter
PANTHERAML_NPROC=2 python examples/advanced_config.py          # two processes where there are no GPUs
"""

from __future__ import annotations

import argparse
from pathlib import Path

from datasets import load_dataset
from trl import SFTConfig, SFTTrainer

import pantheraml
from pantheraml import ConfigManager, DeviceManager, FastLanguageModel
from pantheraml.data.tiny_inputs import write_tiny_inputs

GLOBAL_BATCH = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or hub name of a causal language model (default: a tiny one)")
    parser.add_argument("--model-size", default="7B", help="its number of parameters, as 7B")
    parser.add_argument("--data", help=".jsonl with text, messages, or prompt and completion")
    parser.add_argument("--output", default="runs/advanced_config", help="folder for the adapter")
    parser.add_argument("--max-steps", type=int, default=20)
    arguments = parser.parse_args()
    tiny_model, tiny_data = write_tiny_inputs(Path("runs/tiny"))

    # 1. What is here? Each device has index, name, total_bytes, free_bytes and compute_capability.
    devices = DeviceManager().get_available_devices()

    # 2. Arguments of enable_multi_gpu: how many samples of 2,048 tokens fit each GPU (the smallest decides).
    configs = ConfigManager()
    config = configs.get_optimal_config(
        model_size=arguments.model_size,
        available_memory=None if devices else "24GB",
        load_in_4bit=True,
        max_seq_length=2048,
    )
    # configs.get_template("robust") is another start: the median of the GPUs' gradients (three GPUs or more).
    configs.validate(config)
    pantheraml.enable_multi_gpu(**config)
    ranks, rank = (pantheraml.get_multi_gpu_config()[name] for name in ("world_size", "rank"))

    # 3. The same global batch on any number of GPUs: samples per pass x passes x ranks.
    per_pass = min(config["batch_size_per_gpu"], GLOBAL_BATCH // ranks)
    passes = GLOBAL_BATCH // (per_pass * ranks)
    pantheraml.enable_multi_gpu(**{**config, "batch_size_per_gpu": per_pass})

    model, tokenizer = FastLanguageModel.from_pretrained(arguments.model or str(tiny_model), load_in_4bit=True)
    model = FastLanguageModel.get_peft_model(model, r=16, lora_alpha=32, use_gradient_checkpointing="unsloth")
    trainer = SFTTrainer(
        model=model,
        processing_class=tokenizer,
        train_dataset=load_dataset("json", data_files=arguments.data or str(tiny_data), split="train"),
        args=SFTConfig(
            output_dir=arguments.output,
            max_length=2048,
            max_steps=arguments.max_steps,
            per_device_train_batch_size=per_pass,
            gradient_accumulation_steps=passes,
            learning_rate=2e-4,
            optim="adamw_8bit",
            ddp_find_unused_parameters=False,
            logging_steps=5,
            save_strategy="no",
            report_to=[],
        ),
    )
    trainer.train()
    trainer.save_model(arguments.output)
    if rank == 0:
        sizes = f"{per_pass} samples per pass x {passes} passes x {ranks} process(es)"
        print(f"{trainer.state.global_step} steps of {sizes}; the adapter is in {arguments.output}")


if __name__ == "__main__":
    main()
