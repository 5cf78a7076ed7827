"""The command line on a real GPU: every method and precision learns, and agrees with the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pantheraml.base.env import child_environment
from pantheraml.base.events import read_events
from tests import toy
from tests.e2e.conftest import Playground


@pytest.fixture(scope="module")
def gpu_playground(tmp_path_factory: pytest.TempPathFactory) -> Playground:
    root = tmp_path_factory.mktemp("gpu")
    toy.write_llama(root / "model", hidden_size=128, intermediate_size=256)
    toy.write_jsonl(root / "data.jsonl", toy.arithmetic(400))
    environment = child_environment(PANTHERAML_CACHE=str(root / "cache"), HF_HUB_OFFLINE="1")
    return Playground(root, environment)


def train(playground: Playground, name: str, device: str, *settings: str) -> list[dict[str, Any]]:
    fixed = ["--model", playground.model, "--data", playground.data, "--output", name, "--device", device]
    words = [word for setting in settings for word in ("--set", setting)]
    common = ["data.seq_len=128", "train.global_batch_size=8", "train.max_steps=12", "train.learning_rate=5e-3"]
    ended = playground("train", *fixed, *(w for c in common for w in ("--set", c)), *words)
    assert ended.code == 0, ended.err
    return read_events(playground.root / name)


def losses(events: list[dict[str, Any]]) -> list[float]:
    return [event["loss"] for event in events if event["kind"] == "train.step"]


@pytest.mark.parametrize("method", ["lora", "dora", "qlora", "full"])
@pytest.mark.parametrize("precision", ["auto", "fp16"])
def test_every_method_learns(gpu_playground: Playground, method: str, precision: str) -> None:
    name = f"{method}-{precision}"
    events = train(gpu_playground, name, "cuda", f"method.kind={method}", f"model.precision={precision}")
    curve = losses(events)
    assert curve[-1] < curve[0]
    ready = next(event for event in events if event["kind"] == "model.ready")
    assert ready["precision"] == ("bf16" if precision == "auto" else "fp16")
    memory = [event["memory_bytes"] for event in events if event["kind"] == "train.step"]
    assert 0 < max(memory) < 8 << 30
    spoken = gpu_playground("generate", name, "--prompt", "1+2=", "--max-new-tokens", "4", "--json")
    assert spoken.code == 0, spoken.err


def test_float32_on_the_gpu_agrees_with_the_cpu(gpu_playground: Playground) -> None:
    gpu = losses(train(gpu_playground, "gpu32", "cuda", "model.precision=fp32"))
    cpu = losses(train(gpu_playground, "cpu32", "cpu", "model.precision=fp32"))
    assert gpu == pytest.approx(cpu, rel=1e-3)


def test_bf16_stays_near_float32(gpu_playground: Playground) -> None:
    wide = losses(train(gpu_playground, "wide", "cuda", "model.precision=fp32"))
    narrow = losses(train(gpu_playground, "narrow", "cuda", "model.precision=bf16"))
    assert narrow == pytest.approx(wide, rel=2e-2)


def test_8bit_adam_and_checkpointing_run_and_resume(gpu_playground: Playground) -> None:
    settings = ["train.optimizer=adamw8bit", "train.activation_checkpointing=full", "method.kind=full"]
    events = train(gpu_playground, "eight", "cuda", *settings, "checkpoint.every_steps=6")
    assert losses(events)[-1] < losses(events)[0]
    resumed = gpu_playground("resume", "eight", "--json")
    assert resumed.code == 0, resumed.err
    assert json.loads(resumed.out)["steps"] == 12


def test_running_out_of_memory_says_what_to_change(gpu_playground: Playground, tmp_path: Path) -> None:
    long = toy.write_jsonl(tmp_path / "long.jsonl", toy.arithmetic(60000))
    # float32 activations of 4096 x 2048 tokens and the MLP's intermediate values do not fit into any GPU of today
    ended = gpu_playground(
        "train", "--model", gpu_playground.model, "--data", str(long), "--output", "oom", "--device", "cuda",
        "--set", "data.seq_len=256", "--set", "train.global_batch_size=60000", "--set", "train.micro_batch_size=60000",
        "--set", "train.epochs=100", "--set", "model.precision=fp32",
    )  # fmt: skip
    assert ended.code == 15, ended.err
    assert "train.micro_batch_size=30000" in ended.err
    assert "Traceback" not in ended.err
