"""Ablations: the same run with and without one optimization, everything else at its default.

Covers the optimizations that have a setting; each run is the train task on random weights and full sequences, 4 x 2048.
All run in one process, which imports and compiles once. `8b/4` has a quarter of the layers of an 8B model, so its
output head takes a larger share than in the full one. docs/performance.md shows the newest row of each. Needs a GPU.

    python benchmarks/run.py ablation                             all of them, some minutes
    python benchmarks/run.py ablation --set tricks=cuda_graph     some, by name, comma-separated
    python benchmarks/run.py ablation --set tricks=pieces         what has no setting: see ablation_pieces.py
"""

from __future__ import annotations

import gc
import shutil
import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ablation_pieces
from inputs import write_full_sequences, write_model

NEEDS_GPU = True

BATCH, SEQ_LEN = 4, 2048


@dataclass(frozen=True)
class Ablation:
    """Settings of the run with (`on`) and without (`off`) the optimization, and of both."""

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
    "fp8_base": Ablation("8b/4", "lora", _FP8, {"model.precision": "bf16"}),
    "fused_layers": Ablation(
        "8b/4", "lora", {"train.fused": "auto"}, {"train.fused": "off", "train.compile": "off"}, _FP8
    ),
    "full_fp8": Ablation("1b", "full", _FP8, {"model.precision": "bf16"}, _FULL),
    "fp8_layouts": Ablation("8b/4", "lora", {"train.fp8_layouts": 2}, {"train.fp8_layouts": 1}, _FP8),
    "cuda_graph": Ablation("1b", "lora", {"train.cuda_graph": "auto"}, {"train.cuda_graph": "off"}, _FP8),
    "selective": Ablation("8b/4", "lora", {"train.activation_checkpointing": "selective"}, {}, _FP8),
    "offload": Ablation("8b/4", "lora", {"train.activation_checkpointing": "offload"}, {}, _FP8),
    "nf4_to_fp8": Ablation("8b/4", "qlora", {"train.fused": "auto"}, {"train.fused": "off"}),
    "compile": Ablation(
        "1b", "full", {"train.compile": "on"}, {"train.compile": "off"}, {**_FULL, "train.cuda_graph": "on"}
    ),
    "stochastic_rounding": Ablation("1b", "full", _FULL, {"train.weights": "fp32", "train.optimizer": "adamw"}),
    "adamw8bit": Ablation("1b", "full", {**_FULL, "train.optimizer": "adamw8bit"}, _FULL),
}


def run(
    *,
    tricks: str = "all",
    steps: int = 12,
    shapes: str = "8b,1b",
    minutes: float = 8.0,
    batch: int = BATCH,
    seq_len: int = SEQ_LEN,
) -> dict[str, Any]:
    """`shapes`, `minutes`, `batch` and `seq_len` are for `tricks=pieces`."""
    if tricks == "pieces":
        scale = ablation_pieces.Scale("", batch, seq_len, steps)
        parameters = {"tricks": tricks, "steps": steps, "shapes": shapes, "minutes": minutes}
        return {
            "parameters": parameters,
            "results": ablation_pieces.measure(shapes.split(","), minutes, scale, train),
        }
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
    common = {
        "model.path": str(folder / "model"),
        "data.path": str(folder / "data.jsonl"),
        "data.cache_dir": str(folder / "cache"),
        "data.seq_len": SEQ_LEN,
        "method.kind": ablation.method,
        "method.rank": 16,
        "method.alpha": 16,
        "train.global_batch_size": BATCH,
        "train.micro_batch_size": BATCH,
        "train.max_steps": steps,
        **ablation.both,
    }
    row: dict[str, Any] = {"trick": name, "setting": ablation.setting()}
    for side, settings in (("off", ablation.off), ("on", ablation.on)):
        speed, peak = train(folder / f"{name}-{side}", {**common, **settings})
        row |= {f"{side}_tokens_per_second": speed, f"{side}_peak_gib": peak}
        print(f"{name} {side}: {speed:,.0f} tokens/s, {peak} GiB", flush=True)
    return row


def train(output: Path, settings: Mapping[str, object]) -> tuple[float, float | None]:
    """Train in this process; return tokens per second (median of the steps after warm-up) and a GPU's peak in GiB."""
    import torch

    from pantheraml.base.event_stream import EventWriter, read_events
    from pantheraml.base.events import TrainStep
    from pantheraml.devices.probe import probe
    from pantheraml.planner.choose import choose
    from pantheraml.readers.summary import WARM_UP_STEPS
    from pantheraml.specs.config_file import validate
    from pantheraml.specs.run_dir import RunDir
    from pantheraml.worker.prepare_and_train import prepare_and_train_task

    sections: dict[str, dict[str, object]] = {"parallel": {"mode": "none"}}
    for key, value in settings.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    config = validate(sections)
    run = RunDir(output)
    run.mark()
    run.write_config(config)
    run.write_plan(choose(config, probe()))
    gc.collect()  # reference cycles keep the last model alive
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    with EventWriter(output) as emit:
        prepare_and_train_task(output, emit)
    steps = [event for event in read_events(output) if isinstance(event, TrainStep)][WARM_UP_STEPS:]
    speed = statistics.median(event.tokens / event.seconds for event in steps)
    shutil.rmtree(output)  # weights and optimizer states of full fine-tunes would fill the disk
    return speed, torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None
