"""Out-of-memory errors of trainers, with what to change in the words of TRL's arguments."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import TrainingArguments

from pantheraml.base.errors import OutOfMemoryError
from pantheraml.engine.memory.oom import read_shortage

_LEAN_OPTIMIZERS = ("8bit", "adafactor", "sgd", "lomo", "galore")


@contextmanager
def explain_memory(args: TrainingArguments) -> Iterator[None]:
    """Turn torch's out-of-memory error into one that names arguments of the trainer."""
    try:
        yield
    except torch.OutOfMemoryError as err:
        device = "GPU" if args.device.type == "cuda" else "machine"
        batch = args.per_device_train_batch_size
        raise OutOfMemoryError(
            f"The {device} ran out of memory with {batch} row(s) per pass{read_shortage(str(err))}.",
            fix=f"Change one or more of these: {'; '.join(advice(args))}.",
        ) from err


def advice(args: Any) -> list[str]:
    """Return settings that save memory, cheapest in speed first."""
    batch, steps = args.per_device_train_batch_size, args.gradient_accumulation_steps
    ways = []
    if batch > 1:
        half = batch // 2
        same = f", gradient_accumulation_steps={2 * steps} (the same global batch)" if batch % 2 == 0 else ""
        ways.append(f"per_device_train_batch_size={half}{same}")
    if not args.gradient_checkpointing:
        ways.append("gradient_checkpointing=True")
    else:
        ways.append('use_gradient_checkpointing="offload" in FastLanguageModel.get_peft_model')
    if not any(word in str(args.optim).lower() for word in _LEAN_OPTIMIZERS):
        ways.append('optim="adamw_8bit"')
    length = getattr(args, "max_length", None)
    ways.append("a max_length" if length is None else f"max_length below {length}")
    ways.append("load_in_4bit=True in FastLanguageModel.from_pretrained")
    if args.eval_strategy != "no" and args.per_device_eval_batch_size > 1:
        ways.append("a smaller per_device_eval_batch_size, if it was an evaluation")
    return ways
