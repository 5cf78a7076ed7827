"""Bad steps are retried: transient faults do not change the result, persistent ones are reported as such."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pantheraml.base.events import EventBase
from pantheraml.data.dataset import TokenDataset
from pantheraml.data.prepare import prepare
from pantheraml.engine.guard.decide import StepJudge
from pantheraml.engine.guard.policy import Verdict
from pantheraml.engine.step.feed import Feed
from pantheraml.engine.step.step import Stepper
from pantheraml.models.loader import load_tokenizer
from pantheraml.parallel.process_group import World
from pantheraml.specs.faults import fail_at
from pantheraml.specs.run_dir import RunDir
from pantheraml.specs.train import TrainConfig
from pantheraml.worker.train import build_model
from tests import toy
from tests.harness import make_plan, make_run, merged, silent, train_here, values

ALONE = World(rank=0, size=1, device=torch.device("cpu"))
FLIPPED = 2.0**16
"""Factor by which a flipped exponent bit may change a value."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("judge")
    toy.write_llama(folder / "model")
    toy.write_jsonl(folder / "data.jsonl", toy.arithmetic(40))
    return folder


def config_of(root: Path, **changes: Any) -> TrainConfig:
    base = {
        "model": {"path": str(root / "model")},
        "data": {"path": str(root / "data.jsonl"), "seq_len": 64, "packing": False, "cache_dir": str(root / "cache")},
        "method": {"kind": "lora", "rank": 4, "dropout": 0.2},
        "train": {"global_batch_size": 4, "max_steps": 5, "learning_rate": 5e-3},
    }
    return TrainConfig.model_validate(merged(base, changes))


def run_of(root: Path, name: str, **changes: Any) -> RunDir:
    config = config_of(root, **changes)
    return make_run(root / name, config, make_plan(config, micro=2))


def same_adapter(one: RunDir, other: RunDir) -> bool:
    ours, theirs = (load_file(run.path / "adapter" / "adapter_model.safetensors") for run in (one, other))
    return ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_transient_faults_do_not_change_the_result(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stability = {"update_ratio_every": 1}
    faults = [fail_at(0, 2, "nan"), fail_at(0, 3, "bit_flip"), fail_at(0, 5, "nan")]
    disturbed = run_of(root, "disturbed", stability=stability)
    undisturbed = run_of(root, "undisturbed", stability=stability)
    expected = train_here(undisturbed)
    monkeypatch.setenv("PANTHERAML_FAULTS", ",".join(faults))
    events = train_here(disturbed)
    for field in ("loss", "grad_norm", "update_ratio"):
        assert values(events, "train.step", field) == values(expected, "train.step", field)
    assert same_adapter(disturbed, undisturbed)
    assert values(events, "verdict", "step") == [2, 3, 5]
    assert values(events, "verdict", "action") == ["retry"] * 3
    assert values(events, "verdict", "transient") == [True] * 3
    assert all(values(events, "verdict", "tensor")), "the suspect gradient is named"
    for path in values(events, "incident", "path"):
        written = json.loads((disturbed.path / path).read_text())
        assert not written["persistent"]
        assert written["findings"] == []
        assert written["first_numbers"]["grad_norm"] in ("nan", "inf")
        assert isinstance(written["numbers"]["grad_norm"], float)


class Steps:
    """Steps under a StepJudge, in this process, with optional corruption of one gradient."""

    def __init__(self, root: Path, loss_scale: float | None = None, **changes: Any) -> None:
        """With a `loss_scale`: in fp16."""
        config = config_of(root, **changes)
        plan = make_plan(config, micro=2, precision="fp32" if loss_scale is None else "fp16")
        torch.manual_seed(0)
        self.stepper = Stepper(build_model(config, plan, ALONE, silent), config, ALONE, plan).setup()
        self.stepper.model.train()
        if loss_scale is not None:
            self.stepper.scaler.scale(torch.ones(()))  # makes its tensors
            self.stepper.set_loss_scale(loss_scale)
        data = TokenDataset.open(prepare(config.data, tokenizer=load_tokenizer(config.model), emit=silent).train)
        self.feed = Feed(data, ALONE, seed=0, global_batch=4, micro_batch=2, limit=None)
        self.events: list[dict[str, Any]] = []
        self.run = RunDir(root)
        self.judge = StepJudge(self.stepper, self.run, self._hear, about={}, keeps=True)
        self.done = 0

    def _hear(self, event: EventBase, /) -> None:
        kind, fields = event.kind, event.model_dump()
        self.events.append({"kind": kind, **fields})

    def take(self, *, flips: int = 0, by: float = FLIPPED) -> Verdict:
        """Run one step; the gradients of its first `flips` passes are corrupted."""
        left = [flips * 2]  # a step is two micro-batches

        def flip(gradient: torch.Tensor) -> torch.Tensor:
            left[0] -= 1
            return gradient * by if left[0] >= 0 else gradient

        handle = self.stepper.parts[1][1].register_hook(flip)
        batches = self.feed.step(self.done)
        report = self.stepper.backward(batches, stop_requested=False)
        verdict, report = self.judge.judge(self.done + 1, batches, report, checkpoint=None)
        handle.remove()
        if verdict.action == "skip":
            self.stepper.skip()
        else:
            self.stepper.apply(report.numbers, 1e-2)
        self.done += 1
        return verdict

    def weights(self) -> torch.Tensor:
        return torch.cat([part.detach().flatten() for _, part in self.stepper.parts])


def test_gradient_norm_jump_is_retried(root: Path) -> None:
    disturbed = Steps(root)
    with disturbed.feed:
        assert all(disturbed.take(flips=flips).anomaly is None for flips in [0, 0, 0, 0, 0, 0, 1, 0])
    undisturbed = Steps(root)
    with undisturbed.feed:
        assert all(undisturbed.take().anomaly is None for _ in range(8))
    (verdict,) = [event for event in disturbed.events if event["kind"] == "verdict"]
    assert (verdict["anomaly"], verdict["transient"]) == ("jump", True)
    assert verdict["tensor"] == disturbed.stepper.parts[1][0], "the one whose gradient was disturbed"
    assert undisturbed.events == []
    assert torch.equal(disturbed.weights(), undisturbed.weights())


@pytest.mark.parametrize(("on_spike", "action"), [("detect", "step"), ("skip", "skip"), ("ignore", "step")])
def test_persistent_jump_is_handled_like_a_spike(root: Path, on_spike: str, action: str) -> None:
    steps = Steps(root, stability={"on_spike": on_spike})
    with steps.feed:
        for _ in range(6):
            steps.take()
        assert steps.take(flips=2).action == action
    told = [(event["action"], event["transient"]) for event in steps.events if event["kind"] == "verdict"]
    assert told == ([] if on_spike == "ignore" else [(action, False)])
    incidents = [event for event in steps.events if event["kind"] == "incident"]
    if on_spike == "ignore":
        assert incidents == []
        return
    (incident,) = incidents
    assert incident["tensor"] == steps.stepper.parts[1][0], "the one whose gradient was disturbed"
    assert incident["tensor"] in incident["finding"]
    written = json.loads((steps.run.path / incident["path"]).read_text())
    assert written["persistent"]
    assert written["findings"] == []
    assert sorted(incident["samples"]) == sorted(written["samples"]) == sorted(*written["rank_samples"])
    numbers = written["numbers"]
    assert written["rank_losses"] == [pytest.approx(numbers["loss_sums"][0] / numbers["target_tokens"])]
    assert (written["kept"] is None) == (action == "step"), "anomalies that are only detected are not bounded"


def test_persistent_anomaly_is_retried_only_once(root: Path) -> None:
    steps = Steps(root, stability={"on_nonfinite": "skip"})
    with steps.feed:
        assert [steps.take(flips=2, by=torch.nan).action for _ in range(2)] == ["skip", "skip"]
        assert steps.take().action == "step"
    assert [event["transient"] for event in steps.events if event["kind"] == "verdict"] == [False, None]


def test_fp16_overflow_loses_no_samples(root: Path) -> None:
    """The run ends like one that started with the reduced loss scale."""
    ends = []
    for scale in (2.0**40, 2.0**9):
        steps = Steps(root, loss_scale=scale)
        with steps.feed:
            assert [steps.take().action for _ in range(3)] == ["step"] * 3
        told = [(event["anomaly"], event["action"]) for event in steps.events if event["kind"] == "verdict"]
        assert set(told) <= {("overflow", "retry")}
        assert len(told) == (5 if scale > 2**16 else 0), "divided by 2, 4, 16, 256 and 65536"
        assert steps.stepper.loss_scale == 2**9
        ends.append(steps.weights())
    assert torch.equal(*ends)


def test_fp16_transient_fault_does_not_change_the_result(root: Path) -> None:
    disturbed = Steps(root, loss_scale=256.0)
    with disturbed.feed:
        assert [disturbed.take(flips=flips, by=torch.nan).action for flips in (0, 1, 0)] == ["step"] * 3
    undisturbed = Steps(root, loss_scale=256.0)
    with undisturbed.feed:
        assert [undisturbed.take().action for _ in range(3)] == ["step"] * 3
    (verdict,) = [event for event in disturbed.events if event["kind"] == "verdict"]
    assert (verdict["action"], verdict["transient"]) == ("retry", True)
    assert torch.equal(disturbed.weights(), undisturbed.weights())
    assert disturbed.stepper.loss_scale == 256.0


def test_fp16_nan_is_distinguished_from_overflow(root: Path) -> None:
    steps = Steps(root, loss_scale=256.0, stability={"on_nonfinite": "skip"})
    with steps.feed:
        assert steps.take(flips=100, by=torch.nan).action == "skip"
        assert steps.stepper.loss_scale == 256.0, "the loss scale was not the cause"
        assert steps.take().action == "step"
    told = [(event["anomaly"], event["action"]) for event in steps.events if event["kind"] == "verdict"]
    assert told == [("overflow", "retry")] * 4 + [("nonfinite", "skip")]
    assert [event["kind"] for event in steps.events][-1] == "incident"


def test_fp16_retry_unscales_gradients_once(root: Path) -> None:
    config = config_of(root)
    plan = make_plan(config, micro=2, precision="fp16")
    stepper = Stepper(build_model(config, plan, ALONE, silent), config, ALONE, plan).setup()
    data = TokenDataset.open(prepare(config.data, tokenizer=load_tokenizer(config.model), emit=silent).train)
    stepper.scaler.scale(torch.ones(()))  # makes its tensors
    stepper.scaler.update(8.0)
    with Feed(data, ALONE, seed=0, global_batch=4, micro_batch=2, limit=None) as feed:
        batches = feed.step(0)
    first = stepper.backward(batches, stop_requested=False)
    second = stepper.backward_again(batches, first)
    assert second.numbers == first.numbers
    assert stepper.scaler.get_scale() == 8.0
