"""PantheraMLTrainer and its kin: equal to SFTTrainer, whole checkpoints, exact resume, events, and clear errors."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback, set_seed
from trl import SFTConfig, SFTTrainer

import pantheraml
from pantheraml import MultiGPUConfig
from pantheraml.base.errors import (
    CheckpointError,
    ConfigError,
    DamagedCheckpointError,
    NonFiniteError,
    OutOfMemoryError,
)
from pantheraml.base.event_stream import read_events
from pantheraml.base.events import (
    CheckpointRemoved,
    CheckpointSaved,
    ErrorRaised,
    EvalDone,
    RunFinished,
    TrainFinished,
    TrainStarted,
    TrainStep,
    VerdictReached,
)
from pantheraml.hooks.guard_callback import GuardCallback
from pantheraml.hooks.trainer_settings import say_if_rows_repeat
from pantheraml.readers.report import write_report
from pantheraml.readers.summary import summarize
from pantheraml.trainer import (
    PantheraMLDistributedTrainer,
    PantheraMLTrainer,
    UnslothTrainer,
    UnslothTrainingArguments,
)
from tests import toy
from tests.unit.api.trl_runs import fast_model, lora, plain_base
from tests.unit.models.conftest import TinyModel

STEPS = 6


@pytest.fixture(autouse=True)
def _trainers_write_to_the_environment() -> Iterator[None]:
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def folder(tiny_model: TinyModel) -> Path:
    return tiny_model("llama")


def config(output: Path, kind: Any = SFTConfig, **changes: Any) -> Any:
    settings: dict[str, Any] = {
        "max_steps": STEPS, "per_device_train_batch_size": 4, "learning_rate": 3e-3, "logging_steps": 1,
        "save_strategy": "no", "report_to": [], "disable_tqdm": True, "use_cpu": True, "bf16": False,
    }  # fmt: skip
    return kind(output_dir=str(output), **{**settings, **changes})


def made(
    kind: Any, folder: Path, output: Path, *, model: Any = None, by: str = "tokenizer", args: Any = None, **others: Any
) -> Any:
    set_seed(0)
    return kind(
        model=fast_model(folder) if model is None else model,
        args=config(output) if args is None else args,
        train_dataset=Dataset.from_list(toy.arithmetic(32)),
        **{by: AutoTokenizer.from_pretrained(folder)},
        **others,
    )


def weights(run: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in run.model.named_parameters() if value.requires_grad}


def dropout(folder: Path) -> Any:
    """A model whose training depends on the RNG."""
    import peft

    torch.manual_seed(3)
    return peft.get_peft_model(plain_base(folder), lora(lora_dropout=0.2))


def bad_gradient(run: Any, at: int) -> None:
    calls = [0]

    def inject(gradient: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        return gradient * torch.nan if calls[0] == at else gradient

    next(value for value in run.model.parameters() if value.requires_grad).register_hook(inject)


@pytest.mark.seed("S0-049", "S0-051", "S0-088", "S0-097", "S2-026", "S2-067")
@pytest.mark.parametrize("kind", [PantheraMLTrainer, PantheraMLDistributedTrainer, UnslothTrainer])
def test_swapping_the_class_changes_no_number(folder: Path, tmp_path: Path, kind: Any) -> None:
    args = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.05}
    ours = made(kind, folder, tmp_path, args=config(tmp_path / "a", **args))
    theirs = made(SFTTrainer, folder, tmp_path, by="processing_class", args=config(tmp_path / "b", **args))
    start = weights(ours)
    for run in (ours, theirs):
        run.train()
    expected = weights(theirs)
    for name, value in weights(ours).items():
        assert float((value - expected[name]).abs().max()) <= 1e-6, name
    assert max(float((expected[name] - start[name]).abs().max()) for name in expected) > 1e-3
    mine, other = ([e["loss"] for e in run.state.log_history if "loss" in e] for run in (ours, theirs))
    assert mine == pytest.approx(other, rel=1e-6)
    assert len(mine) == STEPS


@pytest.mark.seed("S0-027", "S0-043", "S0-063", "S0-089")
def test_names_are_exported_lazily() -> None:
    assert pantheraml.PantheraMLTrainer is PantheraMLTrainer
    assert pantheraml.UnslothTrainingArguments is UnslothTrainingArguments
    assert issubclass(pantheraml.PantheraMLDistributedTrainer, pantheraml.PantheraMLTrainer)


class Killed(Exception):
    pass


class KillAt(TrainerCallback):  # type: ignore[misc]  # transformers is not typed
    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self._step:
            raise Killed


@pytest.mark.seed("S0-048")
def test_killed_and_resumed_equals_uninterrupted(folder: Path, tmp_path: Path) -> None:
    """Bit for bit, with dropout, across an epoch's end, and with the guard's statistics."""
    args = {"max_steps": 12, "save_strategy": "steps", "save_steps": 2, "save_total_limit": 2}
    guard: dict[str, Any] = {"clipping": "adagc", "clip_warmup_steps": 1, "clip_growth": 0.5}
    straight = made(
        PantheraMLTrainer, folder, tmp_path, model=dropout(folder),
        args=config(tmp_path / "a", **args), callbacks=[GuardCallback(**guard)],
    )  # fmt: skip
    straight.train()
    killed = made(
        PantheraMLTrainer, folder, tmp_path, model=dropout(folder),
        args=config(tmp_path / "b", **args), callbacks=[GuardCallback(**guard), KillAt(9)],
    )  # fmt: skip
    with pytest.raises(Killed):
        killed.train()
    torn = tmp_path / "b" / "checkpoint-8" / "optimizer.pt"
    torn.write_bytes(torn.read_bytes()[:-1])  # so the newest one is not whole
    set_seed(77)
    resumed = made(
        PantheraMLTrainer, folder, tmp_path, model=dropout(folder),
        args=config(tmp_path / "b", **args), callbacks=[GuardCallback(**guard)],
    )  # fmt: skip
    resumed.train(resume_from_checkpoint=True)
    expected = weights(straight)
    assert all(torch.equal(value, expected[name]) for name, value in weights(resumed).items())
    losses = [event.loss for event in _steps(tmp_path / "a")]
    events = read_events(tmp_path / "b")
    second = max(i for i, event in enumerate(events) if isinstance(event, TrainStarted))
    assert events[second].first_step == 7  # type: ignore[attr-defined]
    assert [event.loss for event in events[second:] if isinstance(event, TrainStep)] == losses[6:]
    statuses = [event.status for event in events if isinstance(event, RunFinished)]
    assert statuses == ["failed", "succeeded"]
    assert {event.step for event in events if isinstance(event, CheckpointRemoved)} == {2, 4, 6, 8}


def _steps(output: Path) -> list[TrainStep]:
    return [event for event in read_events(output) if isinstance(event, TrainStep)]


def test_damaged_and_missing_checkpoints(folder: Path, tmp_path: Path) -> None:
    run = made(PantheraMLTrainer, folder, tmp_path)
    with pytest.raises(CheckpointError, match="no usable checkpoint"):
        run.train(resume_from_checkpoint=True)
    (tmp_path / "checkpoint-3").mkdir()
    with pytest.raises(DamagedCheckpointError, match="writing it was interrupted"):
        run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))


def test_resuming_with_another_batch_is_noticed(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made(
        PantheraMLTrainer, folder, tmp_path, args=config(tmp_path, max_steps=2, save_strategy="steps", save_steps=2)
    ).train()
    args = config(tmp_path, max_steps=3, per_device_train_batch_size=2)
    made(PantheraMLTrainer, folder, tmp_path, args=args).train(resume_from_checkpoint=True)
    assert "was written with a global batch of 4 rows, and it is 2 now" in caplog.text


@pytest.mark.parametrize(
    ("rows", "ranks", "drop", "said"), [(30, 2, False, 2), (32, 2, False, 0), (30, 2, True, 0), (30, 1, False, 0)]
)
def test_repeated_rows_are_told(rows: int, ranks: int, drop: bool, said: int, caplog: pytest.LogCaptureFixture) -> None:
    args = SimpleNamespace(train_batch_size=4, world_size=ranks, dataloader_drop_last=drop)
    say_if_rows_repeat(args, range(rows))
    assert ([f"repeats {said} rows" in record.message for record in caplog.records] == [True]) == (said > 0)


def test_events_are_those_of_a_run(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And say why a script that had relaunched itself continues as one process."""
    monkeypatch.setenv("PANTHERAML_FALLBACK", "2:rank 1 cannot use its device: it fell off the bus")
    args = config(tmp_path, save_strategy="steps", save_steps=3, eval_strategy="steps", eval_steps=6)
    run = made(
        PantheraMLTrainer, folder, tmp_path, args=args, eval_dataset=Dataset.from_list(toy.arithmetic(8, seed=1))
    )
    run.train()
    events = read_events(tmp_path)
    steps = _steps(tmp_path)
    assert [event.step for event in steps] == [1, 2, 3, 4, 5, 6]
    logged = [entry for entry in run.state.log_history if "loss" in entry]
    assert [event.loss for event in steps] == [entry["loss"] for entry in logged]
    assert sum(event.tokens for event in steps) == logged[-1]["num_tokens"]
    assert all(0 < event.target_tokens < event.tokens for event in steps), "prompts are no targets"
    assert [event.step for event in events if isinstance(event, CheckpointSaved)] == [3, 6]
    assert [event.step for event in events if isinstance(event, EvalDone)] == [6]
    assert isinstance(events[-1], RunFinished)
    summary = summarize(events)
    assert (summary["status"], summary["steps"], summary["world_size"]) == ("succeeded", 6, 1)
    assert summary["fallback_reason"] == "rank 1 cannot use its device: it fell off the bus"
    assert [event.stopped_by for event in events if isinstance(event, TrainFinished)] == ["end"]
    assert (tmp_path / "run.json").is_file()
    assert "succeeded" in write_report(tmp_path).read_text()
    assert not (tmp_path / "stacks").exists()


def test_bad_step_stops_by_default(folder: Path, tmp_path: Path) -> None:
    run = made(PantheraMLTrainer, folder, tmp_path)
    bad_gradient(run, at=3)
    with pytest.raises(NonFiniteError, match="stopped at step 3"):
        run.train()
    events = read_events(tmp_path)
    ((step, action),) = [(e.step, e.action) for e in events if isinstance(e, VerdictReached)]
    assert (step, action) == (3, "stop")
    (error,) = [event for event in events if isinstance(event, ErrorRaised)]
    assert error.error == "NonFiniteError"
    assert summarize(events)["status"] == "failed"


def test_own_guard_is_used(folder: Path, tmp_path: Path) -> None:
    guard = GuardCallback(on_nonfinite="skip")
    run = made(PantheraMLTrainer, folder, tmp_path, callbacks=[guard])
    bad_gradient(run, at=2)
    run.train()
    assert [(step, verdict.action) for step, verdict in guard.verdicts] == [(2, "skip")]
    assert [event.step for event in read_events(tmp_path) if isinstance(event, VerdictReached)] == [2]


@pytest.mark.seed("S0-106")
def test_out_of_memory_names_arguments_of_the_trainer(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = made(PantheraMLTrainer, folder, tmp_path)

    def allocate(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(run, "compute_loss", allocate)
    with pytest.raises(OutOfMemoryError, match=r"4 row\(s\) per pass: tried to allocate 2.00 GiB") as caught:
        run.train()
    assert "per_device_train_batch_size=2, gradient_accumulation_steps=2" in str(caught.value.fix)
    assert [e.error for e in read_events(tmp_path) if isinstance(e, ErrorRaised)] == ["OutOfMemoryError"]


def test_stuck_run_says_where(folder: Path, tmp_path: Path) -> None:
    import time

    def warnings() -> list[str]:
        return [event.message for event in read_events(tmp_path) if event.kind == "warning"]  # type: ignore[attr-defined]

    class WaitForWarning(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            deadline = time.monotonic() + 100
            while state.global_step == 2 and not warnings() and time.monotonic() < deadline:
                time.sleep(0.05)

    run = made(
        PantheraMLTrainer, folder, tmp_path, callbacks=[WaitForWarning()],
        args=config(tmp_path, max_steps=2), multi_gpu_config=MultiGPUConfig(timeout_seconds=1),
    )  # fmt: skip
    run.train()
    assert warnings()
    assert all("rank 0 has made no progress" in message for message in warnings())


def test_embedding_learning_rate(folder: Path, tmp_path: Path) -> None:
    import peft

    args = config(tmp_path, UnslothTrainingArguments, embedding_learning_rate=0.0, warmup_ratio=0.0, weight_decay=0.01)
    assert args.to_dict()["embedding_learning_rate"] == 0.0
    assert "embedding_learning_rate" in repr(args)
    model = peft.get_peft_model(plain_base(folder), lora(modules_to_save=["embed_tokens", "lm_head"]))
    run = made(UnslothTrainer, folder, tmp_path, model=model, args=args)
    start = weights(run)
    run.train()
    moved = {name for name, value in weights(run).items() if not torch.equal(value, start[name])}
    assert moved == {name for name in start if "lora_" in name}
    rates = {id(p): group["lr"] for group in run.create_optimizer().param_groups for p in group["params"]}
    assert len(rates) == len(start), "every trained weight has one group"


def test_embedding_learning_rate_with_a_schedule(folder: Path, tmp_path: Path) -> None:
    args = config(
        tmp_path, UnslothTrainingArguments, embedding_learning_rate=1e-4, lr_scheduler_type="linear", max_steps=4
    )
    model = plain_base(folder)
    run = made(UnslothTrainer, folder, tmp_path, model=model, args=args)
    run.create_optimizer_and_scheduler(4)
    run.optimizer.step()
    run.lr_scheduler.step()
    embedding = {id(model.get_input_embeddings().weight), id(model.get_output_embeddings().weight)}
    for group in run.optimizer.param_groups:
        expected = 1e-4 if {id(p) for p in group["params"]} & embedding else 3e-3
        assert group["lr"] == pytest.approx(expected * 3 / 4)


def test_bad_input(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no embedding is trained"):
        args = config(tmp_path, UnslothTrainingArguments, embedding_learning_rate=1e-4)
        made(UnslothTrainer, folder, tmp_path, args=args).create_optimizer()
    with pytest.raises(ConfigError, match="is negative"):
        config(tmp_path, UnslothTrainingArguments, embedding_learning_rate=-1.0)
    with pytest.raises(ConfigError, match="another processing_class"):
        made(PantheraMLTrainer, folder, tmp_path, processing_class=AutoTokenizer.from_pretrained(folder))
    for settings, message in (
        ({"mode": "hybrid"}, "mode='hybrid'"),
        ({"shard": 2}, "shard=2"),
        ({"use_gradient_checkpointing": "unsloth"}, "use_gradient_checkpointing='unsloth'"),
    ):
        with pytest.raises(ConfigError, match=message):
            made(PantheraMLTrainer, folder, tmp_path, multi_gpu_config=MultiGPUConfig(**settings))
    with pytest.raises(ConfigError, match="multi_gpu_config is a dict"):
        made(PantheraMLTrainer, folder, tmp_path, multi_gpu_config={"backend": "gloo"})


def test_old_arguments_of_any_model(folder: Path, tmp_path: Path) -> None:
    run = made(PantheraMLTrainer, folder, tmp_path, model=plain_base(folder), max_seq_length=8, packing=False)
    assert run.args.max_length == 8
    assert max(len(row["input_ids"]) for row in run.train_dataset) == 8


@pytest.mark.seed("S0-050", "S0-082")
def test_options_of_the_seed(folder: Path, tmp_path: Path) -> None:
    """`MultiGPUConfig` as the documents pass it."""
    gpus = MultiGPUConfig(
        backend="nccl", auto_device_map=True, use_gradient_checkpointing=True, find_unused_parameters=False
    )
    args = config(tmp_path, max_steps=1, gradient_checkpointing=False)
    run = made(PantheraMLDistributedTrainer, folder, tmp_path, args=args, multi_gpu_config=gpus)
    assert run.args.gradient_checkpointing
    assert run.train().global_step == 1


@pytest.mark.parametrize(("visible", "index", "sampled"), [("2", 0, [2]), ("3,0", 1, [0]), (None, 1, [1])])
def test_the_gpu_of_a_training_is_sampled_whatever_is_visible(
    host: Callable[[str], object], monkeypatch: pytest.MonkeyPatch, visible: str | None, index: int, sampled: list[int]
) -> None:
    host("1x4xH100-80GB")
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found: list[Any] = []
    trainer: Any = SimpleNamespace(
        args=SimpleNamespace(device=torch.device("cuda", index)), model=torch.nn.Linear(1, 1)
    )
    with PantheraMLTrainer._sample(trainer, found.append):
        pass
    assert [gpu.index for gpu in found[0].gpus] == sampled
