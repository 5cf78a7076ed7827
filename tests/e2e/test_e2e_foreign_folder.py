"""Commands in a folder that somebody else has made, with a model in it and modules named like those that we import."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import Ended, Playground, result_of

COMMAND = str(Path(sys.executable).with_name("pantheraml"))
NAMES = ("peft", "torch", "transformers", "safetensors", "json", "yaml", "pydantic", "psutil", "numpy", "argparse")
CODE = "open(__file__ + '.ran', 'w').close()\nraise ImportError('this is not the module that was meant')\n"

SCRIPT = """
import os
from pantheraml import enable_multi_gpu
import beside

enable_multi_gpu(2)
os.write(1, f"{beside.WORD} {os.environ.get('PYTHONSAFEPATH')} {os.environ.get('OWN_API_KEY')}\\n".encode())
"""


@pytest.fixture
def folder(playground: Playground) -> Path:
    made = playground.root / "foreign"
    shutil.copytree(playground.model, made)
    for name in NAMES:
        (made / f"{name}.py").write_text(CODE)
    return made


def run(playground: Playground, folder: Path, *words: str) -> Ended:
    process = subprocess.Popen(
        words, cwd=folder, env=playground.environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    playground.started.append(process)
    return result_of(process)


@pytest.mark.extended
def test_nothing_of_the_folder_runs(playground: Playground, folder: Path) -> None:
    sizes = ("data.seq_len=64", "train.global_batch_size=4", "train.max_steps=2")
    options = [word for size in sizes for word in ("--set", size)]
    inputs = ["--model", ".", "--data", playground.data, "--device", "cpu", "--nproc", "2", *options]
    for words in (
        ["plan", *inputs],
        ["train", *inputs, "--output", "../runs/foreign"],
        ["generate", "../runs/foreign", "--prompt", "1+1", "--max-new-tokens", "2"],
    ):
        ended = run(playground, folder, COMMAND, *words)
        assert ended.code == 0, ended
        assert not list(folder.glob("*.ran")), words[0]


def test_a_script_of_the_users_still_imports_what_is_beside_it(playground: Playground) -> None:
    """Its ranks start as the script was started, with all of its environment."""
    home = playground.root / "own"
    home.mkdir()
    (home / "beside.py").write_text("WORD = 'beside'")
    (home / "script.py").write_text(SCRIPT)
    ended = run(playground, playground.root, "env", "OWN_API_KEY=mine", sys.executable, str(home / "script.py"))
    assert ended.code == 0, ended
    assert ended.out.splitlines() == ["beside None mine"] * 2
