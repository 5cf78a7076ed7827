"""What the guard costs: a step with it against the same passes and the same optimizer without any of it.

The bare step neither looks at gradients nor clips them; it reads the loss, as every loop does. The two are taken in
turns on the same model and batch, and the median of the ratios of neighbours is the result, so that both see the same
machine. One row for each kind of clipping; the default is `global_norm`.
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
    how="Step with signals, verdict and clipping against one without, taken in turns; median of the ratios.",
    columns=(
        Column("device", "device"),
        Column("method", "method"),
        Column("clipping", "clipping"),
        Column("trained tensors", "tensors"),
        Column("bare step", "bare_seconds", milliseconds),
        Column("overhead", "overhead", percent),
    ),
)


def run(
    *, kinds: str = ",".join(KINDS), method: str = "lora", shape: str = "tiny", steps: int = 60, seq_len: int = 512
) -> dict[str, Any]:
    parameters = {"kinds": kinds, "method": method, "shape": shape, "steps": steps, "seq_len": seq_len}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder / "model", shape)
        write_full_sequences(folder / "data.jsonl", shape=shape, sequences=8, seq_len=seq_len)
        rows = [_measure(folder, kind, method=method, steps=steps, seq_len=seq_len) for kind in kinds.split(",")]
    return {"parameters": parameters, "results": rows}


def _measure(folder: Path, kind: str, *, method: str, steps: int, seq_len: int) -> dict[str, Any]:
    import torch

    from pantheraml.parallel.process_group import World

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    stepper, batches = _step(folder, kind, World(rank=0, size=1, device=device), method=method, seq_len=seq_len)

    def seconds(take: Any) -> float:
        _synchronize(device)
        begin = time.perf_counter()
        take(stepper, batches)
        _synchronize(device)
        return time.perf_counter() - begin

    pairs = [(seconds(_guarded), seconds(_bare)) for _ in range(WARMUP + steps)][WARMUP:]
    return {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "method": method,
        "clipping": kind,
        "tensors": len(stepper.parts),
        "bare_seconds": statistics.median(bare for _, bare in pairs),
        "overhead": statistics.median(guarded / bare for guarded, bare in pairs) - 1,
    }


def _guarded(stepper: Any, batches: Any) -> None:
    report = stepper.backward(batches, stop_requested=False)
    verdict = stepper.guard.policy.decide(report.numbers, loss_scale=None)
    assert verdict.action == "step"
    stepper.apply(report.numbers, 1e-6)


def _bare(stepper: Any, batches: Any) -> None:
    total = stepper.passes.backward(batches.micro_batches, 1 / batches.target_tokens)
    stepper.optimizer.step()
    stepper.clear_gradients()
    total.item()


def _step(folder: Path, kind: str, world: Any, *, method: str, seq_len: int) -> tuple[Any, Any]:
    """A model ready to step, and a batch."""
    from pantheraml.data.dataset import TokenDataset
    from pantheraml.data.prepare import prepare
    from pantheraml.devices.probe import probe
    from pantheraml.engine.feed import Feed
    from pantheraml.engine.step import Stepper
    from pantheraml.models.loader import load_tokenizer
    from pantheraml.planner.choose import choose
    from pantheraml.specs.train import TrainConfig
    from pantheraml.worker.train import build_model

    def silent(kind: str, /, **fields: Any) -> None:
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
    stepper = Stepper(build_model(config, plan, world, silent), config, world, plan)
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
