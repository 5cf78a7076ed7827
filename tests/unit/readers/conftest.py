"""Fixtures: event streams of made-up runs with plausible numbers and fixed times."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pantheraml.base.event_stream import FILE_NAME
from pantheraml.base.events import EventBase, parse_event

START = 1_800_000_000.0
BOOT = START - 7_000
"""Boot time of the host: zero of its monotonic clock."""


class FakeRun:
    """Builds the events of a run with a simulated clock; `write` stores them in a run folder."""

    def __init__(self) -> None:
        self.now = START
        self.clock_offset = 0.0
        """Seconds by which the system clock was changed."""
        self.events: list[EventBase] = []

    def emit(self, kind: str, *, after: float = 0.0, **fields: Any) -> EventBase:
        self.now += after
        times = {"time": self.now + self.clock_offset, "clock": self.now - BOOT}
        event = parse_event({**times, "kind": kind, **fields})
        self.events.append(event)
        return event

    def write(self, run_dir: Path) -> Path:
        run_dir.mkdir(parents=True, exist_ok=True)
        lines = "".join(event.model_dump_json() + "\n" for event in self.events)
        (run_dir / FILE_NAME).write_text(lines, encoding="utf-8")
        return run_dir

    def begin(self) -> None:
        self.emit("run.started", command="train", pantheraml="0.1.0", output="runs/first")
        self.emit("plan.made", after=0.1, plan=PLAN)

    def prepare(self) -> None:
        for done in (0, 4_000, 8_000, 12_000):
            self.emit("data.progress", after=0.5, split="train", stage="tokenize", done=done, total=12_000, unit="rows")
        self.emit("data.ready", after=0.2, split="train", **DATA)
        self.emit("data.ready", after=0.2, split="eval", **{**DATA, "rows": 240, "tokens": 24_000, "sequences": 12})
        self.emit("model.ready", after=1.0, architecture="LlamaForCausalLM", parameters=1_235_814_400,
                  trainable_parameters=11_272_192, precision="bf16", seconds=1.0)  # fmt: skip

    def train(self, first: int, last: int, *, total: int | None = None, eval_every: int = 0, pace: float = 0.5) -> None:
        total = total or last
        self.emit("train.started", after=0.3, first_step=first, total_steps=total, world_size=2, device="cuda",
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
        self.emit("train.step", after=after, **{**fields, **changes})

    def evaluate(self, step: int) -> None:
        for done in (4, 8, 12):
            self.emit("eval.progress", after=0.1, step=step, done=done, total=12)
        loss = curve(step) + 0.03
        self.emit("eval.done", after=0.1, step=step, loss=loss, perplexity=math.exp(loss), target_tokens=9_000,
                  seconds=0.4)  # fmt: skip

    def save(self, step: int, *, best: bool = False) -> None:
        self.emit("checkpoint.saved", after=0.2, step=step, path=f"checkpoints/step-{step}", bytes=45_000_000,
                  seconds=0.2, best=best)  # fmt: skip

    def finish(self, steps: int, status: str = "succeeded") -> None:
        self.emit("train.finished", steps=steps, stopped_by="end")
        self.emit("model.saved", after=0.1, path="adapter", form="adapter")
        self.emit("run.finished", status=status, seconds=self.now - START)


def curve(step: int) -> float:
    """A falling loss with deterministic noise."""
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
def fake_run() -> FakeRun:
    return FakeRun()


@pytest.fixture
def complete() -> FakeRun:
    """A successful run of 120 steps with four evaluations."""
    run = FakeRun()
    run.begin()
    run.prepare()
    run.train(1, 120, eval_every=30)
    run.save(60)
    run.save(120, best=True)
    run.emit("checkpoint.removed", step=60, path="checkpoints/step-60")
    run.finish(120)
    return run


@pytest.fixture
def reading() -> Iterator[Callable[..., Any]]:
    """Returns a function that registers readers to be closed when the test ends."""
    opened: list[Any] = []

    def open_reader(reader: Any) -> Any:
        opened.append(reader)
        return reader

    yield open_reader
    for reader in opened:
        reader.close()
