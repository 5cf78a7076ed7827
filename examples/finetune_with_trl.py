"""Fine-tune a model with TRL's SFTTrainer over a `FastLanguageModel`.

python examples/finetune_with_trl.py --model my-model --data my-data.jsonl --output my-adapter
"""

from __future__ import annotations

import argparse

from datasets import load_dataset
from trl import SFTConfig, SFTTrainer

from pantheraml import FastLanguageModel


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder or hub name of a causal language model")
    parser.add_argument("--data", required=True, help=".jsonl with text, messages, or prompt and completion")
    parser.add_argument("--output", required=True, help="folder for the adapter")
    parser.add_argument("--max-steps", type=int, default=60)
    arguments = parser.parse_args()

    model, tokenizer = FastLanguageModel.from_pretrained(arguments.model)
    model = FastLanguageModel.get_peft_model(model, r=16, lora_alpha=32)
    on_gpu = next(model.parameters()).is_cuda
    trainer = SFTTrainer(
        model=model,
        processing_class=tokenizer,
        train_dataset=load_dataset("json", data_files=arguments.data, split="train"),
        args=SFTConfig(
            output_dir=arguments.output,
            max_steps=arguments.max_steps,
            per_device_train_batch_size=4,
            learning_rate=2e-4,
            packing=True,
            gradient_checkpointing=False,
            bf16=on_gpu,
            use_cpu=not on_gpu,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
        ),
    )
    trainer.train()
    trainer.save_model(arguments.output)
    print(f"Saved the adapter to {arguments.output}")


if __name__ == "__main__":
    main()
