"""`pantheraml quantize` as users run it. docs/quickstart.md, which is tested, trains on its output."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.e2e.conftest import Playground, result_of, wait_until

pytestmark = pytest.mark.extended


def test_it_says_what_it_did(playground: Playground, tmp_path: Path) -> None:
    inputs = ["--model", playground.model, "--data", playground.data, "--device", "cpu", "--set", "data.seq_len=64"]
    ended = playground("quantize", *inputs, "--tokens", "600", "--output", str(tmp_path / "nf4"), "--json")
    assert ended.code == 0, ended
    done = json.loads(ended.out)
    assert done["output"] == str(tmp_path / "nf4")
    assert done["layers"] == 14
    assert 500 < done["tokens"] <= 640
    assert 0.1 < done["left"] < 0.8
    assert (tmp_path / "nf4" / "model.safetensors.index.json").is_file()
    again = playground("quantize", *inputs, "--output", str(tmp_path / "nf4"))
    assert again.code == 9
    assert "not an empty folder" in again.err
    assert "train data" not in again.err, "before anything is prepared"


def test_it_leaves_nothing_when_it_is_stopped(playground: Playground, tmp_path: Path) -> None:
    inputs = ["--model", playground.model, "--data", playground.data, "--device", "cpu", "--set", "data.seq_len=64"]
    running = playground.start("quantize", *inputs, "--output", str(tmp_path / "nf4"))
    wait_until(lambda: list(tmp_path.iterdir()), pause=0.002)  # it has begun to write
    running.send_signal(signal.SIGINT)
    ended = result_of(running)
    assert ended.code == 130, ended
    assert "Stopped on request" in ended.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--model", "model"], "Nothing to quantize: pass a config file, or --model and --data."),
        (["--model", "model", "--data", "data.jsonl", "--tokens", "0"], "--tokens 0 must be at least 1."),
        (
            ["--model", "model", "--data", "d", "--set", "model.init=random", "--set", "method.kind=full"],
            "model.init=random has no weights to quantize.",
        ),
    ],
)
def test_invalid_options_are_refused(playground: Playground, options: list[str], expected: str) -> None:
    ended = playground("quantize", *options, "--output", "nowhere")
    assert ended.code == 2
    assert expected in ended.err
    assert "Traceback" not in ended.err
    assert not (playground.root / "nowhere").exists()
