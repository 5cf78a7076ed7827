"""The length of a run is estimated from the beginning of its data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pantheraml.cli.main import main
from pantheraml.cli.plan_data import Lengths, estimate
from pantheraml.specs.train import TrainConfig
from tests import toy


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    toy.write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def config(folder: Path, data: Path, **sections: Any) -> TrainConfig:
    return TrainConfig.model_validate({"model": {"path": str(folder)}, "data": {"path": str(data)}, **sections})


def test_all_rows_of_a_short_file_are_counted(folder: Path) -> None:
    data = toy.write_jsonl(folder / "rows.jsonl", [{"text": "1+2=3"}] * 50)
    lengths = estimate(config(folder, data))
    assert lengths is not None
    assert (len(lengths.tokens), lengths.rows) == (50, 50)
    assert len(set(lengths.tokens)) == 1
    tokens = lengths.tokens[0]
    assert lengths.sequences(10 * tokens, packed=True) == pytest.approx(5)
    assert lengths.sequences(10 * tokens, packed=False) == 50
    assert lengths.sequences(2, packed=True) == 50, "longer rows are truncated"


def test_a_long_file_is_sampled(folder: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": "1+2="}, {"role": "assistant", "content": "3"}]}] * 30_000
    data = toy.write_jsonl(folder / "rows.jsonl", rows)
    lengths = estimate(config(folder, data))
    assert lengths is not None
    assert len(lengths.tokens) == 200
    assert lengths.rows == pytest.approx(30_000, rel=0.02)


def test_without_tokenizer_or_rows_nothing_is_estimated(folder: Path, tmp_path: Path) -> None:
    empty = toy.write_jsonl(folder / "empty.jsonl", [])
    assert estimate(config(folder, empty)) is None
    bad = folder / "bad.jsonl"
    bad.write_text("{")
    assert estimate(config(folder, bad)) is None
    (folder / "tokenizer.json").unlink()
    rows = toy.write_jsonl(folder / "rows.jsonl", [{"text": "1"}])
    assert estimate(config(folder, rows)) is None


def test_the_plan_counts_the_steps_of_the_data(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from pantheraml.planner.known_models import known_config

    (folder / "config.json").write_text(json.dumps(known_config("llama-3.2-1b")))
    data = toy.write_jsonl(folder / "rows.jsonl", toy.arithmetic(64))
    shown = ["plan", "--model", str(folder), "--data", str(data), "--gpus", "1xH200", "--json"]
    assert main([*shown, "--set", "data.packing=false", "--set", "train.epochs=3"]) == 0
    prediction = json.loads(capsys.readouterr().out)["prediction"]
    assert prediction["steps"] == 12
    assert prediction["total_seconds"] == pytest.approx(12 * prediction["step_seconds"])


def test_trained_tokens_count_once(folder: Path) -> None:
    data = toy.write_jsonl(folder / "rows.jsonl", [{"text": "1+2=3"}] * 50)
    lengths = estimate(config(folder, data))
    assert lengths is not None
    tokens = 50 * lengths.tokens[0]

    def trained(**train: Any) -> float:
        unpacked = {"path": str(data), "packing": False}
        return lengths.trained(
            TrainConfig.model_validate({"model": {"path": str(folder)}, "data": unpacked, "train": train})
        )

    assert trained(epochs=3) == tokens
    assert trained(epochs=0.5) == tokens / 2
    assert trained(max_steps=2, global_batch_size=5) == pytest.approx(tokens / 5)
    assert trained(max_steps=1000) == tokens


def test_the_plan_says_whether_the_rank_is_enough(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from pantheraml.planner.known_models import known_config

    (folder / "config.json").write_text(json.dumps(known_config("llama-3.2-1b")))
    data = toy.write_jsonl(folder / "rows.jsonl", toy.arithmetic(64))
    shown = ["plan", "--model", str(folder), "--data", str(data), "--gpus", "1xH200"]
    assert main(shown) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("method.rank"))
    assert line.split()[1] == "16"
    assert "11.3 million adapter parameters for about" in line
    assert "would cover" not in line
    assert main([*shown, "--method", "full"]) == 0
    assert "method.rank" not in capsys.readouterr().out


def test_a_share_of_a_sequence_is_one() -> None:
    assert Lengths((3,), 1).sequences(1000, packed=True) == 1
