"""Captured steps, tested on a CPU: full runs in which a graph replay reruns the captured function.

Host work that overlaps with a step, and inputs copied to the device ahead of time, must not change any result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from pantheraml.base.errors import NonFiniteError
from pantheraml.data.batch import Batch
from pantheraml.engine.optim.graph_adamw import GraphAdamW
from pantheraml.engine.state.saving import Saver
from pantheraml.engine.step.async_readback import AsyncReadback
from pantheraml.engine.step.cuda_graph import StaticInputs, StepGraph
from pantheraml.engine.step.feed import Feed, StepBatches
from pantheraml.engine.step.step import Stepper
from pantheraml.specs.run_dir import RunDir
from pantheraml.specs.train import TrainConfig
from tests import toy
from tests.event_log import raw_events
from tests.harness import make_plan, make_run, merged, train_here, values

STEPS = 8


@dataclass
class Rerun:
    """Stand-in for a CUDA graph."""

    replay: Callable[[], None]


def capture_passes(self: StepGraph, batch: Batch, factor: Tensor) -> tuple[Rerun, Tensor]:
    """Mimic a capture: allocate loss and gradients, compute nothing."""
    trained = self._parameters
    overwrites_grads = all(parameter.grad is None for parameter in trained)
    kept = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in trained]
    loss = self._run(batch, factor).clone()
    places = [parameter.grad for parameter in trained]
    for place, values_before in zip(places, kept, strict=True):
        assert place is not None
        place.copy_(values_before)

    def replay() -> None:
        for parameter in trained if overwrites_grads else ():
            parameter.grad = None
        loss.copy_(self._run(batch, factor))
        for parameter, place in zip(trained, places, strict=True) if overwrites_grads else ():
            assert parameter.grad is not None
            assert place is not None
            parameter.grad = place.copy_(parameter.grad)

    return Rerun(replay), loss


@pytest.fixture(autouse=True)
def captured_without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepGraph, "_capture", capture_passes)
    monkeypatch.setattr(GraphAdamW, "_capture", lambda self, launch: Rerun(launch))


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[tuple[StepBatches, float]]:
    """Arguments of `Stepper.expect`."""
    seen = []

    def expect(self: Stepper, batches: StepBatches, rate: float) -> None:
        assert self.is_captured
        seen.append((batches, rate))
        original(self, batches, rate)

    original = Stepper.expect
    monkeypatch.setattr(Stepper, "expect", expect)
    return seen


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded")
    toy.write_llama(folder / "model")
    sums = [row["prompt"] + row["completion"] for row in toy.arithmetic(800)]
    texts = [" ".join(sums[at : at + 10]) for at in range(0, len(sums), 10)]  # long documents: batches of few shapes
    toy.write_jsonl(folder / "data.jsonl", [{"text": text} for text in texts])
    return folder


def run_of(root: Path, name: str, *, micro: int = 4, **changes: Any) -> RunDir:
    base = {
        "model": {"path": str(root / "model")},
        "data": {"path": str(root / "data.jsonl"), "seq_len": 64, "packing": True, "cache_dir": str(root / "cache")},
        "train": {"global_batch_size": 4, "max_steps": STEPS, "learning_rate": 5e-3},
    }
    config = TrainConfig.model_validate(merged(base, changes))
    plan = make_plan(config, micro=micro).model_copy(update={"cuda_graph": True})
    return make_run(root / name, config, plan)


def weights(of: RunDir) -> dict[str, Tensor]:
    (file,) = of.trained().glob("*.safetensors")
    return load_file(file)


def logged_steps(events: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    fields = ("step", "epoch", "loss", "learning_rate", "grad_norm", "tokens", "target_tokens")
    return [tuple(event[field] for field in fields) for event in events if event["kind"] == "train.step"]


def assert_same(one: RunDir, other: RunDir) -> None:
    ours, theirs = weights(one), weights(other)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("micro", [4, 2])
def test_prefetching_to_the_device_changes_nothing(
    root: Path, micro: int, given: list[tuple[StepBatches, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, with one and two batches per step; and captured steps equal eager ones."""
    ahead, late, plain = (run_of(root, f"{name}-{micro}", micro=micro) for name in ("ahead", "late", "plain"))
    with monkeypatch.context() as patched:
        # a GPU would still be busy at this point; a CPU has finished, so prefetching would be skipped
        patched.setattr(Stepper, "has_finished", lambda self: False)
        found = logged_steps(train_here(ahead))
    assert len(given) >= 3
    assert [rate for _, rate in given] == [row[3] for row in found][-len(given) :], (
        "the expected learning rates were the actual ones"
    )
    with monkeypatch.context() as patched:
        patched.setattr(Feed, "prefetched", lambda self, until: None)
        assert logged_steps(train_here(late)) == found
    assert_same(ahead, late)
    plain.write_plan(plain.plan().model_copy(update={"cuda_graph": False}))
    eager = logged_steps(train_here(plain))
    assert [row[2] for row in found] == pytest.approx([row[2] for row in eager], rel=1e-5)


def nan_at(monkeypatch: pytest.MonkeyPatch, *readings: int) -> None:
    """Make the losses of the given readbacks (counted from 1) NaN."""
    count = 0

    def read(self: AsyncReadback) -> list[float]:
        nonlocal count
        count += 1
        loss, *others = original(self)
        return [torch.nan if count in readings else loss, *others]

    original = AsyncReadback.read
    monkeypatch.setattr(AsyncReadback, "read", read)


@pytest.mark.parametrize("micro", [4, 2])
def test_bad_step_is_retried_with_its_own_batches(
    root: Path, micro: int, given: list[tuple[StepBatches, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By then the static inputs hold the batches of the next step."""
    monkeypatch.setattr(Stepper, "has_finished", lambda self: False)
    straight, struck = run_of(root, f"straight-{micro}", micro=micro), run_of(root, f"struck-{micro}", micro=micro)
    expected = logged_steps(train_here(straight))
    given.clear()
    with monkeypatch.context() as patched:
        nan_at(patched, 5)
        events = train_here(struck)
    assert len(given) >= 3
    assert values(events, "verdict", "action") == ["retry"]
    assert logged_steps(events) == expected
    assert_same(straight, struck)


def test_run_that_fails_has_logged_every_step(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(root, "ends")
    nan_at(monkeypatch, 5, 6)
    with pytest.raises(NonFiniteError):
        train_here(run)
    assert [row[0] for row in logged_steps(raw_events(run.path))] == [1, 2, 3, 4]


def test_failed_launch_still_logs_the_last_step(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: Stepper, batches: StepBatches, **others: Any) -> Any:
        if len(logged_steps(raw_events(run.path))) == 3 and self.is_captured:
            raise RuntimeError("a launch that fails")
        return original(self, batches, **others)

    original = Stepper.begin
    monkeypatch.setattr(Stepper, "begin", fails)
    run = run_of(root, "fails")
    with pytest.raises(RuntimeError, match="a launch that fails"):
        train_here(run)
    assert [row[0] for row in logged_steps(raw_events(run.path))] == [1, 2, 3, 4]


def test_steps_are_logged_before_their_evaluation_and_checkpoint(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(self: Saver, step: int, *arguments: Any, **named: Any) -> None:
        assert step % 2 or step in [row[0] for row in logged_steps(raw_events(run.path))]
        original(self, step, *arguments, **named)

    original = Saver.start
    monkeypatch.setattr(Saver, "start", start)
    changes: dict[str, Any] = {
        "data": {"eval_fraction": 0.1},
        "train": {"eval_every_steps": 3, "log_every_steps": 2},
        "checkpoint": {"every_steps": 2},
    }
    run = run_of(root, "order", **changes)
    events = train_here(run)
    kinds = [(event["kind"], event["step"]) for event in events if event["kind"] in ("train.step", "eval.done")]
    steps, evals = [("train.step", step) for step in (2, 4, 6, 8)], [("eval.done", step) for step in (3, 6, 8)]
    assert kinds == [steps[0], evals[0], *steps[1:3], evals[1], steps[3], evals[2]]
    for step in (2, 4, 6, 8):
        order = [event["kind"] for event in events if event.get("step") == step]
        assert order.index("train.step") < order.index("checkpoint.saved")


def test_static_inputs_copy_only_what_changed() -> None:
    def batch(start: int) -> Batch:
        numbers = torch.arange(start, start + 8).view(2, 4)
        return Batch(numbers, numbers + 1, numbers + 2, None, max_length=4, tokens=8, target_count=8)

    first, second = batch(0), batch(100)
    inputs = StaticInputs(batch(50), torch.zeros(()))
    for given, factor in ((first, 0.5), (second, 0.5), (first, 0.25)):
        inputs.fill(given, factor)
        inputs.fill(given, factor)
        for name in ("input_ids", "targets", "position_ids"):
            assert torch.equal(getattr(inputs.batch, name), getattr(given, name))
        assert float(inputs.factor) == factor
    inputs.batch.targets.zero_()
    inputs.fill(first, 0.125)
    assert not inputs.batch.targets.any(), "that batch was already there"
    assert float(inputs.factor) == 0.125


def test_readback_returns_what_was_sent() -> None:
    readout = AsyncReadback(torch.device("cpu"))
    for numbers in ([1.5, -2.0], [float(n) for n in range(40)], [0.1]):
        readout.send(torch.tensor(numbers, dtype=torch.float64))
        assert readout.has_arrived()
        assert readout.read() == numbers
