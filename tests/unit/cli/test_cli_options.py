"""The command line is a promise: this pins it, so that it neither grows nor shrinks by accident."""

from __future__ import annotations

import argparse
import subprocess
import sys

import pytest

from pantheraml.cli.main import build_parser, main

COMMON = ["--debug", "--help"]
INPUTS = ["--data", "--device", "--model", "--on-bad-row", "--set", "config"]
CONFIG = [*INPUTS, "--eval-data", "--method", "--nproc"]
OPTIONS = {
    "demo": ["--output"],
    "train": [
        *CONFIG,
        "--allow-change",
        "--json",
        "--nnodes",
        "--node-rank",
        "--output",
        "--overwrite",
        "--rdzv",
        "--resume",
    ],
    "resume": ["--allow-change", "--json", "--nnodes", "--node-rank", "--nproc", "--rdzv", "--set", "run_dir"],
    "plan": [*CONFIG, "--json"],
    "verify": ["--config", "--device", "--json", "--modes", "--nproc", "--steps"],
    "replay": ["--device", "--json", "incident"],
    "generate": [
        "--base",
        "--device",
        "--json",
        "--max-new-tokens",
        "--prompt",
        "--prompts",
        "--seed",
        "--temperature",
        "run_dir",
    ],
    "export": ["--json", "--merge", "--output", "--precision", "run_dir"],
    "quantise": [*INPUTS, "--json", "--output", "--tokens"],
    "gpus": ["--json"],
    "schema": [],
    "bench": [
        "--again",
        "--commit",
        "--device",
        "--extras",
        "--json",
        "--list",
        "--minutes",
        "--only",
        "--peers",
        "--results",
        "--resume",
        "--suite",
        "--work",
    ],
}


def commands() -> dict[str, argparse.ArgumentParser]:
    (found,) = [a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction)]
    return dict(found.choices)


def test_the_commands_are_these() -> None:
    assert list(commands()) == [
        "demo",
        "train",
        "resume",
        "plan",
        "verify",
        "replay",
        "generate",
        "export",
        "quantise",
        "gpus",
        "schema",
        "bench",
    ]


@pytest.mark.parametrize("name", OPTIONS)
def test_the_options_are_these(name: str) -> None:
    actions = commands()[name]._actions
    names = [a.option_strings[-1] if a.option_strings else a.dest for a in actions]
    assert sorted(names) == sorted([*OPTIONS[name], *COMMON])
    assert all(a.help for a in actions), "every option says what it does"


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from pantheraml.cli.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'peft', 'pyarrow', 'plotly', 'numpy', 'rich'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import sys, pantheraml; assert not {'torch', 'transformers'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=200, check=False).returncode == 0


def test_errors_are_text_and_an_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train"]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("ConfigError: Nothing to train")
    assert "Traceback" not in captured.err
    assert main(["train", "--resume", "--overwrite", "--model", "m", "--data", "d"]) == 2
    assert main(["train", "--nproc", "zero", "--model", "m", "--data", "d"]) == 2
    assert main([]) == 2
    assert main(["--version"]) == 0


def test_plan_gives_a_reason_for_every_choice(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "m", "--data", "d", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "parallel.world_size" in out
    assert "one process uses all" in out


def test_schema_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    import json

    assert main(["schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert set(schema["properties"]) >= {"model", "data", "method", "train", "parallel", "stability", "checkpoint"}
