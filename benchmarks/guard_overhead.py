"""Overhead of the guard: a step with it, relative to the same passes and optimizer without it.

The bare step neither checks nor clips gradients; it reads the loss, as every loop does. The two alternate on the same
model and batch, in changing order, so that both see the same load; the result is the median ratio of adjacent steps.
One row per kind of clipping; the default is `global_norm`.

    python benchmarks/run.py guard_overhead --set device=cuda --set shape=1b --set seq_len=2048
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from inputs import write_full_sequences, write_model
from table import Column, Table, milliseconds, percent

WARMUP = 3
KINDS = ("global_norm", "value", "norm", "adaptive", "percentile", "zclip", "adagc")

TABLE = Table(
    title="Guard overhead",
    how="Step with signals, verdict and clipping relative to one without, alternating; median of the ratios. On a CPU,"
    " process time.",
    columns=(
        Column("device", "device"),
        Column("method", "method"),
        Column("clipping", "clipping"),
        Column("trainable tensors", "tensors"),
        Column("bare step", "bare_seconds", milliseconds),
        Column("overhead", "overhead", percent),
    ),
)


def run(
    *,
    kinds: str = ",".join(KINDS),
    method: str = "lora",
    shape: str = "tiny",
    steps: int = 60,
    seq_len: int = 512,
    device: str = "auto",
) -> dict[str, Any]:
    """`device`: cpu, cuda, or auto (a GPU if there is one)."""
    import torch

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    parameters = {
        "kinds": kinds,
        "method": method,
        "shape": shape,
        "steps": steps,
        "seq_len": seq_len,
        "device": device,
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder / "model", shape)
        write_full_sequences(folder / "data.jsonl", shape=shape, sequences=8, seq_len=seq_len)
        where = torch.device(device)
        rows = [_measure(folder, kind, where, method=method, steps=steps, seq_len=seq_len) for kind in kinds.split(",")]
    return {"parameters": parameters, "results": rows}


def _measure(folder: Path, kind: str, device: Any, *, method: str, steps: int, seq_len: int) -> dict[str, Any]:
    import torch

    from pantheraml.base.events import silent
    from pantheraml.engine.guard.decide import StepJudge
    from pantheraml.parallel.process_group import World
    from pantheraml.specs.run_dir import RunDir

    stepper, batches = _step(folder, kind, World(rank=0, size=1, device=device), method=method, seq_len=seq_len)
    judge = StepJudge(stepper, RunDir(folder), silent, about={}, keeps=False)

    def guarded(step: int) -> None:
        report = stepper.backward(batches, stop_requested=False)
        verdict, report = judge.judge(step + 1, batches, report, checkpoint=None)
        assert verdict.action == "step"
        stepper.apply(report.numbers, 1e-6)

    def bare(_: int) -> None:
        total = stepper.passes.backward(batches.micro_batches, 1 / batches.target_tokens)
        stepper.optimizer.step()
        stepper.clear_gradients()
        total.item()

    # Process time on a CPU excludes other load; a GPU is not shared.
    clock = time.process_time if device.type == "cpu" else time.perf_counter

    def seconds(take: Any, step: int) -> float:
        _synchronize(device)
        begin = clock()
        take(step)
        _synchronize(device)
        return clock() - begin

    pairs = []
    for step in range(WARMUP + steps):
        order = (guarded, bare) if step % 2 else (bare, guarded)
        taken = {take: seconds(take, step) for take in order}
        pairs.append((taken[guarded], taken[bare]))
    pairs = pairs[WARMUP:]
    return {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "method": method,
        "clipping": kind,
        "tensors": len(stepper.parts),
        "bare_seconds": statistics.median(bare for _, bare in pairs),
        "overhead": statistics.median(guarded / bare for guarded, bare in pairs) - 1,
    }


def _step(folder: Path, kind: str, world: Any, *, method: str, seq_len: int) -> tuple[Any, Any]:
    """Return a model ready to step, and a batch."""
    from pantheraml.data.dataset import TokenDataset
    from pantheraml.data.prepare import prepare
    from pantheraml.devices.probe import probe
    from pantheraml.engine.step.feed import Feed
    from pantheraml.engine.step.step import Stepper
    from pantheraml.models.loader import load_tokenizer
    from pantheraml.planner.choose import choose
    from pantheraml.specs.train import TrainConfig
    from pantheraml.worker.train import build_model

    def silent(event: Any, /) -> None:
        pass

    config = TrainConfig.model_validate(
        {
            "model": {"path": str(folder / "model")},
            "data": {"path": str(folder / "data.jsonl"), "seq_len": seq_len, "cache_dir": str(folder / "cache")},
            "method": {"kind": method},
            "train": {"global_batch_size": 4, "micro_batch_size": 4, "max_steps": 1},
            "stability": {"clipping": kind, "clip_warmup_steps": 5},
            "parallel": {"device_ids": [0]} if world.device.type == "cuda" else {},
            "device": world.device.type,
        }
    )
    plan = choose(config, probe())
    stepper = Stepper(build_model(config, plan, world, silent), config, world, plan).setup()
    stepper.model.train()
    data = TokenDataset.open(prepare(config.data, tokenizer=load_tokenizer(config.model), emit=silent).train)
    with Feed(data, world, seed=0, global_batch=4, micro_batch=4, limit=None) as feed:
        return stepper, feed.step(0)


def _synchronize(device: Any) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    print(json.dumps(run(), indent=1))
