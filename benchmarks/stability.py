"""Effect of the guard on a run with noise batches, or with a layer that returns NaN.

A small model learns to count. In the run `spike` a few steps get batches of random words, with a high loss and large,
uninformative gradients; in the run `nan` one step's hidden states are NaN, either every time they are computed (a bad
sample) or once (a bit flip). Everything is seeded, so that curves differ only by the guard's settings.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from inputs import SHAPES, write_full_sequences, write_model
from table import Column, Table

SHAPE = "tiny"
SEQ_LEN = 32
BATCH = 8
WARMUP = 15
"""Warm-up steps of clipping methods with a history."""

UNGUARDED = {"clipping": "none", "on_spike": "ignore", "on_nonfinite": "detect"}
SPIKE_CASES: dict[str, dict[str, Any]] = {
    "off": UNGUARDED,
    "value": {**UNGUARDED, "clipping": "value", "clip_value": 0.01},
    "norm": {**UNGUARDED, "clipping": "norm"},
    "global_norm": {**UNGUARDED, "clipping": "global_norm"},
    "adaptive": {**UNGUARDED, "clipping": "adaptive"},
    "percentile": {**UNGUARDED, "clipping": "percentile", "clip_percentile": 50},
    "zclip": {**UNGUARDED, "clipping": "zclip"},
    "adagc": {**UNGUARDED, "clipping": "adagc"},
    # the loss still falls steeply, so its recent variance is large
    "on_spike: skip": {"clipping": "none", "on_spike": "skip", "spike_zscore": 3.0, "max_skipped_steps": 10},
}
NAN_CASES: dict[str, tuple[bool, dict[str, Any]]] = {
    "off": (True, UNGUARDED),
    "on_nonfinite: skip": (True, {"on_nonfinite": "skip"}),
    "on_nonfinite: zero": (True, {"on_nonfinite": "zero"}),
    "transient NaN: rerun": (False, {}),
    "no NaN": (False, {}),
}
"""Whether the NaN recurs when the step is rerun, and the settings."""

TABLE = Table(
    title="Stability",
    how="A small model with noise batches (spike) or NaN; mean loss of the steps before, the worst and the last after.",
    columns=(
        Column("run", "run"),
        Column("case", "case"),
        Column("before", "before", lambda loss: f"{loss:.3f}"),
        Column("worst after", "worst", lambda loss: f"{loss:.3f}"),
        Column("final", "end", lambda loss: f"{loss:.3f}"),
    ),
)


def run(*, steps: int = 115, at: int = 80, noisy_steps: int = 5, learning_rate: float = 4e-3) -> dict[str, Any]:
    import torch

    torch.set_num_threads(1)
    given = {"steps": steps, "at": at, "noisy_steps": noisy_steps, "learning_rate": learning_rate}
    noise, nothing = range(at, at + noisy_steps), range(0)
    results = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder / "model", SHAPE)
        _write_counting(folder / "counting.jsonl")
        write_full_sequences(folder / "noise.jsonl", shape=SHAPE, sequences=64, seq_len=SEQ_LEN)
        for case, settings in SPIKE_CASES.items():
            losses = _losses(folder, settings, steps, learning_rate, noise=noise)
            results.append(_result("spike", case, losses, noise))
        for case, (recurs, settings) in NAN_CASES.items():
            broken = nothing if case == "no NaN" else range(at, at + 1)
            losses = _losses(folder, settings, steps, learning_rate, broken=broken, recurs=recurs)
            results.append(_result("nan", case, losses, range(at, at + 1)))
    return {"parameters": given, "results": results}


def _result(run: str, case: str, losses: list[float], trouble: range) -> dict[str, Any]:
    """Result row; non-finite losses are None."""
    after = losses[trouble.stop :]
    return {
        "run": run,
        "case": case,
        "before": statistics.mean(losses[trouble.start - 5 : trouble.start]),
        "worst": _finite(max(after, key=lambda loss: math.inf if math.isnan(loss) else loss)),
        "end": _finite(statistics.mean(losses[-5:])),
        "losses": [_finite(loss) for loss in losses],
    }


def _finite(loss: float) -> float | None:
    return round(loss, 5) if math.isfinite(loss) else None


def _write_counting(path: Path) -> None:
    """Write documents that count up from a random number, by one or by two."""
    draw, words = random.Random(3), int(SHAPES[SHAPE]["vocab_size"]) - 8
    with open(path, "w", encoding="utf-8") as file:
        for _ in range(512):
            first, by = draw.randrange(words), draw.choice((1, 2))
            text = " ".join(f"t{(first + by * place) % words}" for place in range(SEQ_LEN - 1))
            file.write(json.dumps({"text": text}) + "\n")


def _losses(
    folder: Path,
    stability: dict[str, Any],
    steps: int,
    learning_rate: float,
    *,
    noise: range = range(0),
    broken: range = range(0),
    recurs: bool = True,
) -> list[float]:
    """Train and return the loss of each step."""
    from pantheraml.base.events import silent
    from pantheraml.engine.guard.decide import StepJudge
    from pantheraml.specs.run_dir import RunDir

    stepper, feeds = _parts(folder, stability)
    judge = StepJudge(stepper, RunDir(folder), silent, about={}, keeps=False)
    losses = []
    with feeds["counting"] as counting, feeds["noise"] as noisy:
        for step in range(steps):
            batches = (noisy if step in noise else counting).step(step)
            with _nan(stepper.model) if step in broken else nullcontext():
                report = stepper.backward(batches, stop_requested=False)
                if recurs:
                    verdict, report = judge.judge(step + 1, batches, report, checkpoint=None)
            if not recurs:
                verdict, report = judge.judge(step + 1, batches, report, checkpoint=None)
            losses.append(report.numbers.loss)
            if verdict.action == "skip":
                stepper.skip(report.numbers)
            else:
                stepper.apply(report.numbers, learning_rate, zero_nonfinite=verdict.action == "zero")
    return losses


@contextmanager
def _nan(model: Any) -> Iterator[None]:
    layer = model.get_submodule("model.layers.1")
    handle = layer.register_forward_hook(lambda module, args, output: output * math.nan)
    try:
        yield
    finally:
        handle.remove()


def _parts(folder: Path, stability: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return a model ready to step, and feeds of normal and of noise batches."""
    import torch

    from pantheraml.base.events import silent
    from pantheraml.data.dataset import TokenDataset
    from pantheraml.data.prepare import prepare
    from pantheraml.devices.probe import probe
    from pantheraml.engine.step.feed import Feed
    from pantheraml.engine.step.step import Stepper
    from pantheraml.models.loader import load_tokenizer
    from pantheraml.parallel.process_group import World
    from pantheraml.planner.choose import choose
    from pantheraml.specs.train import TrainConfig
    from pantheraml.worker.train import build_model

    config = TrainConfig.model_validate(
        {
            "model": {"path": str(folder / "model"), "precision": "fp32"},
            "data": {"path": str(folder / "counting.jsonl"), "seq_len": SEQ_LEN, "cache_dir": str(folder / "cache")},
            "method": {"kind": "full"},
            "train": {"global_batch_size": BATCH, "micro_batch_size": BATCH, "max_steps": 1},
            "stability": {"clip_warmup_steps": WARMUP, **stability},
            "device": "cpu",
        }
    )
    plan, world = choose(config, probe()), World(rank=0, size=1, device=torch.device("cpu"))
    torch.manual_seed(0)
    stepper = Stepper(build_model(config, plan, world, silent), config, world, plan).setup()
    stepper.model.train()
    feeds = {}
    for name in ("counting", "noise"):
        data = config.data.model_copy(update={"path": str(folder / f"{name}.jsonl")})
        dataset = TokenDataset.open(prepare(data, tokenizer=load_tokenizer(config.model), emit=silent).train)
        feeds[name] = Feed(dataset, world, seed=0, global_batch=BATCH, micro_batch=BATCH, limit=None)
    return stepper, feeds


if __name__ == "__main__":
    print(json.dumps(run(), indent=1))
