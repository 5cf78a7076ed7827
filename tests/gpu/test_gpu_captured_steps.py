"""Captured steps on a GPU: batches given ahead do not change results, and the host syncs in one place only."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pantheraml.engine.optim.graph_adamw import GraphAdamW
from pantheraml.engine.step.async_readback import CAPACITY, AsyncReadback
from pantheraml.engine.step.cuda_graph import _shape
from pantheraml.engine.step.feed import Feed, StepBatches
from pantheraml.engine.step.step import Stepper
from pantheraml.specs.run_dir import RunDir
from pantheraml.specs.train import TrainConfig
from tests import toy
from tests.gpu.waiting import no_waiting
from tests.harness import make_plan, make_run, train_here, values

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpu-recorded")
    toy.write_llama(folder / "model", hidden_size=128, intermediate_size=256)
    sums = [row["prompt"] + row["completion"] for row in toy.arithmetic(2000)]
    texts = [" ".join(sums[at : at + 20]) for at in range(0, len(sums), 20)]  # long texts: batches of few shapes
    toy.write_jsonl(folder / "data.jsonl", [{"text": text} for text in texts])
    return folder


def run_of(root: Path, name: str, *, micro: int) -> RunDir:
    config = TrainConfig.model_validate(
        {
            "model": {"path": str(root / "model")},
            "data": {
                "path": str(root / "data.jsonl"),
                "seq_len": 128,
                "packing": True,
                "cache_dir": str(root / "cache"),
            },
            "train": {"global_batch_size": 4, "max_steps": 16, "learning_rate": 5e-3, "cuda_graph": "on"},
        }
    )
    return make_run(root / name, config, make_plan(config, micro=micro, device="cuda", precision="bf16"))


def losses(run: RunDir) -> list[float]:
    return values(train_here(run), "train.step", "loss")


@pytest.mark.parametrize("micro", [4, 2])
def test_batches_given_ahead_do_not_change_results(root: Path, micro: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does a retried step whose successor is already in place."""
    announced: list[StepBatches] = []
    expect, read = Stepper.expect, AsyncReadback.read
    reads = 0

    def expected(self: Stepper, batches: StepBatches, rate: float) -> None:
        announced.append(batches)
        expect(self, batches, rate)

    def nan_once(self: AsyncReadback) -> list[float]:
        nonlocal reads
        reads += 1
        loss, *others = read(self)
        return [torch.nan if reads == 10 else loss, *others]

    with monkeypatch.context() as patched:
        patched.setattr(Feed, "prefetched", lambda self, until: None)
        baseline = losses(run_of(root, f"late-{micro}", micro=micro))
    monkeypatch.setattr(Stepper, "expect", expected)
    assert losses(run_of(root, f"ahead-{micro}", micro=micro)) == pytest.approx(baseline, rel=1e-4)
    assert announced
    monkeypatch.setattr(AsyncReadback, "read", nan_once)
    assert losses(run_of(root, f"again-{micro}", micro=micro)) == pytest.approx(baseline, rel=1e-4)
    assert reads == len(baseline) + 1


def test_only_the_readback_syncs(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a step is captured; waiting for the readback's event is not a sync in that sense."""
    watched: list[str] = []

    def forbid_sync(name: str, is_captured: Callable[..., bool]) -> None:
        original = getattr(Stepper, name)

        def method(self: Stepper, *arguments: Any, **kwargs: Any) -> Any:
            if not is_captured(self, *arguments):
                return original(self, *arguments, **kwargs)
            watched.append(name)
            with no_waiting():
                return original(self, *arguments, **kwargs)

        monkeypatch.setattr(Stepper, name, method)

    def is_captured_shape(stepper: Stepper, batches: StepBatches) -> bool:
        assert stepper._graph is not None
        shapes = {shape for shape, _ in stepper._graph._captured}
        return all(_shape(batch) in shapes for batch in batches.micro_batches)

    def step_is_captured(stepper: Stepper, *_: Any) -> bool:
        return isinstance(stepper.optimizer, GraphAdamW) and stepper.optimizer.is_captured

    forbid_sync("begin", is_captured_shape)
    forbid_sync("expect", step_is_captured)
    forbid_sync("finish", step_is_captured)
    forbid_sync("apply", step_is_captured)
    train_here(run_of(root, "watched", micro=4))
    assert set(watched) == {"begin", "expect", "finish", "apply"}


def test_readback_returns_the_values_sent() -> None:
    readout = AsyncReadback(torch.device("cuda"))
    for count in (2, CAPACITY, 5 * CAPACITY, 3):
        numbers = torch.randn(count, dtype=torch.float64, device="cuda")
        busy = torch.randn(4096, 4096, device="cuda")
        with no_waiting():
            for _ in range(20):
                busy = busy @ busy.sign()
            readout.send(numbers * 2)
            numbers.zero_()  # queued after the copy
            assert not readout.has_arrived()
            actual = readout.read()
        assert readout.has_arrived()
        assert len(actual) == count
        assert all(value != 0 for value in actual)
