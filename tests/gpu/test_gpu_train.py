"""Training on a GPU: every method and precision learns, and agrees with the CPU."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pantheraml.base.env import child_environment
from pantheraml.base.errors import OutOfMemoryError
from pantheraml.base.event_stream import EventWriter
from pantheraml.engine.memory import headroom
from pantheraml.specs.run_dir import RunDir
from pantheraml.specs.train import TrainConfig
from pantheraml.worker.train import train_task
from tests import toy
from tests.e2e.conftest import Playground
from tests.harness import make_plan, make_run, merged, train_here, values

# torch.compile triggers warnings in torch, which would be errors here
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpu")
    toy.write_llama(folder / "model", hidden_size=128, intermediate_size=256)
    toy.write_jsonl(folder / "data.jsonl", toy.arithmetic(400))
    return folder


def prepared_run(root: Path, name: str, precision: str, device: Any = "cuda", **changes: dict[str, Any]) -> RunDir:
    base = {
        "model": {"path": str(root / "model")},
        "data": {"path": str(root / "data.jsonl"), "seq_len": 128, "cache_dir": str(root / "cache")},
        "train": {"global_batch_size": 8, "max_steps": 12, "learning_rate": 5e-3},
    }
    config = TrainConfig.model_validate(merged(base, changes))
    micro = min(4, config.train.global_batch_size)
    return make_run(root / name, config, make_plan(config, micro=micro, device=device, precision=precision))


@pytest.mark.parametrize(
    ("method", "precision"),
    [*itertools.product(["lora", "dora", "qlora", "full"], ["fp32", "bf16", "fp16"]), ("lora", "fp8")],
)
def test_every_method_learns_in_every_precision(root: Path, method: str, precision: str) -> None:
    run = prepared_run(root, f"{method}-{precision}", precision, method={"kind": method})
    events = train_here(run)
    losses = values(events, "train.step", "loss")
    assert losses[-1] < losses[0]
    assert 0 < max(values(events, "train.step", "memory_bytes")) < 8 << 30
    assert run.trained().is_dir()


def test_float32_on_the_gpu_agrees_with_the_cpu(root: Path) -> None:
    gpu = train_here(prepared_run(root, "on-gpu", "fp32"))
    cpu = train_here(prepared_run(root, "on-cpu", "fp32", device="cpu"))
    assert values(gpu, "train.step", "loss") == pytest.approx(values(cpu, "train.step", "loss"), rel=1e-3)


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_compiled_layers_give_the_same_losses(root: Path, precision: str) -> None:
    eager = train_here(prepared_run(root, f"eager-{precision}", precision))
    compiled = train_here(prepared_run(root, f"compiled-{precision}", precision, train={"compile": "on"}))
    assert values(compiled, "train.step", "loss") == pytest.approx(values(eager, "train.step", "loss"), rel=2e-2)


@pytest.mark.seed("S0-004", "S4-017")
def test_bf16_stays_near_float32(root: Path) -> None:
    wide = train_here(prepared_run(root, "wide", "fp32"))
    narrow = train_here(prepared_run(root, "narrow", "bf16"))
    assert values(narrow, "train.step", "loss") == pytest.approx(values(wide, "train.step", "loss"), rel=2e-2)


def test_8bit_adam_with_activation_checkpointing_learns_and_resumes(root: Path) -> None:
    train = {"optimizer": "adamw8bit", "activation_checkpointing": "full", "schedule": "constant"}
    changes = {"method": {"kind": "full"}, "train": train}
    run = prepared_run(root, "eight", "bf16", **changes)
    losses = values(train_here(run), "train.step", "loss")
    assert losses[-1] < losses[0]
    config = run.config()
    run.write_config(config.model_copy(update={"train": config.train.model_copy(update={"max_steps": 15})}))
    assert values(train_here(run), "train.step", "step") == list(range(1, 16))


@pytest.mark.seed("S4-124")
def test_out_of_memory_step_is_retried_with_smaller_micro_batches(root: Path) -> None:
    # 2**15 sequences of 1,024 tokens: their activations would take several hundred GiB
    changes = {"data": {"seq_len": 1024, "packing": True}, "train": {"global_batch_size": 2**15, "max_steps": 1}}
    run = prepared_run(root, "too-much", "fp32", **changes)
    plan = run.plan().model_copy(update={"micro_batch_size": 2**15})
    run.write_plan(plan)
    events = train_here(run)
    assert values(events, "train.step", "step") == [1]
    assert any("ran out of memory" in message for message in values(events, "warning", "message"))


def test_memory_is_measured_after_two_steps(root: Path) -> None:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()  # a run has a process of its own; a test before this one has filled the GPU
    (measured,) = (
        event for event in train_here(prepared_run(root, "measured", "bf16")) if event["kind"] == "memory.measured"
    )
    assert measured["step"] == 2
    assert 0 < measured["allocated_bytes"] <= measured["reserved_bytes"] < measured["device_bytes"]
    assert measured["device_bytes"] < measured["capacity_bytes"]
    assert measured["predicted_bytes"] is None, "this plan was not made by the planner"


def test_a_captured_step_is_captured_anew_with_smaller_micro_batches(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readings are simulated: a GPU that fills up would disturb other tests."""
    train = {"max_steps": 16, "cuda_graph": "on"}
    plain = train_here(prepared_run(root, "unfilled", "bf16", train=train))
    left = iter((0.08, 0.06, 0.04, 0.02))
    monkeypatch.setattr(headroom, "READ_EVERY", 1)
    monkeypatch.setattr(headroom, "share_left", lambda device, fraction: next(left, 0.5))
    changed = train_here(prepared_run(root, "filled", "bf16", train=train))
    (warning,) = (text for text in values(changed, "warning", "message") if text.startswith("memory that is left"))
    assert "2 sequences at a time from now on instead of 4" in warning
    assert values(changed, "train.step", "loss") == pytest.approx(values(plain, "train.step", "loss"), rel=2e-2)


@pytest.mark.seed("S4-120")
def test_running_out_of_memory_with_one_sequence_says_what_to_change(root: Path) -> None:
    changes = {"data": {"seq_len": 2**15, "packing": True}, "train": {"global_batch_size": 1, "max_steps": 1}}
    run = prepared_run(root, "too-long", "fp32", **changes)
    torch.cuda.empty_cache()
    everything = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(150 * 2**20 / everything)
    try:
        with EventWriter(run.path) as emit, pytest.raises(OutOfMemoryError) as err:
            train_task(run.path, emit)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert "train.activation_checkpointing=full" in str(err.value)
    assert "tried to allocate" in str(err.value)
    assert "activations" in str(err.value)


def test_the_command_line_finds_the_gpu_by_itself(root: Path) -> None:
    environment = child_environment(PANTHERAML_CACHE=str(root / "cache"), HF_HUB_OFFLINE="1")
    playground = Playground(root, environment)
    settings = ["--set", "data.seq_len=128", "--set", "train.max_steps=4"]
    ended = playground("train", "--model", playground.model, "--data", playground.data, "--output", "cli", *settings)
    assert ended.code == 0, ended.err
    assert "1 process on cuda, bf16 over frozen fp8 weights" in ended.err
    spoken = playground("generate", "cli", "--prompt", "1+2=", "--max-new-tokens", "4", "--json")
    assert spoken.code == 0, spoken.err


def test_a_profile_counts_each_kernel_once(root: Path) -> None:
    environment = child_environment(PANTHERAML_CACHE=str(root / "cache"), HF_HUB_OFFLINE="1")
    playground = Playground(root, environment)
    places = ["--model", playground.model, "--data", playground.data, "--set", "data.seq_len=128"]
    ended = playground("profile", *places, "--steps", "2", "--json")
    assert ended.code == 0, ended.err
    found = json.loads(ended.out)
    assert found["device"] == "cuda"
    kernels = sum(row["seconds"] for row in found["parts"])
    assert 0 < kernels < 1.05 * found["step_seconds"], "kernels of one stream, and phases that wait for them"
    assert not [row["name"] for row in found["operators"] if row["name"].startswith("Optimizer.")]


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_fused_layers_give_the_same_losses(root: Path, precision: str) -> None:
    plain = train_here(prepared_run(root, f"unfused-{precision}", precision, train={"fused": "off"}))
    fused = train_here(prepared_run(root, f"fused-{precision}", precision, train={"fused": "on"}))
    assert values(fused, "train.step", "loss") == pytest.approx(values(plain, "train.step", "loss"), rel=2e-2)


@pytest.mark.parametrize("checkpointing", ["none", "full", "selective"])
@pytest.mark.parametrize(("kind", "precision"), [("lora", "fp8"), ("lora", "bf16"), ("full", "bf16")])
def test_captured_steps_give_the_same_losses(root: Path, kind: str, precision: str, checkpointing: str) -> None:
    """Two micro-batches a step, documents of many lengths, and enough steps to capture all shapes."""
    losses = []
    for graph in ("off", "on"):
        fused = "on" if kind == "lora" else "off"
        train = {"cuda_graph": graph, "activation_checkpointing": checkpointing, "fused": fused}
        name = f"graph-{graph}-{kind}-{precision}-{checkpointing}"
        events = train_here(prepared_run(root, name, precision, method={"kind": kind}, train=train))
        losses.append(values(events, "train.step", "loss"))
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    assert losses[1][-1] < losses[1][0]


@pytest.mark.parametrize(("kind", "precision", "compiled"), [("lora", "fp8", "off"), ("full", "bf16", "on")])
def test_captured_step_of_one_batch_overwrites_gradients(root: Path, kind: str, precision: str, compiled: str) -> None:
    losses = []
    for graph in ("off", "on"):
        train = {
            "cuda_graph": graph,
            "compile": compiled,
            "fused": "on" if kind == "lora" else "off",
            "global_batch_size": 4,
            "max_steps": 12,
        }
        name = f"one-{graph}-{kind}"
        events = train_here(prepared_run(root, name, precision, method={"kind": kind}, train=train))
        losses.append(values(events, "train.step", "loss"))
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    assert losses[1][-1] < losses[1][0]
