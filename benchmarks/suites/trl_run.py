"""One run of a TRL trainer in its own process, with a peer's model or with ours.

    python trl_run.py JOB      a JSON file: the case, its model and data, start time, path of the result

It is started while another case still runs: it imports its packages, reads its data, and waits for a line on stdin
before it loads a model. (Importing a system may touch the GPU, with a CUDA context at most.) `seconds_to_first_step`
counts its preparation and the time from its turn on, without the wait in between.

All systems get the same call: `FastLanguageModel` if they have one (Unsloth's API, which ours shares), else
AutoModelForCausalLM and PEFT. Weights are bf16, adapters as PEFT creates them, and the loss is logged at every step.
"""

from __future__ import annotations

import importlib
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from pantheraml.readers.summary import WARM_UP_STEPS

sys.path.append(str(Path(__file__).resolve().parents[1]))  # this file is also a script
from suites import trl_trainers

LORA = {
    "r": 16,
    "lora_alpha": 16,
    "lora_dropout": 0,
    "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
}
LORA_EXPERTS = LORA | {
    "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
}
FAST = {"unsloth": "unsloth", "pantheraml": "pantheraml"}
"""Module with the system's FastLanguageModel; imported before trl and transformers, which it may patch."""
FURTHER = {"liger": "liger_kernel.transformers"}
"""Module that a system's trainer imports when it is created."""
OUT_OF_MEMORY, SUITE_IS_GONE = 15, 1
LEAST_FILL = 0.8
"""Minimum fill of packed batches."""


def prepare(job: dict[str, Any]) -> Any:
    """Import everything and return the data; needs neither the model nor a GPU."""
    case = job["case"]
    if case["system"] in FAST:
        fast_class(case)
    if case["system"] in FURTHER:
        importlib.import_module(FURTHER[case["system"]])
    # lazy imports of transformers and trl
    for name in ("torch", model_module(job["model"]), "peft", trl_trainers.MODULES[case["trainer"]]):
        importlib.import_module(name)
    return trl_trainers.dataset(case, job["data"])


def model_module(folder: str) -> str:
    """Return the module of the model's class. The folder may not exist yet: then its family is not known."""
    config = Path(folder) / "config.json"
    kind = json.loads(config.read_text(encoding="utf-8"))["model_type"] if config.exists() else "llama"
    package = kind.removesuffix("_text")
    return f"transformers.models.{package}.modeling_{package}"


def lora(case: dict[str, Any]) -> dict[str, Any]:
    return LORA_EXPERTS if case["experts"] else LORA


def fast_class(case: dict[str, Any]) -> Any:
    return importlib.import_module(FAST[case["system"]]).FastLanguageModel


def load_fast(case: dict[str, Any], folder: str) -> tuple[Any, Any]:
    import torch

    fast = fast_class(case)
    checkpointing: Any = {"none": False, "full": True}.get(case["checkpointing"], case["checkpointing"])
    options: dict[str, Any] = {"local_files_only": True} if case["system"] == "unsloth" else {}
    if case["method"] == "full":
        options |= {"full_finetuning": True, "use_gradient_checkpointing": checkpointing}
    if case["precision"] == "fp8":
        options |= {"load_in_fp8": True}
    model, tokenizer = fast.from_pretrained(
        folder,
        max_seq_length=case["seq"],
        dtype=torch.bfloat16,
        load_in_4bit=case["precision"] == "nf4",
        **options,
    )
    if case["method"] != "full":
        model = fast.get_peft_model(
            model, **lora(case), bias="none", use_gradient_checkpointing=checkpointing, random_state=0
        )
    return model, tokenizer


def load_plain(case: dict[str, Any], folder: str) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

    quantized: Any = None
    if case["precision"] == "nf4":
        quantized = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_compute_dtype=torch.bfloat16,
            bnb_4bit_use_double_quant=True,
        )
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.bfloat16,
        device_map={"": 0} if torch.cuda.is_available() else None,
        attn_implementation="sdpa",
        quantization_config=quantized,
    )
    if case["method"] != "full":
        from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

        if quantized is not None:
            checkpointing = case["checkpointing"] != "none"
            model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=checkpointing)
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **lora(case)))
    return model, AutoTokenizer.from_pretrained(folder)


def trainer(case: dict[str, Any], parts: dict[str, Any], output: str, tokens: list[int]) -> Any:
    import torch

    common = {
        "output_dir": output,
        "per_device_train_batch_size": case["batch"],
        "gradient_accumulation_steps": 1,
        "max_steps": case["steps"],
        "learning_rate": 2e-4,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch_fused",
        "bf16": True,
        "use_cpu": not torch.cuda.is_available(),
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "gradient_checkpointing": case["system"] not in FAST and case["checkpointing"] != "none",
    }
    return trl_trainers.make_trainer(case, parts, common, tokens)


class Clock:
    """Records the end of each step, with CUDA events if there is a GPU.

    Synchronizing at every step would make the GPU wait for the host, although a trainer may have queued the next step
    in time. Only the first step is synchronized."""

    def __init__(self) -> None:
        self._marks: list[Any] = []
        self.first = 0.0
        """Wall-clock time at the end of the first step."""

    def mark(self) -> None:
        import torch

        if torch.cuda.is_available():
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
            if len(self._marks) == 2:
                event.synchronize()
        else:
            self._marks.append(time.time())
        if len(self._marks) == 2:
            self.first = time.time()

    def seconds(self) -> list[float]:
        """Duration of each step."""
        pairs = list(zip(self._marks, self._marks[1:], strict=False))
        if pairs and not isinstance(pairs[0][0], float):
            self._marks[-1].synchronize()
            return [begin.elapsed_time(end) / 1000 for begin, end in pairs]
        return [end - begin for begin, end in pairs]


def measure(job: dict[str, Any], data: Any, began: float) -> dict[str, Any]:
    """Train and return the measurements; `began` is the start time, corrected for the wait."""
    import torch
    from transformers import TrainerCallback

    case = job["case"]
    clock = Clock()

    class Steps(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            clock.mark()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            clock.mark()

    torch.manual_seed(0)
    load = load_fast if case["system"] in FAST else load_plain
    model, tokenizer = load(case, job["model"])
    tokens: list[int] = []
    parts = {"model": model, "processing_class": tokenizer, "train_dataset": data, "callbacks": [Steps()]}
    run = trainer(case, parts, job["output"], tokens)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    run.train()
    losses = [entry["loss"] for entry in run.state.log_history if "loss" in entry]
    # batches are collated ahead, in order: there are at least as many counts as steps
    speeds = [count / seconds for count, seconds in zip(tokens, clock.seconds(), strict=False)]
    fill = statistics.mean(tokens) / (case["batch"] * case["seq"] * trl_trainers.SEQUENCES[case["trainer"]])
    to_pack = case["trainer"] == "sft" or case["data"] == "full"
    return {
        # A trainer may silently disable packing: then the row must say so.
        "reason": f"not packed: batches are {fill:.0%} full" if to_pack and fill < LEAST_FILL else None,
        "tokens_per_second": statistics.median(speeds[WARM_UP_STEPS:]) if len(speeds) > WARM_UP_STEPS else None,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None,
        "seconds_to_first_step": clock.first - began,
        "loss_first": losses[0],
        "loss_last": losses[-1],
    }


def main() -> int:
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    data = prepare(job)
    prepared = time.time() - job["started"]
    if not sys.stdin.readline():
        return SUITE_IS_GONE
    began = time.time() - prepared
    import torch

    try:
        measured = measure(job, data, began)
    except torch.OutOfMemoryError as err:
        print(str(err).split(". ")[0], file=sys.stderr)
        return OUT_OF_MEMORY
    Path(job["result"]).write_text(json.dumps(measured), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
