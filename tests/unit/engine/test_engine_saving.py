"""Runs with damaged checkpoints, failing disks, and changes since the last start."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pantheraml.base.errors import CheckpointError, DamagedCheckpointError, StorageError
from pantheraml.base.event_stream import EventWriter
from pantheraml.base.events import EventBase
from pantheraml.checkpoint.host_copy import HostCopies
from pantheraml.checkpoint.sharded_files import unsharded
from pantheraml.checkpoint.store import CheckpointStore
from pantheraml.engine.guard.watchdog import StopFlag
from pantheraml.engine.state.capture import RunProgress, capture, restore
from pantheraml.engine.step.step import Stepper
from pantheraml.parallel.process_group import open_world
from pantheraml.specs.run_dir import RunDir
from pantheraml.specs.train import TrainConfig
from pantheraml.worker.train import build_model, train_rank
from tests import toy
from tests.event_log import raw_events
from tests.harness import make_plan, make_run, merged, silent, train_here, values


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saving")
    toy.write_llama(folder / "model", num_hidden_layers=1)
    toy.write_jsonl(folder / "data.jsonl", toy.arithmetic(60))
    return folder


@pytest.fixture
def start(root: Path, tmp_path: Path) -> Callable[..., RunDir]:
    def make(name: str = "run", **changes: Any) -> RunDir:
        base = {
            "model": {"path": str(root / "model")},
            "data": {"path": str(root / "data.jsonl"), "seq_len": 48, "cache_dir": str(root / "cache")},
            "method": {"rank": 4, "dropout": 0.2},
            "train": {"global_batch_size": 4, "max_steps": 6, "learning_rate": 1e-2, "schedule": "constant"},
            "checkpoint": {"every_steps": 2, "keep": 3},
        }
        config = TrainConfig.model_validate(merged(base, changes))
        return make_run(tmp_path / name, config, make_plan(config, micro=2))

    return make


def flip(run: RunDir, step: int, file: str = "weights.safetensors") -> None:
    path = CheckpointStore(run.checkpoints).path(step) / file
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 16
    path.write_bytes(data)


def adapter(run: RunDir) -> bytes:
    return (run.path / "adapter" / "adapter_model.safetensors").read_bytes()


def change(run: RunDir, section: str, **fields: Any) -> None:
    config = run.config()
    run.write_config(config.model_copy(update={section: getattr(config, section).model_copy(update=fields)}))


def test_damaged_checkpoint_falls_back_to_the_previous_one(start: Callable[..., RunDir]) -> None:
    run = start()
    losses = values(train_here(run), "train.step", "loss")
    whole = adapter(run)
    shutil.rmtree(run.path / "adapter")
    flip(run, 6)
    flip(run, 4, "optimizer.safetensors")
    events = train_here(run)
    first, second = values(events, "warning", "message")
    assert "step-00000006 is damaged: weights.safetensors fails its checksum" in first
    assert "step-00000004 is damaged: optimizer.safetensors fails its checksum" in second
    assert "continues from step 2" in first
    assert values(events, "train.started", "first_step") == [1, 3]
    assert values(events, "train.step", "loss") == losses + losses[2:]
    assert adapter(run) == whole
    store = CheckpointStore(run.checkpoints)
    assert store.steps() == [2, 4, 6]
    assert store.load(6)
    assert {path.name for path in run.checkpoints.glob("damaged-*")} == {
        "damaged-step-00000004",
        "damaged-step-00000006",
    }


def test_run_with_only_damaged_checkpoints_raises(start: Callable[..., RunDir]) -> None:
    run = start()
    train_here(run)
    for step in (2, 4, 6):
        flip(run, step)
    with pytest.raises(DamagedCheckpointError, match=r"No checkpoint of this run is intact.*00000006.*0004.*0002"):
        train_here(run)
    assert CheckpointStore(run.checkpoints).steps() == [2, 4, 6], "they are left in place"


def test_background_saving_writes_the_same_checkpoints(start: Callable[..., RunDir]) -> None:
    beside, inline = start("beside"), start("inline", checkpoint={"background": False})
    runs_events = [train_here(run) for run in (beside, inline)]
    for events in runs_events:
        saved = [event for event in events if event["kind"] == "checkpoint.saved"]
        assert [event["step"] for event in saved] == [2, 4, 6]
    waits = [
        event["stall_seconds"] >= event["seconds"] for event in runs_events[1] if event["kind"] == "checkpoint.saved"
    ]
    assert all(waits), "without a thread training waits for the disk"
    assert adapter(beside) == adapter(inline)
    for step in (2, 4, 6):
        first, second = (CheckpointStore(run.checkpoints).load(step) for run in (beside, inline))
        assert first.state["config"]["checkpoint"].pop("background")
        assert not second.state["config"]["checkpoint"].pop("background")
        assert first.state == second.state
        for group in ("weights", "optimizer", "rng"):
            tensors, others = (checkpoint.tensors.read_group(group) for checkpoint in (first, second))
            assert tensors.keys() == others.keys() != set()
            for name, tensor in tensors.items():
                assert tensor.equal(others[name]), f"{group} {name} of step {step}"


def test_captured_state_is_a_snapshot(start: Callable[..., RunDir]) -> None:
    run = start()
    config, plan = run.config(), run.plan()
    with open_world(plan, timeout_seconds=60) as world:
        stepper = Stepper(build_model(config, plan, world, silent), config, world, plan).setup()
        groups, _ = capture(stepper, RunProgress(), {}, HostCopies(world.device))
        before = {name: part.values.clone() for name, part in groups["weights"].items()}
        with torch.no_grad():
            for _, parameter in stepper.parameters:
                parameter.add_(1)
    assert before
    assert all(groups["weights"][name].values.equal(tensor) for name, tensor in before.items())


@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit"])
def test_state_before_the_first_step_can_be_restored(start: Callable[..., RunDir], optimizer: str) -> None:
    run = start(train={"optimizer": optimizer}, method={"kind": "full"})
    config, plan = run.config(), run.plan()
    with open_world(plan, timeout_seconds=60) as world:
        stepper = Stepper(build_model(config, plan, world, silent), config, world, plan).setup()
        store = CheckpointStore(run.checkpoints)
        groups, state = capture(stepper, RunProgress(), {})
        store.save(0, groups, state)
        ends = []
        for _ in range(2):
            for number, (_, part) in enumerate(stepper.parts):
                part.grad = torch.full_like(part, 0.1 * number)
            stepper.optimizer.step()
            ends.append({name: part.detach().clone() for name, part in stepper.parts})
            restore(stepper, store.load(0), {})
        start_again = {name: part.values for name, part in capture(stepper, RunProgress(), {})[0]["weights"].items()}
    assert any(not part.equal(start_again[name]) for name, part in ends[0].items())
    for name, part in ends[0].items():
        assert part.equal(ends[1][name]), name


def train_with(run: RunDir, at_step: int, act: Callable[[], object], kind: str = "train.step") -> None:
    """Train, and call `act` at the first event of that kind and step."""
    awaited = kind
    with open_world(run.plan(), timeout_seconds=60) as world, EventWriter(run.path) as events:

        def emit(event: EventBase, /) -> None:
            kind, fields = event.kind, event.model_dump()
            events(event)
            if kind == awaited and fields["step"] == at_step:
                act()

        train_rank(run, run.config(), run.plan(), world, emit, StopFlag(run.stop_file))


def test_disk_failure_ends_the_run_and_keeps_saved_checkpoints(start: Callable[..., RunDir]) -> None:
    run = start(train={"max_steps": 50})

    def block() -> None:
        # Writing fails as on a read-only disk (permissions do not apply to root): a file blocks the temporary folder.
        (run.checkpoints / ".partial-step-00000004").write_text("")

    with pytest.raises(StorageError, match="Saving step-00000004 failed"):
        train_with(run, 2, block, kind="checkpoint.saved")
    steps = values(raw_events(run.path), "train.step", "step")
    assert 4 <= steps[-1] <= 6, "the failure shows at the next save at the latest"
    store = CheckpointStore(run.checkpoints)
    assert store.steps() == [2]
    assert store.load(2)


def test_removed_checkpoints_are_reported_and_saving_continues(start: Callable[..., RunDir]) -> None:
    run = start()
    train_with(run, 4, lambda: shutil.rmtree(run.checkpoints), kind="checkpoint.saved")
    assert CheckpointStore(run.checkpoints).steps() == [6]
    (message,) = values(raw_events(run.path), "warning", "message")
    assert "step 2, 4 were removed while the run was active" in message


def test_changed_data_is_rejected_unless_allowed(start: Callable[..., RunDir], tmp_path: Path) -> None:
    run = start(train={"max_steps": 2})
    train_here(run)
    toy.write_jsonl(tmp_path / "other.jsonl", toy.arithmetic(50))
    other = start("other", data={"path": str(tmp_path / "other.jsonl")})
    run.data_file.write_text(other.data_file.read_text())
    change(run, "train", max_steps=4)
    with pytest.raises(CheckpointError, match=r"data was '.*', is '.*'") as refused:
        train_here(run)
    assert "--allow-change data" in str(refused.value)
    change(run, "checkpoint", allow_change=["data"])
    events = train_here(run)
    assert values(events, "train.step", "step") == [1, 2, 3, 4]
    assert "although data was" in values(events, "warning", "message")[0]


def test_changed_library_version_is_reported(start: Callable[..., RunDir]) -> None:
    run = start(train={"max_steps": 2})
    train_here(run)
    store = CheckpointStore(run.checkpoints)
    saved = store.load(2)
    groups = {group: unsharded(saved.tensors.read_group(group)) for group in ("weights", "optimizer", "rng")}
    store.save(2, groups, {**saved.state, "versions": {**saved.state["versions"], "torch": "1.0"}})
    (message,) = [text for text in values(train_here(run), "notice", "message") if "last digits" in text]
    assert message.startswith("torch was 1.0, is ")


def test_evaluation_prevented_by_a_stop_runs_on_resume(start: Callable[..., RunDir]) -> None:
    settings: dict[str, Any] = {"data": {"eval_fraction": 0.2}, "train": {"eval_every_steps": 2}}
    straight, stopped = start("straight", **settings), start("stopped", **settings)
    expected = values(train_here(straight), "eval.done", "loss")
    assert len(expected) == 3
    train_with(stopped, 3, stopped.stop_file.touch)  # seen in step 4, after which an evaluation is due
    assert values(raw_events(stopped.path), "eval.done", "step") == [2]
    stopped.stop_file.unlink()
    assert values(train_here(stopped), "eval.done", "loss") == expected
    states = [
        json.loads((r.checkpoints / "step-00000006/state.json").read_text())["progress"] for r in (straight, stopped)
    ]
    assert states[0] == states[1]
    assert adapter(straight) == adapter(stopped)
