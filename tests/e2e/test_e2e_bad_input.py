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

from pantheraml.checkpoint.store import CheckpointStore
from tests.e2e.conftest import Playground
from tests.event_log import raw_events

Failing = Callable[..., str]


def test_data_that_cannot_be_used(failing: Failing, tmp_path: Path) -> None:
    """One of many ways; the others are in tests/unit. Rank 0 reads it for both, and its error is that of the run."""
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt": "a", "completion": "b"}\n{"prompt": "a", "compl')
    said = failing(3, "--nproc", "2", data=str(path))
    assert "line 2" in said
    assert "bad.jsonl" in said


def test_a_model_folder_without_weights(playground: Playground, failing: Failing, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(playground.model, model)
    (model / "model.safetensors").unlink()
    assert "weights" in failing(4, "--model", str(model))


def test_rows_longer_than_the_model_knows_positions(failing: Failing, tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"text": "a long row " * 100}) + "\n")
    said = failing(4, "--set", "data.seq_len=2048", data=str(path))
    assert "positions" in said
    assert "data.seq_len=256" in said


def test_more_processes_than_there_are(failing: Failing) -> None:
    assert "512 processes" in failing(5, "--nproc", "512", "--set", "train.global_batch_size=600")


@pytest.mark.seed("S0-084", "S2-060", "S2-077", "S4-125", "S4-126")
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
    (verdict,) = [e for e in raw_events(playground.root / "runs/nan") if e["kind"] == "verdict"]
    assert verdict["action"] == "stop"
    assert verdict["ranks"] == [0]
    assert len(verdict["samples"]) == 4


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


@pytest.mark.extended
def test_a_full_disk_while_saving_leaves_older_checkpoints_whole(playground: Playground, small_disk: Path) -> None:
    output = small_disk / "run"
    # Not in the background: an event that is written at the same time would be the one that finds no room.
    settings = ["checkpoint.every_steps=1", "checkpoint.keep=9", "checkpoint.background=false", "train.max_steps=12"]
    given = [part for setting in settings for part in ("--set", setting)]
    ended = playground.train(str(output), "--method", "full", *given)
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
