"""A run folder cannot consent to running code: the user must, and the operator may forbid it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pantheraml.base.errors import ConfigError
from pantheraml.cli.main import main
from pantheraml.models.loader import check_model, load_tokenizer
from pantheraml.runs import session, tasks
from pantheraml.specs.config_file import dump_yaml
from pantheraml.specs.consent import Consent
from pantheraml.specs.run_dir import RunDir
from pantheraml.specs.train import DataConfig, ModelConfig, TrainConfig
from pantheraml.worker.export import export_task
from pantheraml.worker.generate import generate_task
from tests.harness import make_plan, silent

OPTIONS = ["trust_remote_code", "allow_pickle"]
FLAGS = {"trust_remote_code": "--trust-remote-code", "allow_pickle": "--allow-pickle"}


def received_run(path: Path, option: str) -> RunDir:
    """A run folder from someone else, whose model needs code to run."""
    model = path.parent / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}))
    (model / "own.py").write_text(f"open({str(path.parent / 'executed')!r}, 'w')")
    config = TrainConfig(
        model=ModelConfig.model_validate({"path": str(model), option: True}), data=DataConfig(path="d"), device="cpu"
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


@pytest.mark.parametrize("option", OPTIONS)
def test_received_folder_needs_consent(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, executed = received_run(tmp_path / "run", option), []

    def fake_execute(*arguments: Any, **others: Any) -> Any:
        executed.append(arguments)
        raise ConfigError("executed")

    monkeypatch.setattr(tasks, "run_request", fake_execute)
    monkeypatch.setattr(session, "run_training", fake_execute)
    for command in commands(run):
        assert main(command) == ConfigError.exit_code
        error = capsys.readouterr().err
        assert f"model.{option}=true" in error
        assert f"add {FLAGS[option]}." in error
        other = next(flag for field, flag in FLAGS.items() if field != option)
        assert main([*command, other]) == ConfigError.exit_code
        assert f"model.{option}=true" in capsys.readouterr().err
        assert not executed
        assert main([*command, FLAGS[option]]) == ConfigError.exit_code
        assert "executed" in capsys.readouterr().err
        executed.clear()


def test_worker_checks_consent_too(tmp_path: Path) -> None:
    """The folder may have changed since the command checked it."""
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


@pytest.mark.parametrize("option", OPTIONS)
def test_operator_setting_overrides_all_consent(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = received_run(tmp_path / "run", option)
    model = str(tmp_path / "model")
    monkeypatch.setenv("PANTHERAML_NO_FOREIGN_CODE", "1")
    all_commands = [
        *([*command, FLAGS[option]] for command in commands(run)),
        ["train", "--model", model, "--data", "d", "--set", f"model.{option}=true"],
        ["plan", "--model", model, "--data", "d", "--set", f"model.{option}=true"],
        ["verify", "--config", str(run.config_file)],
        ["quantize", str(run.config_file), "--output", str(tmp_path / "out")],
    ]
    for command in all_commands:
        assert main(command) == ConfigError.exit_code, command
        assert "not allowed on this machine (PANTHERAML_NO_FOREIGN_CODE)" in capsys.readouterr().err
    config = ModelConfig.model_validate({"path": model, option: True})
    for load in (check_model, load_tokenizer):
        with pytest.raises(ConfigError, match="not allowed on this machine"):
            load(config)
    assert not (tmp_path / "executed").exists()


def test_python_api_respects_the_operator_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pantheraml import FastLanguageModel

    run = received_run(tmp_path / "run", "trust_remote_code")
    monkeypatch.setenv("PANTHERAML_NO_FOREIGN_CODE", "1")
    with pytest.raises(ConfigError, match="not allowed on this machine"):
        FastLanguageModel.from_pretrained(str(run.path.parent / "model"), trust_remote_code=True)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("option", OPTIONS)
def test_config_inside_a_run_folder_is_not_trusted(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if passed explicitly: someone else may have written it."""
    run, executed = received_run(tmp_path / "run", option), []

    def fake_execute(*arguments: Any, **others: Any) -> Any:
        executed.append(arguments)
        raise ConfigError("executed")

    monkeypatch.setattr(session, "run_training", fake_execute)
    config = str(run.config_file)
    for command in (["train", config], ["plan", config], ["quantize", config, "--output", f"{tmp_path}/out"]):
        assert main(command) == ConfigError.exit_code
        assert f"add --set model.{option}=true." in capsys.readouterr().err
    assert main(["verify", "--config", config]) == ConfigError.exit_code
    assert f"model.{option}=true" in capsys.readouterr().err
    assert not executed
    main(["train", config, "--set", f"model.{option}=true"])
    assert executed
    own = tmp_path / "own.yaml"
    own.write_text(run.config_file.read_text())
    main(["train", str(own)])
    assert len(executed) == 2


def test_default_model_needs_no_consent() -> None:
    Consent().check(ModelConfig(path="m"), where="here")
