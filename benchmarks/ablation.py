"""What single tricks bring: the same run with and without, everything else as it is by default.

Those that a setting can switch off; each run is `pantheraml train` on random weights and full sequences, 4 x 2048.
docs/performance.md shows the newest row of each. Needs a GPU.

    python benchmarks/run.py ablation                             all of them, some fifteen minutes
    python benchmarks/run.py ablation --set tricks=cuda_graph     some, by name, with commas
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inputs import write_full_sequences, write_model
from train_throughput import train

NEEDS_GPU = True

BATCH, SEQ_LEN = 4, 2048


@dataclass(frozen=True)
class Ablation:
    """`on` and `off` are settings; `both` are those of either run."""

    shape: str
    method: str
    on: Mapping[str, object]
    off: Mapping[str, object]
    both: Mapping[str, object] = field(default_factory=dict)

    def setting(self) -> str:
        return f"{self.shape} {self.method}, {BATCH} x {SEQ_LEN}"


_FP8 = {"model.precision": "fp8"}
_FULL = {"train.weights": "bf16", "train.optimizer": "adamw_bf16"}

ABLATIONS = {
    "fp8_base": Ablation("8b", "lora", _FP8, {"model.precision": "bf16"}),
    "fused_layers": Ablation(
        "8b", "lora", {"train.fused": "auto"}, {"train.fused": "off", "train.compile": "off"}, _FP8
    ),
    "cuda_graph": Ablation("1b", "lora", {"train.cuda_graph": "auto"}, {"train.cuda_graph": "off"}, _FP8),
    "selective": Ablation("8b", "lora", {"train.activation_checkpointing": "selective"}, {}, _FP8),
    "offload": Ablation("8b", "lora", {"train.activation_checkpointing": "offload"}, {}, _FP8),
    "nf4_fill": Ablation("8b", "qlora", {"train.fused": "auto"}, {"train.fused": "off"}),
    "compile": Ablation("1b", "full", {"train.compile": "on"}, {"train.compile": "off"}, _FULL),
    "stochastic_rounding": Ablation("1b", "full", _FULL, {"train.weights": "fp32", "train.optimizer": "adamw"}),
    "adamw8bit": Ablation("1b", "full", {**_FULL, "train.optimizer": "adamw8bit"}, _FULL),
}


def run(*, tricks: str = "all", steps: int = 12) -> dict[str, Any]:
    names = list(ABLATIONS) if tricks == "all" else tricks.split(",")
    unknown = set(names) - ABLATIONS.keys()
    if unknown:
        raise SystemExit(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(ABLATIONS)}")
    results: list[dict[str, Any]] = []
    for shape in sorted({ABLATIONS[name].shape for name in names}):
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder)
            write_model(place / "model", shape)
            write_full_sequences(place / "data.jsonl", shape=shape, sequences=BATCH * steps, seq_len=SEQ_LEN)
            results += [_measure(place, name, steps) for name in names if ABLATIONS[name].shape == shape]
    return {"parameters": {"tricks": tricks, "steps": steps}, "results": results}


def _measure(folder: Path, name: str, steps: int) -> dict[str, Any]:
    ablation = ABLATIONS[name]
    always = {
        "data.seq_len": SEQ_LEN,
        "train.global_batch_size": BATCH,
        "train.micro_batch_size": BATCH,
        "train.max_steps": steps,
        **ablation.both,
    }
    row: dict[str, Any] = {"trick": name, "setting": ablation.setting()}
    for side, settings in (("off", ablation.off), ("on", ablation.on)):
        found = train(folder, f"{name}-{side}", ablation.method, {**always, **settings})
        row[f"{side}_tokens_per_second"] = found["tokens_per_second"]
        row[f"{side}_peak_gib"] = found["peak_memory_bytes"] / 2**30
    return row
