"""Tokens per second and peak memory of `pantheraml train` on a GPU, with random weights in a known model's shape.

The model (Llama-3.2-1B's or Llama-3.1-8B's shape, bf16) and full-length sequences of random tokens are made in a
temporary folder; then the command line trains on them as it would on anything else. Needs a GPU.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from table import Column, Table

TABLE = Table(
    title="Training throughput",
    how="`pantheraml train` on random weights in the named shape, full sequences; median of the steps after warm-up.",
    columns=(
        Column("shape", "parameters.shape"),
        Column("method", "parameters.method"),
        Column("batch", "parameters.batch"),
        Column("sequence", "parameters.seq_len"),
        Column("checkpointing", "parameters.checkpointing"),
        Column("precision", "precision"),
        Column("frozen weights", "frozen_weights"),
        Column("compiled", "compiled"),
        Column("tokens/s", "tokens_per_second", lambda value: f"{value:,.0f}"),
        Column("peak memory", "peak_memory_bytes", lambda value: f"{value / 2**30:.1f} GiB"),
        Column("start to first step", "seconds_to_first_step", lambda value: f"{value:.0f} s"),
        Column("first loss", "first_loss", lambda value: f"{value:.3f}"),
        Column("last loss", "final_loss", lambda value: f"{value:.3f}"),
    ),
)

SHAPES: dict[str, dict[str, Any]] = {
    "1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "head_dim": 128},
}
VOCABULARY = 128_256


def run(
    *,
    shape: str = "1b",
    method: str = "lora",
    batch: int = 4,
    seq_len: int = 2048,
    steps: int = 16,
    checkpointing: str = "none",
    precision: str = "auto",
) -> dict[str, Any]:
    parameters = {
        "shape": shape,
        "method": method,
        "batch": batch,
        "seq_len": seq_len,
        "steps": steps,
        "checkpointing": checkpointing,
        "precision": precision,
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _write_model(folder / "model", shape)
        _write_data(folder / "data.jsonl", sequences=batch * steps, seq_len=seq_len)
        settings = [
            f"data.seq_len={seq_len}",
            f"data.cache_dir={folder / 'cache'}",
            f"train.global_batch_size={batch}",
            f"train.micro_batch_size={batch}",
            f"train.max_steps={steps}",
            f"train.activation_checkpointing={checkpointing}",
            f"model.precision={precision}",
            "method.rank=16",
            "method.alpha=16",
        ]
        words = [word for setting in settings for word in ("--set", setting)]
        fixed = [
            "--model",
            str(folder / "model"),
            "--data",
            str(folder / "data.jsonl"),
            "--output",
            str(folder / "run"),
        ]
        command = [sys.executable, "-m", "pantheraml.cli.main", "train", *fixed, "--method", method, *words]
        subprocess.run(command, check=True)
        return {"parameters": parameters, "results": _read(folder / "run")}


def _read(run: Path) -> dict[str, Any]:
    from pantheraml.base.events import read_events

    summary = json.loads((run / "run.json").read_text())
    events = read_events(run)
    begin = next(event["time"] for event in events if event["kind"] == "run.started")
    first = next(event["time"] for event in events if event["kind"] == "train.step")
    names = ("precision", "tokens_per_second", "peak_memory_bytes", "first_loss", "final_loss")
    plan = json.loads((run / "plan.json").read_text())
    choices = {"frozen_weights": plan["frozen_weights"], "compiled": plan["compile"]}
    return {name: summary[name] for name in names} | choices | {"seconds_to_first_step": first - begin}


def _write_model(folder: Path, shape: str) -> None:
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_parameters=rope,
        **SHAPES[shape],
    )
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = LlamaForCausalLM(config)
    torch.set_default_dtype(default)
    model.save_pretrained(folder)
    words = {f"t{i}": i for i in range(VOCABULARY - 2)} | {"<unk>": VOCABULARY - 2, "<eos>": VOCABULARY - 1}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>").save_pretrained(folder)


def _write_data(path: Path, *, sequences: int, seq_len: int) -> None:
    rng = random.Random(1)
    with open(path, "w") as file:
        for _ in range(sequences):
            words = (f"t{rng.randrange(120_000)}" for _ in range(seq_len - 1))  # the tokenizer adds the end token
            file.write(json.dumps({"text": " ".join(words)}) + "\n")


if __name__ == "__main__":
    print(json.dumps(run(), indent=1))
