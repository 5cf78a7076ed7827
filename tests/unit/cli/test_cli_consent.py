"""A run folder cannot give leave to run code: the person who uses it must, and the operator may refuse it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pantheraml.base.errors import ConfigError
from pantheraml.cli import execute
from pantheraml.cli.main import main
from pantheraml.models.loader import check_model, load_tokenizer
from pantheraml.specs.config_file import dump_yaml
from pantheraml.specs.consent import Consent
from pantheraml.specs.run_dir import RunDir
from pantheraml.specs.train import DataConfig, ModelConfig, TrainConfig
from pantheraml.worker.export import export_task
from pantheraml.worker.generate import generate_task
from tests.harness import make_plan, silent

ASKED = ["trust_remote_code", "allow_pickle"]
FLAGS = {"trust_remote_code": "--trust-remote-code", "allow_pickle": "--allow-pickle"}


def received_run(path: Path, asked: str) -> RunDir:
    """A run folder that a stranger made, whose model asks for code to be run."""
    model = path.parent / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}))
    (model / "own.py").write_text(f"open({str(path.parent / 'executed')!r}, 'w')")
    config = TrainConfig(
        model=ModelConfig.model_validate({"path": str(model), asked: True}), data=DataConfig(path="d"), device="cpu"
    )
    run = RunDir(path)
    run.mark()
    run.config_file.write_text(dump_yaml(config))
    run.write_plan(make_plan(config))
    (path / "adapter").mkdir()
    (path / "incidents").mkdir()
    (path / "incidents" / "step-1.json").write_text("{}")
    return run


def commands(run: RunDir) -> list[list[str]]:
    folder = str(run.path)
    return [
        ["generate", folder, "--prompt", "x", "--device", "cpu"],
        ["generate", folder, "--prompt", "x", "--device", "cpu", "--base"],
        ["export", folder, "--merge", "--output", f"{folder}-exported"],
        ["resume", folder],
        ["replay", f"{folder}/incidents/step-1.json", "--device", "cpu"],
    ]


@pytest.mark.parametrize("asked", ASKED)
def test_a_received_folder_needs_fresh_consent(
    asked: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, carried_out = received_run(tmp_path / "run", asked), []

    def carry_out(*arguments: Any, **others: Any) -> Any:
        carried_out.append(arguments)
        raise ConfigError("carried out")

    monkeypatch.setattr(execute, "run_request", carry_out)
    monkeypatch.setattr(execute, "run_training", carry_out)
    for command in commands(run):
        assert main(command) == ConfigError.exit_code
        told = capsys.readouterr().err
        assert f"model.{asked}=true" in told
        assert f"add {FLAGS[asked]}." in told
        other = next(flag for field, flag in FLAGS.items() if field != asked)
        assert main([*command, other]) == ConfigError.exit_code
        assert f"model.{asked}=true" in capsys.readouterr().err
        assert not carried_out
        assert main([*command, FLAGS[asked]]) == ConfigError.exit_code
        assert "carried out" in capsys.readouterr().err
        carried_out.clear()


def test_the_worker_asks_too(tmp_path: Path) -> None:
    """The folder may have changed since the command looked."""
    run, folder = received_run(tmp_path / "run", "trust_remote_code"), tmp_path / "task"
    folder.mkdir()
    common = {"run_dir": str(run.path), "consent": {}}
    for task, request in (
        (export_task, {"output": str(tmp_path / "out"), "precision": "fp32", "base": "trained"}),
        (generate_task, {"prompts": ["x"], "weights": "base", "device": "cpu", "precision": "fp32",
                         "max_new_tokens": 1, "temperature": 0.0, "seed": 0, "batch_size": 1}),
    ):  # fmt: skip
        (folder / "request.json").write_text(json.dumps({**common, **request}))
        with pytest.raises(ConfigError, match=r"model\.trust_remote_code=true"):
            task(folder, silent)  # type: ignore[arg-type]
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("asked", ASKED)
def test_the_operator_refuses_it_whatever_anybody_says(
    asked: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = received_run(tmp_path / "run", asked)
    model = str(tmp_path / "model")
    monkeypatch.setenv("PANTHERAML_NO_FOREIGN_CODE", "1")
    everywhere = [
        *([*command, FLAGS[asked]] for command in commands(run)),
        ["train", "--model", model, "--data", "d", "--set", f"model.{asked}=true"],
        ["plan", "--model", model, "--data", "d", "--set", f"model.{asked}=true"],
        ["verify", "--config", str(run.config_file)],
        ["quantise", str(run.config_file), "--output", str(tmp_path / "out")],
    ]
    for command in everywhere:
        assert main(command) == ConfigError.exit_code, command
        assert "refused on this machine (PANTHERAML_NO_FOREIGN_CODE)" in capsys.readouterr().err
    config = ModelConfig.model_validate({"path": model, asked: True})
    for load in (check_model, load_tokenizer):
        with pytest.raises(ConfigError, match="refused on this machine"):
            load(config)
    assert not (tmp_path / "executed").exists()


def test_the_python_face_obeys_the_operator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pantheraml import FastLanguageModel

    run = received_run(tmp_path / "run", "trust_remote_code")
    monkeypatch.setenv("PANTHERAML_NO_FOREIGN_CODE", "1")
    with pytest.raises(ConfigError, match="refused on this machine"):
        FastLanguageModel.from_pretrained(str(run.path.parent / "model"), trust_remote_code=True)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("asked", ASKED)
def test_the_config_of_a_run_folder_is_not_ones_own(
    asked: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Named by hand, too: what stands there, somebody else may have written."""
    run, carried_out = received_run(tmp_path / "run", asked), []

    def carry_out(*arguments: Any, **others: Any) -> Any:
        carried_out.append(arguments)
        raise ConfigError("carried out")

    monkeypatch.setattr(execute, "run_training", carry_out)
    config = str(run.config_file)
    for command in (["train", config], ["plan", config], ["quantise", config, "--output", f"{tmp_path}/out"]):
        assert main(command) == ConfigError.exit_code
        assert f"add --set model.{asked}=true." in capsys.readouterr().err
    assert main(["verify", "--config", config]) == ConfigError.exit_code
    assert f"model.{asked}=true" in capsys.readouterr().err
    assert not carried_out
    main(["train", config, "--set", f"model.{asked}=true"])
    assert carried_out
    own = tmp_path / "own.yaml"
    own.write_text(run.config_file.read_text())
    main(["train", str(own)])
    assert len(carried_out) == 2


def test_nothing_asked_needs_no_consent() -> None:
    Consent().check(ModelConfig(path="m"), where="here")
