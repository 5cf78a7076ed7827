"""Bad input: one clear error, the exit code of its class, nothing lost, never a traceback."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pantheraml.base.errors import WorkerKilledError
from pantheraml.base.events import read_events
from pantheraml.checkpoint.store import CheckpointStore
from tests import toy
from tests.e2e.conftest import Playground, workers_of

Failing = Callable[..., str]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "empty"),
        (b'{"prompt": "a", "completion": "b"}\n{"prompt": "a", "compl', "line 2"),
        (b'{"prompt": "a", "completion": "b"}\n{"prompt": "\xff\xfe", "completion": "b"}\n', "UTF-8"),
        (b'{"prompt": "a", "completion": "b"}\n{"prompt": "a", "completion": 7}\n', "completion"),
        (b'{"question": "a", "reply": "b"}\n', "question"),
    ],
    ids=["empty", "not JSON", "encoding", "wrong type", "no usable column"],
)
def test_data_that_cannot_be_used(failing: Failing, tmp_path: Path, content: bytes, expected: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content)
    said = failing(3, data=str(path))
    assert expected in said
    assert "bad.jsonl" in said


def test_data_that_is_not_there(failing: Failing) -> None:
    assert "nowhere.jsonl" in failing(3, data="nowhere.jsonl")


def test_bad_rows_can_be_skipped_and_are_counted(playground: Playground, tmp_path: Path) -> None:
    path = toy.write_jsonl(
        tmp_path / "some.jsonl", [*toy.arithmetic(50), {"prompt": "x"}, {"prompt": "y", "completion": 3}]
    )
    ended = playground.train("runs/skipping", "--on-bad-row", "skip", "--set", "train.max_steps=1", data=str(path))
    assert ended.code == 0, ended
    (ready,) = [e for e in read_events(playground.root / "runs/skipping") if e["kind"] == "data.ready"]
    assert (ready["rows"], ready["skipped_rows"]) == (50, 2)


def test_rows_that_are_too_long(playground: Playground, failing: Failing, tmp_path: Path) -> None:
    long = {"prompt": "1+" * 100, "completion": "9" * 200}
    path = toy.write_jsonl(
        tmp_path / "long.jsonl", [*[*toy.arithmetic(20), {"text": "x"}][:20], {**long, "prompt": "1="}]
    )
    assert "64" in failing(3, "--set", "data.on_long_row=stop", data=str(path))
    ended = playground.train("runs/cut", "--set", "train.max_steps=1", data=str(path))
    assert ended.code == 0, ended
    (ready,) = [e for e in read_events(playground.root / "runs/cut") if e["kind"] == "data.ready"]
    assert ready["truncated_rows"] == 1


def test_a_tokenizer_without_chat_template(playground: Playground, failing: Failing, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(playground.model, model)
    toy.write_tokenizer(model)
    (model / "chat_template.jinja").unlink(missing_ok=True)
    rows = [{"messages": [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]}] * 8
    path = toy.write_jsonl(tmp_path / "chat.jsonl", rows)
    assert "chat template" in failing(4, "--model", str(model), data=str(path))


def test_a_tokenizer_without_pad_token_trains_all_the_same(playground: Playground, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(playground.model, model)
    toy.write_tokenizer(model, pad=False)
    ended = playground.train(
        "runs/nopad", "--model", str(model), "--set", "train.max_steps=1", "--set", "data.packing=false"
    )
    assert ended.code == 0, ended


def test_a_model_folder_without_weights(playground: Playground, failing: Failing, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(playground.model, model)
    (model / "model.safetensors").unlink()
    assert "weights" in failing(4, "--model", str(model))


def test_a_hub_name_where_no_hub_can_be_reached(failing: Failing) -> None:
    said = failing(4, "--model", "some-owner/some-model")
    assert "some-owner/some-model" in said


def test_more_processes_than_there_are(failing: Failing) -> None:
    assert "512 processes" in failing(5, "--nproc", "512", "--set", "train.global_batch_size=600")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_cuda_without_a_gpu(playground: Playground) -> None:
    ended = playground("train", "--model", playground.model, "--data", playground.data, "--device", "cuda")
    assert ended.code == 5
    assert "no usable GPU" in ended.err


def test_a_typing_error_on_the_command_line(playground: Playground) -> None:
    ended = playground("train", "--model", playground.model, "--data", playground.data, "--set", "train.max_step=3")
    assert ended.code == 2
    assert "Did you mean `train.max_steps`?" in ended.err
    assert playground("train", "--modle", "x").code == 2
    assert playground("nonsense").code == 2
    assert playground("generate", "runs/absent", "--prompt", "x").code == 9


def test_nan_stops_the_run_which_never_reports_success(playground: Playground, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(playground.model, model)
    weights = load_file(model / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][0, 0] = math.nan
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    ended = playground.train("runs/nan", "--model", str(model), "--set", "train.max_steps=3")
    assert ended.code == 18, ended
    assert "Traceback" not in ended.err
    result = json.loads((playground.root / "runs/nan/run.json").read_text())
    assert result["status"] == "failed"
    assert result["error"]["class"] == "NonFiniteError"
    assert not (playground.root / "runs/nan/adapter").exists()
    (verdict,) = [e for e in read_events(playground.root / "runs/nan") if e["kind"] == "verdict"]
    assert verdict["action"] == "stop"
    assert verdict["ranks"] == [0]
    assert len(verdict["samples"]) == 4
    skipping = playground.train(
        "runs/nan2", "--model", str(model), "--set", "train.max_steps=9",
        "--set", "stability.on_nonfinite=skip", "--set", "stability.max_skipped_steps=2",
    )  # fmt: skip
    assert skipping.code == 18
    actions = [e["action"] for e in read_events(playground.root / "runs/nan2") if e["kind"] == "verdict"]
    assert actions == ["skip", "skip", "stop"]


def test_weights_that_became_nan_are_never_saved(playground: Playground) -> None:
    settings = ["--method", "full", "--set", "train.max_steps=1", "--set", "train.learning_rate=1e38"]
    ended = playground.train("runs/exploded", *settings, "--set", "train.max_grad_norm=0")
    assert ended.code == 18, ended
    assert "they are not saved" in ended.err
    assert not (playground.root / "runs/exploded/model").exists()
    assert json.loads((playground.root / "runs/exploded/run.json").read_text())["status"] == "failed"


def test_a_worker_that_dies_without_a_word_is_explained(playground: Playground) -> None:
    once = ["--set", "train.max_steps=100000", "--set", "parallel.max_retries=0"]
    process = playground.start_training("runs/dead", "--nproc", "2", *once)
    playground.wait_for_steps("runs/dead")
    worker = workers_of(process.pid)[0]
    worker.kill()
    _, err = process.communicate(timeout=60)
    assert process.returncode == WorkerKilledError.exit_code, err
    assert "SIGKILL" in err
    assert "Traceback" not in err
    result = json.loads((playground.root / "runs/dead/run.json").read_text())
    assert result["status"] == "crashed"
    assert result["error"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 3 MiB."""
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "none", str(place)]
    if os.geteuid() != 0 or subprocess.run(mount, check=False).returncode:
        pytest.skip("mounting needs root")
    yield place
    subprocess.run(["umount", place], check=True)


def test_a_full_disk_while_saving_leaves_older_checkpoints_whole(playground: Playground, small_disk: Path) -> None:
    output = small_disk / "run"
    settings = ["--method", "full", "--set", "train.max_steps=12", "--set", "checkpoint.every_steps=1"]
    ended = playground.train(str(output), *settings, "--set", "checkpoint.keep=9")
    assert ended.code == 17, ended
    assert "Traceback" not in ended.err
    assert "the disk is full" in ended.err
    store = CheckpointStore(output / "checkpoints")
    whole = store.steps()
    assert whole
    assert whole[-1] < 12
    for step in whole:
        store.load(step)
    subprocess.run(["mount", "-o", "remount,size=64m", small_disk], check=True)
    resumed = playground("resume", str(output))
    assert resumed.code == 0, resumed
    assert json.loads((output / "run.json").read_text())["steps"] == 12
