"""Pins commands and options, so that the command line does not change by accident."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from pantheraml.cli.main import build_parser, main

COMMON = ["--debug", "--help"]
INPUTS = ["--data", "--device", "--model", "--on-bad-row", "--set", "config"]
CONFIG = [*INPUTS, "--eval-data", "--method", "--nproc"]
CONSENT = ["--allow-pickle", "--trust-remote-code"]
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
        "--plan",
        "--rdzv",
        "--resume",
    ],
    "resume": [
        *CONSENT,
        "--allow-change",
        "--json",
        "--nnodes",
        "--node-rank",
        "--nproc",
        "--rdzv",
        "--set",
        "run_dir",
    ],
    "plan": [*CONFIG, "--explain", "--gpus", "--json", "--price"],
    "profile": [*CONFIG, "--json", "--steps", "--trace", "--warmup"],
    "verify": ["--config", "--device", "--json", "--modes", "--nproc", "--steps"],
    "replay": [*CONSENT, "--device", "--json", "incident"],
    "generate": [
        *CONSENT,
        "--base",
        "--device",
        "--json",
        "--max-new-tokens",
        "--nproc",
        "--prompt",
        "--prompts",
        "--seed",
        "--temperature",
        "run_dir",
    ],
    "watch": ["--json", "run_dir"],
    "report": ["--json", "--output", "run_dir"],
    "compare": ["--html", "--json", "runs"],
    "export": [*CONSENT, "--base", "--gguf", "--json", "--merge", "--output", "--precision", "run_dir"],
    "quantize": [*INPUTS, "--json", "--output", "--tokens"],
    "serve": [
        *("--allow-host", "--cpu-slots", "--data-dir", "--database-url"),
        *("--host", "--insecure", "--jobs-per-gpu", "--max-file-gib", "--max-hours-per-user", "--max-running-per-user"),
        *("--max-user-gib", "--models-dir", "--port"),
        *("--keep-days", "--open-metrics", "--price-per-gpu-hour", "--requests-per-minute", "--stall-seconds"),
        *("--allow-private-webhooks", "--chat-idle-seconds", "--inference-url", "--standby"),
    ],
    "jobs": ["action"],
    "keys": ["action"],
    "doctor": ["--json"],
    "gpus": ["--json", "--watch"],
    "schema": ["--events"],
    "import-config": ["--from", "--json", "--output", "file"],
    "bench": [
        "--calibrate",
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


def test_commands_are_pinned() -> None:
    assert list(commands()) == [
        "demo",
        "train",
        "resume",
        "plan",
        "profile",
        "verify",
        "replay",
        "generate",
        "watch",
        "report",
        "compare",
        "export",
        "quantize",
        "serve",
        "jobs",
        "keys",
        "doctor",
        "gpus",
        "schema",
        "import-config",
        "bench",
    ]


@pytest.mark.parametrize("name", OPTIONS)
def test_options_are_pinned(name: str) -> None:
    actions = commands()[name]._actions
    names = [a.option_strings[-1] if a.option_strings else a.dest for a in actions]
    assert sorted(names) == sorted([*OPTIONS[name], *COMMON])
    assert all(a.help for a in actions), "every option has a help text"


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


def test_errors_print_a_message_and_return_an_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train"]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("ConfigError: Nothing to train")
    assert "Traceback" not in captured.err
    assert main(["train", "--resume", "--overwrite", "--model", "m", "--data", "d"]) == 2
    assert main(["train", "--nproc", "zero", "--model", "m", "--data", "d"]) == 2
    assert main([]) == 2
    assert main(["--version"]) == 0


@pytest.mark.parametrize(
    "options", [["--temperature", "nan"], ["--temperature", "-1"], ["--max-new-tokens", "0"], ["--seed", str(1 << 64)]]
)
def test_generate_checks_numbers_before_it_starts_a_worker(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "no-run", "--prompt", "x", *options]) == 2
    assert options[0] in capsys.readouterr().err


@pytest.fixture
def inputs(tmp_path: Path) -> list[str]:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    (tmp_path / "data.jsonl").write_text("")
    return ["--model", str(tmp_path / "model"), "--data", str(tmp_path / "data.jsonl"), "--device", "cpu"]


def test_plan_gives_a_reason_for_every_choice(inputs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *inputs]) == 0
    out = capsys.readouterr().out
    assert "parallel.world_size" in out
    assert "one process uses all" in out
    assert "Warning" not in out


def test_plan_warns_of_settings_without_effect(inputs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *inputs, "--method", "full", "--set", "method.rank=8"]) == 0
    assert "Warning: method.rank=8 has no effect: method.kind=full" in capsys.readouterr().out


def test_plan_fails_if_an_input_is_missing(inputs: list[str], tmp_path: Path) -> None:
    assert main(["plan", *inputs, "--data", str(tmp_path / "absent.jsonl")]) == 3
    assert main(["plan", *inputs, "--eval-data", str(tmp_path / "absent.jsonl")]) == 3
    assert main(["plan", *inputs, "--model", str(tmp_path / "absent")]) == 4
    assert main(["plan", *inputs, "--model", str(tmp_path)]) == 4


def test_plan_fails_for_a_tokenizer_that_is_not_there(
    inputs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in (tmp_path / "absent", tmp_path):
        assert main(["plan", *inputs, "--set", f"model.tokenizer={folder}"]) == 4
        assert "model.tokenizer" in capsys.readouterr().err
    (tmp_path / "tokenizer.json").write_text("{}")
    assert main(["plan", *inputs, "--set", f"model.tokenizer={tmp_path}"]) == 0


def test_plan_fails_for_an_unknown_architecture(
    inputs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "model/config.json"
    for known in ("llama", "openai-gpt", "gemma3_text"):
        config.write_text(f'{{"model_type": "{known}"}}')
        assert main(["plan", *inputs]) == 0
    config.write_text('{"model_type": "llamma", "auto_map": {}}')
    capsys.readouterr()
    assert main(["plan", *inputs]) == 4
    assert "does not know the model_type 'llamma'" in capsys.readouterr().err
    assert main(["plan", *inputs, "--set", "model.trust_remote_code=true"]) == 0


def test_plan_warns_about_warmup_as_long_as_the_run(inputs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *inputs, "--set", "train.max_steps=10", "--set", "train.warmup_steps=100"]) == 0
    assert "Warning: train.warmup_steps=100 takes the whole run of 10 step(s)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "suggestion"),
    [
        (["train", "--lr", "1e-3"], "--set train.learning_rate=VALUE"),
        (["train", "--lora-r=8"], "--set method.rank=VALUE"),
        (["train", "--lora-rank", "8"], "--set method.rank=VALUE"),
        (["train", "--lora-target-modules=q_proj"], "--set method.target_modules=VALUE"),
        (["train", "--modle", "x"], "Did you mean --model?"),
        (["train", "--config", "x.yaml"], "The config file needs no flag: pantheraml train FILE."),
        (["trian"], "Did you mean train?"),
        (["train", "--method", "qlor"], "Did you mean qlora?"),
        (["verify", "--mode", "x", "--lr"], "See `pantheraml verify --help`"),
    ],
)
def test_unknown_flag_error_suggests_a_flag_or_key(
    arguments: list[str], suggestion: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert suggestion in capsys.readouterr().err


def test_schema_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    import json

    assert main(["schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert set(schema["properties"]) >= {"model", "data", "method", "train", "parallel", "stability", "checkpoint"}
    assert main(["schema", "--events"]) == 0
    assert "train.step" in json.loads(capsys.readouterr().out)["discriminator"]["mapping"]
