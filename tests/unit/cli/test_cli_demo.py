"""Parts of the demo that need no training: folder, inputs, configs, score."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pantheraml.base.errors import RunDirectoryError
from pantheraml.cli import demonstration
from pantheraml.cli.demonstration import (
    HELD_OUT_EXAMPLES,
    SEQ_LEN,
    TRAIN_EXAMPLES,
    Answers,
    claim_folder,
    make_inputs,
    program,
    training_configs,
)
from pantheraml.data.synthetic import Example
from pantheraml.devices.probe import probe
from pantheraml.planner.choose import choose
from pantheraml.specs.run_dir import RunDir


def claim(output: Path) -> None:
    claim_folder(output, training_configs(output.absolute(), 2)[1])


def test_earlier_demo_is_replaced(tmp_path: Path) -> None:
    output = tmp_path / "demo"
    claim(output)
    (output / "checkpoints").mkdir()  # marks a run that has trained
    (output / "adapter").mkdir()
    claim(output)
    assert sorted(path.name for path in output.iterdir()) == ["config.yaml", "run.lock"]


def test_another_run_is_never_replaced(tmp_path: Path) -> None:
    claim(tmp_path / "demo")
    (tmp_path / "demo" / "checkpoints").mkdir()
    (tmp_path / "demo").rename(tmp_path / "mine")  # its config now names another folder
    with pytest.raises(RunDirectoryError, match="contains other files"):
        claim(tmp_path / "mine")


def test_other_files_are_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(RunDirectoryError, match="contains other files"):
        claim(tmp_path)


def test_configs_refer_to_the_written_inputs(tmp_path: Path) -> None:
    output = tmp_path / "demo"
    claim(output)
    held_out = make_inputs(output)
    base, tuned = training_configs(output, 2)
    assert Path(base.data.path).is_file()
    assert (Path(base.model.path) / "tokenizer.json").is_file()
    assert Path(tuned.model.path) == output / "base"
    assert RunDir(output).config() == tuned
    train = [Example(**json.loads(line)) for line in Path(tuned.data.path).read_text().splitlines()]
    assert (len(train), len(held_out)) == (TRAIN_EXAMPLES, HELD_OUT_EXAMPLES)
    assert not {example.prompt for example in train} & {example.prompt for example in held_out}
    model = json.loads((output / "start" / "config.json").read_text())
    assert model["max_position_embeddings"] == SEQ_LEN


def test_exact_match_counts_whole_answers() -> None:
    examples = [Example("a", " 1"), Example("b", " 2"), Example("c", " 3"), Example("d", " 4")]
    assert Answers(examples, [" 1", " 2 ", "3", " 4"]).exact_match == 0.5


def test_the_demo_sets_nothing_without_effect(tmp_path: Path) -> None:
    for config in training_configs(tmp_path, 1):
        assert choose(config, probe()).warnings == ()


def test_the_command_to_try_is_one_that_a_shell_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found: dict[str, str | None] = {"pantheraml": None}
    monkeypatch.setattr(demonstration.shutil, "which", found.__getitem__)
    monkeypatch.setattr(demonstration.sys, "argv", [".venv/bin/pantheraml", "demo"])
    assert program() == ".venv/bin/pantheraml"
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setattr(demonstration.sys, "argv", [f"{tmp_path}/my env/bin/pantheraml"])
    assert program() == f"'{tmp_path}/my env/bin/pantheraml'"
    found["pantheraml"] = "/usr/bin/pantheraml"
    assert program() == "pantheraml"
