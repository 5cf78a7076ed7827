"""Tokens per second and peak memory of `pantheraml train` on a GPU, with random weights in a known shape.

The model (shape of Llama-3.2-1B or Llama-3.1-8B, bf16) and full-length sequences of random tokens are written to a
temporary folder, and the command line trains on them. Needs a GPU.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from inputs import write_full_sequences, write_model
from table import Column, Table

NEEDS_GPU = True

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
        Column("time to first step", "seconds_to_first_step", lambda value: f"{value:.0f} s"),
        Column("first loss", "first_loss", lambda value: f"{value:.3f}"),
        Column("last loss", "final_loss", lambda value: f"{value:.3f}"),
    ),
)


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
        write_model(folder / "model", shape)
        write_full_sequences(folder / "data.jsonl", shape=shape, sequences=batch * steps, seq_len=seq_len)
        settings = {
            "data.seq_len": seq_len,
            "train.global_batch_size": batch,
            "train.micro_batch_size": batch,
            "train.max_steps": steps,
            "train.activation_checkpointing": checkpointing,
            "model.precision": precision,
        }
        return {"parameters": parameters, "results": train(folder, "run", method, settings)}


def train(folder: Path, name: str, method: str, settings: Mapping[str, object]) -> dict[str, Any]:
    """Run `pantheraml train` on `model` and `data.jsonl` in `folder`, with output to `name` there; return the
    results."""
    common = {"data.cache_dir": folder / "cache", "method.rank": 16, "method.alpha": 16}
    words = [word for key, value in {**common, **settings}.items() for word in ("--set", f"{key}={value}")]
    places = {"--model": folder / "model", "--data": folder / "data.jsonl", "--output": folder / name}
    fixed = [str(word) for pair in places.items() for word in pair]
    command = [sys.executable, "-m", "pantheraml.cli.main", "train", *fixed, "--method", method, *words]
    subprocess.run(command, check=True)
    return _read(folder / name)


def _read(run: Path) -> dict[str, Any]:
    from pantheraml.base.event_stream import read_events
    from pantheraml.base.events import RunStarted, TrainStep

    summary = json.loads((run / "run.json").read_text())
    events = read_events(run)
    begin = next(event.time for event in events if isinstance(event, RunStarted))
    first = next(event.time for event in events if isinstance(event, TrainStep))
    names = ("precision", "tokens_per_second", "peak_memory_bytes", "first_loss", "final_loss")
    plan = json.loads((run / "plan.json").read_text())
    choices = {"frozen_weights": plan["frozen_weights"], "compiled": plan["compile"]}
    return {name: summary[name] for name in names} | choices | {"seconds_to_first_step": first - begin}


if __name__ == "__main__":
    print(json.dumps(run(), indent=1))
