"""What single tricks bring: the same run with and without, everything else as it is by default.

Those that a setting can switch off; each run is the train task on random weights and full sequences, 4 x 2048. All of
them run in one process, which imports and compiles once, and `8b/4` has a quarter of the layers of an 8B model, so that
its output head weighs more than in a whole one. docs/performance.md shows the newest row of each. Needs a GPU.

    python benchmarks/run.py ablation                             all of them, some minutes
    python benchmarks/run.py ablation --set tricks=cuda_graph     some, by name, with commas
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

from inputs import write_full_sequences, write_model

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
    "fp8_base": Ablation("8b/4", "lora", _FP8, {"model.precision": "bf16"}),
    "fused_layers": Ablation(
        "8b/4", "lora", {"train.fused": "auto"}, {"train.fused": "off", "train.compile": "off"}, _FP8
    ),
    "full_fp8": Ablation("1b", "full", _FP8, {"model.precision": "bf16"}, _FULL),
    "fp8_layouts": Ablation("8b/4", "lora", {"train.fp8_layouts": 2}, {"train.fp8_layouts": 1}, _FP8),
    "cuda_graph": Ablation("1b", "lora", {"train.cuda_graph": "auto"}, {"train.cuda_graph": "off"}, _FP8),
    "selective": Ablation("8b/4", "lora", {"train.activation_checkpointing": "selective"}, {}, _FP8),
    "offload": Ablation("8b/4", "lora", {"train.activation_checkpointing": "offload"}, {}, _FP8),
    "nf4_fill": Ablation("8b/4", "qlora", {"train.fused": "auto"}, {"train.fused": "off"}),
    "compile": Ablation(
        "1b", "full", {"train.compile": "on"}, {"train.compile": "off"}, {**_FULL, "train.cuda_graph": "on"}
    ),
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
        speed, peak = train(folder / f"{name}-{side}", {**always, **settings})
        row |= {f"{side}_tokens_per_second": speed, f"{side}_peak_gib": peak}
        print(f"{name} {side}: {speed:,.0f} tokens/s, {peak:.2f} GiB", flush=True)
    return row


def train(output: Path, settings: Mapping[str, object]) -> tuple[float, float]:
    """A run in this process: its tokens a second (median of the steps after warm-up) and its peak memory in GiB."""
    import torch

    from pantheraml.base.events import EventWriter, read_events
    from pantheraml.devices.probe import probe
    from pantheraml.planner.choose import choose
    from pantheraml.readers.summary import WARM_UP_STEPS
    from pantheraml.specs.config_file import validate
    from pantheraml.specs.run_dir import RunDir
    from pantheraml.worker.start import start_task

    sections: dict[str, dict[str, object]] = {"parallel": {"mode": "none"}}
    for key, value in settings.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    config = validate(sections)
    run = RunDir(output)
    run.mark()
    run.write_config(config)
    run.write_plan(choose(config, probe()))
    gc.collect()  # the run before is held by cycles
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    with EventWriter(output) as emit:
        start_task(output, emit)
    taken = [event for event in read_events(output) if event["kind"] == "train.step"][WARM_UP_STEPS:]
    speed = statistics.median(event["tokens"] / event["seconds"] for event in taken)
    shutil.rmtree(output)  # weights and optimizer states: some runs of a full fine-tune fill a disk
    return speed, torch.cuda.max_memory_allocated() / 2**30
