"""Recorded steps on a real GPU: what is given to it ahead of time changes nothing, and the host waits in one place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pantheraml.engine.adamw_graph import GraphAdamW
from pantheraml.engine.feed import Feed, StepBatches
from pantheraml.engine.graph import _shape
from pantheraml.engine.readout import MOST, Readout
from pantheraml.engine.step import Stepper
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
    texts = [" ".join(sums[at : at + 20]) for at in range(0, len(sums), 20)]  # long ones: batches of few shapes
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
def test_what_is_given_ahead_changes_nothing(root: Path, micro: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does a step that is run again, when the next one's batch is in place already."""
    given: list[StepBatches] = []
    expect, read = Stepper.expect, Readout.read
    reads = 0

    def expected(self: Stepper, batches: StepBatches, rate: float) -> None:
        given.append(batches)
        expect(self, batches, rate)

    def spoilt(self: Readout) -> list[float]:
        nonlocal reads
        reads += 1
        loss, *others = read(self)
        return [torch.nan if reads == 10 else loss, *others]

    with monkeypatch.context() as patched:
        patched.setattr(Feed, "came_ahead", lambda self, until: None)
        late = losses(run_of(root, f"late-{micro}", micro=micro))
    monkeypatch.setattr(Stepper, "expect", expected)
    assert losses(run_of(root, f"ahead-{micro}", micro=micro)) == pytest.approx(late, rel=1e-4)
    assert given
    monkeypatch.setattr(Readout, "read", spoilt)
    assert losses(run_of(root, f"again-{micro}", micro=micro)) == pytest.approx(late, rel=1e-4)
    assert reads == len(late) + 1


def test_the_host_waits_for_nothing_but_the_numbers(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a step is recorded; the numbers' own event is no wait in that sense."""
    watched: list[str] = []

    def watch(name: str, is_recorded: Callable[..., bool]) -> None:
        original = getattr(Stepper, name)

        def method(self: Stepper, *arguments: Any, **named: Any) -> Any:
            if not is_recorded(self, *arguments):
                return original(self, *arguments, **named)
            watched.append(name)
            with no_waiting():
                return original(self, *arguments, **named)

        monkeypatch.setattr(Stepper, name, method)

    def knows(stepper: Stepper, batches: StepBatches) -> bool:
        assert stepper._graph is not None
        shapes = {shape for shape, _ in stepper._graph._recorded}
        return all(_shape(batch) in shapes for batch in batches.micro_batches)

    def steps_recorded(stepper: Stepper, *_: Any) -> bool:
        return isinstance(stepper.optimizer, GraphAdamW) and stepper.optimizer.is_recorded

    watch("begin", knows)
    watch("expect", steps_recorded)
    watch("finish", steps_recorded)
    watch("apply", steps_recorded)
    train_here(run_of(root, "watched", micro=4))
    assert set(watched) == {"begin", "expect", "finish", "apply"}


def test_numbers_arrive_as_they_were_sent() -> None:
    readout = Readout(torch.device("cuda"))
    for count in (2, MOST, 5 * MOST, 3):
        numbers = torch.randn(count, dtype=torch.float64, device="cuda")
        busy = torch.randn(4096, 4096, device="cuda")
        with no_waiting():
            for _ in range(20):
                busy = busy @ busy.sign()
            readout.send(numbers * 2)
            numbers.zero_()  # comes after them
            assert not readout.has_arrived()
            found = readout.read()
        assert readout.has_arrived()
        assert len(found) == count
        assert all(value != 0 for value in found)
