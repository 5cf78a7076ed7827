"""A run's event stream as the real writer puts it down, with made-up but plausible numbers and times that are fixed."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pantheraml.base.events import FILE_NAME, KINDS, SCHEMA_VERSION, Event

START = 1_800_000_000.0
BOOT = START - 7_000
"""When the machine was started, from where its clock counts."""


class Story:
    """Builds events with a clock of its own; `write` puts them into a run directory."""

    def __init__(self) -> None:
        self.now = START
        self.date_set_by = 0.0
        """By how much somebody has set the machine's date."""
        self.events: list[Event] = []

    def tell(self, kind: str, *, after: float = 0.0, **fields: Any) -> Event:
        assert KINDS[kind] <= fields.keys(), f"{kind} lacks {KINDS[kind] - fields.keys()}"
        self.now += after
        times = {"time": self.now + self.date_set_by, "clock": self.now - BOOT}
        event = {"v": SCHEMA_VERSION, **times, "rank": 0, "kind": kind, **fields}
        self.events.append(event)
        return event

    def write(self, run_dir: Path) -> Path:
        run_dir.mkdir(parents=True, exist_ok=True)
        lines = "".join(json.dumps(event) + "\n" for event in self.events)
        (run_dir / FILE_NAME).write_text(lines, encoding="utf-8")
        return run_dir

    def begin(self) -> None:
        self.tell("run.started", command="train", pantheraml="0.1.0", output="runs/first")
        self.tell("plan.made", after=0.1, plan=PLAN)

    def prepare(self) -> None:
        for done in (0, 4_000, 8_000, 12_000):
            self.tell("data.progress", after=0.5, split="train", stage="tokenise", done=done, total=12_000, unit="rows")
        self.tell("data.ready", after=0.2, split="train", **DATA)
        self.tell("data.ready", after=0.2, split="eval", **{**DATA, "rows": 240, "tokens": 24_000, "sequences": 12})
        self.tell("model.ready", after=1.0, architecture="LlamaForCausalLM", parameters=1_235_814_400,
                  trainable_parameters=11_272_192, precision="bf16", seconds=1.0)  # fmt: skip

    def train(self, first: int, last: int, *, total: int | None = None, eval_every: int = 0, pace: float = 0.5) -> None:
        total = total or last
        self.tell("train.started", after=0.3, first_step=first, total_steps=total, world_size=2, device="cuda",
                  global_batch_size=16)  # fmt: skip
        for step in range(first, last + 1):
            self.step(step, total, after=pace)
            if eval_every and step % eval_every == 0:
                self.evaluate(step)

    def step(self, step: int, total: int, *, after: float = 0.5, **changes: Any) -> None:
        fields = {
            "step": step,
            "epoch": step / 100,
            "loss": curve(step),
            "learning_rate": 2e-4 * 0.5 * (1 + math.cos(math.pi * step / total)),
            "grad_norm": 0.4 + 1.5 / step + 0.05 * math.sin(step),
            "tokens": 32_000,
            "target_tokens": 20_000,
            "seconds": after,
            "tokens_per_second": 32_000 / after if after else None,
            "memory_bytes": 17_000_000_000 + 1_000 * step,
        }
        self.tell("train.step", after=after, **{**fields, **changes})

    def evaluate(self, step: int) -> None:
        for done in (4, 8, 12):
            self.tell("eval.progress", after=0.1, step=step, done=done, total=12)
        loss = curve(step) + 0.03
        self.tell("eval.done", after=0.1, step=step, loss=loss, perplexity=math.exp(loss), target_tokens=9_000,
                  seconds=0.4)  # fmt: skip

    def save(self, step: int, *, best: bool = False) -> None:
        self.tell("checkpoint.saved", after=0.2, step=step, path=f"checkpoints/step-{step}", bytes=45_000_000,
                  seconds=0.2, best=best)  # fmt: skip

    def finish(self, steps: int, status: str = "succeeded") -> None:
        self.tell("train.finished", steps=steps, stopped_by="end")
        self.tell("model.saved", after=0.1, path="adapter", form="adapter")
        self.tell("run.finished", status=status, seconds=self.now - START)


def curve(step: int) -> float:
    """A loss that falls as losses do, with a little noise that is the same every time."""
    return 0.35 + 2.4 * math.exp(-step / 40) + 0.04 * math.sin(step * 12.9898)


PLAN: dict[str, Any] = {
    "device": "cuda",
    "device_ids": [0, 1],
    "mode": "distributed",
    "world_size": 2,
    "backend": "nccl",
    "precision": "bf16",
    "global_batch_size": 16,
    "micro_batch_size": 4,
    "activation_checkpointing": "none",
    "threads_per_process": 4,
    "predicted_memory_bytes": None,
    "predicted_seconds": None,
    "choices": [
        {"name": "parallel.mode", "value": "distributed", "reason": "two GPUs are visible", "automatic": True},
        {"name": "model.precision", "value": "bf16", "reason": "set in the configuration", "automatic": False},
        {"name": "train.micro_batch_size", "value": 4, "reason": "largest that divides 8 per GPU and leaves room for "
         "activations of 2,048 tokens", "automatic": True},
        {"name": "train.activation_checkpointing", "value": "none", "reason": "activations fit", "automatic": True},
    ],
}  # fmt: skip

DATA: dict[str, Any] = {
    "format": "messages",
    "rows": 12_000,
    "skipped_rows": 3,
    "truncated_rows": 41,
    "tokens": 1_228_800,
    "target_tokens": 790_000,
    "sequences": 608,
    "seq_len": 2_048,
    "packing": True,
    "efficiency": 0.9868,
    "fingerprint": "5f2c9a17be",
    "cached": False,
    "seconds": 1.9,
}


@pytest.fixture
def story() -> Story:
    return Story()


@pytest.fixture
def complete() -> Story:
    """A run of 120 steps with four evaluations that succeeded."""
    told = Story()
    told.begin()
    told.prepare()
    told.train(1, 120, eval_every=30)
    told.save(60)
    told.save(120, best=True)
    told.tell("checkpoint.removed", step=60, path="checkpoints/step-60")
    told.finish(120)
    return told


@pytest.fixture
def reading() -> Iterator[Callable[..., Any]]:
    """Readers made through this are closed when the test ends, whatever happens."""
    opened: list[Any] = []

    def open_reader(reader: Any) -> Any:
        opened.append(reader)
        return reader

    yield open_reader
    for reader in opened:
        reader.close()
