"""`pantheraml import-config`: files in, files and lists out, bad files refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pantheraml.cli.main import main
from pantheraml.specs.config_file import load_config

AXOLOTL = """\
base_model: org/small-1b
datasets:
  - {path: rows.jsonl, type: alpaca}
micro_batch_size: 2
learning_rate: 2e-5
output_dir: ./my out
flash_attention: true
val_set_size: 500
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    file = tmp_path / "theirs.yml"
    file.write_text(AXOLOTL)
    return file


def test_the_written_file_is_a_config_and_the_lists_are_printed(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "run.yaml"
    assert main(["import-config", str(source), "--output", str(output)]) == 0
    config = load_config(output)
    assert (config.train.learning_rate, config.data.path) == (2e-5, "rows.jsonl")
    assert "learning_rate: 2.0e-05  # learning_rate: 2e-5" in output.read_text()
    out = capsys.readouterr().out
    for words in ("Translated: ", "Not needed: ", "Not supported: ", "flash_attention: attention kernels"):
        assert words in out
    assert f"pantheraml train {output} --output './my out'" in out
    assert main(["import-config", str(source), "--output", str(output)]) == 2, "nothing is overwritten"


def test_without_output_the_config_alone_is_on_stdout(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import-config", str(source), "--from", "axolotl"]) == 0
    captured = capsys.readouterr()
    source.write_text(captured.out)
    assert load_config(source).model.path == "org/small-1b"
    assert "Not supported: 1\n  val_set_size" in captured.err


def test_json_holds_the_config_and_the_lists(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import-config", str(source), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["source"] == "axolotl"
    assert answer["config"]["train"]["micro_batch_size"] == 2
    assert [entry["key"] for entry in answer["not_supported"]] == ["val_set_size"]
    assert {"key": "output_dir", "reason": "", "targets": ["--output"]} in answer["translated"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [1", "not valid YAML"),
        ("when: 2024-13-77", "invalid value: month must be in 1..12"),
        ("", "no settings"),
        ("just words", "no settings"),
        ("base_model: a\nbase_model: b", "set twice"),
        ("color: red\nsize: 3", "not a training config of Axolotl or LLaMA-Factory"),
        ("compute_environment: LOCAL_MACHINE", "Accelerate"),
        ("model: Qwen/x\ntrain_dataset: y", "v1"),
        ("model: {path: x}\ndata: {path: y}", "already a config of PantheraML"),
        ("base_model: a\nmodel_name_or_path: b\nadapter: lora\nstage: sft", "--from axolotl or --from llama-factory"),
        ("base_model: a\nx: &a [1,1,1,1,1,1,1,1,1,1]\ny: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a,*a]\n"
         "z: &c [*b,*b,*b,*b,*b,*b,*b,*b,*b,*b]\nw: [*c,*c,*c,*c,*c,*c,*c,*c,*c,*c]", "more than 10,000 values"),
    ],
)  # fmt: skip
def test_other_files_are_refused(text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    assert main(["import-config", str(file)]) == 2
    assert words in capsys.readouterr().err


def test_values_cannot_add_lines_or_escape_codes(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source.write_text(AXOLOTL + 'wandb_project: "x\\nstability: {debug: true}\\e[31m"\n"\\e[31m": 1\n')
    output = tmp_path / "run.yaml"
    assert main(["import-config", str(source), "--output", str(output)]) == 0
    assert load_config(output).stability.debug is False
    assert "\x1b" not in output.read_text() + capsys.readouterr().out
