"""Time of the kernels of one training step, by `pantheraml profile`: what a speed is made of, and what bounds it.

python benchmarks/run.py step_profile                            Qwen3-4B, LoRA over fp8, 4 x 2048
python benchmarks/run.py step_profile --set shape=8b --set precision=bf16
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from table import Column, Table, markdown_table

NEEDS_GPU = True


def run(
    *, shape: str = "qwen3-4b", precision: str = "fp8", batch: int = 4, seq: int = 2048, device: str = "cuda"
) -> dict[str, Any]:
    from inputs import write_full_sequences, write_model

    with tempfile.TemporaryDirectory() as name:
        model, data = Path(name, "model"), Path(name, "data.jsonl")
        write_model(model, shape)
        write_full_sequences(data, shape=shape, sequences=10 * batch, seq_len=seq)
        settings = {
            "data.seq_len": seq,
            "data.cache_dir": Path(name, "tokens"),
            "train.global_batch_size": batch,
            "train.micro_batch_size": batch,
            "train.activation_checkpointing": "none",
            "method.alpha": 16,
            "model.precision": precision,
        }
        words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        places = ["--model", str(model), "--data", str(data), "--method", "lora", "--device", device]
        command = [sys.executable, "-m", "pantheraml.cli.main", "profile", "--json", *places, *words]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return {
        "parameters": {"shape": shape, "precision": precision, "batch": batch, "seq": seq},
        "results": rows(json.loads(done.stdout)),
    }


def rows(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The step, its work by kind, and its slowest kernels."""
    step = {"part": "step", "name": "whole step", "milliseconds": 1e3 * found["step_seconds"], "calls": 1}
    named = [("kind", each) for each in found["parts"]] + [("kernel", each) for each in found["operators"]]
    return [
        step,
        *(
            {"part": part, "name": each["name"], "milliseconds": 1e3 * each["seconds"], "calls": each["calls"]}
            for part, each in named
        ),
    ]


TABLE = Table(
    title="Step profile",
    how="Five steps after three under torch's profiler, by `pantheraml profile`; calls per step.",
    columns=(
        Column("shape", "parameters.shape"),
        Column("precision", "parameters.precision"),
        Column("part", "part"),
        Column("name", "name"),
        Column("time", "milliseconds", lambda value: f"{value:.2f} ms"),
        Column("calls", "calls", lambda value: f"{value:.0f}"),
    ),
)

QWEN3_4B = """48,000 tokens/s of Qwen3-4B, one of our targets, would be a step of 171 ms. By count:

- **Matmuls**: 128 TFLOP in fp8: layers, with the columns of their adapters, and the head. In 88.3 ms these are 1,450
  TFLOP/s; the fastest single matmul reached 1,524, which would save 4 ms. The head's backward takes 4.9 ms more.
- **Attention**: 17.3 TFLOP below the diagonal, in 48 ms with what cuDNN's kernels do around them: 360 TFLOP/s.
- **The rest** moves memory. The MLP's activation, forward and backward, reads and writes about 136 KB per token and
  layer; its 10 ms are a copy's rate. Norms and RoPE take 13 ms, values and gradients of adapters 11 ms. Fewer bytes
  would need gate and up in 8 bits, which changes the gradient.
- **Gaps** between 1,700 kernels take 3 ms.

If all else stays, attention would have to reach 500 TFLOP/s. Since this profile, backward quantizes the output of
attention again instead of keeping it: by count 1.2 GiB less, so 23.9, and 1 ms more; not measured yet."""


def section(records: Sequence[Mapping[str, Any]]) -> str:
    """Section of docs/performance.md from the newest record of Qwen3-4B."""
    found = [
        record
        for record in records
        if record["benchmark"] == "step_profile" and record["parameters"]["shape"] == "qwen3-4b"
    ]
    if not found:
        return ""
    record = max(found, key=lambda record: str(record["date"]))
    given, results = record["parameters"], record["results"]
    lines = [[row["name"], f"{row['milliseconds']:.1f} ms", f"{row['calls']:.0f}"] for row in results]
    head = (
        f"LoRA over {given['precision']}, {given['batch']} x {given['seq']}, under torch's profiler"
        f" ({record['hardware']['gpus'][0]}, {record['date'][:10]}, `python benchmarks/run.py step_profile`):"
    )
    return "\n".join(
        [
            "## Where a step of Qwen3-4B goes",
            "",
            head,
            "",
            *markdown_table(["kernels", "time", "calls"], lines),
            "",
            QWEN3_4B,
            "",
        ]
    )
