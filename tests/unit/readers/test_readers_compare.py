"""Runs side by side: figures, differences of configurations, notes, and the page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pantheraml.base.errors import ConfigError, RunDirectoryError
from pantheraml.readers.compare import compare, distinct_names
from pantheraml.readers.compare_page import write_comparison
from pantheraml.readers.recorded_run import read_run
from tests.unit.readers.conftest import FakeRun
from tests.unit.readers.test_readers_report import Page


def make(folder: Path, *, steps: int = 60, pace: float = 0.5, config: str = "", fingerprint: str = "a") -> Path:
    run = FakeRun()
    run.begin()
    run.prepare()
    for event in run.events:
        if event.kind == "data.ready":
            event.fingerprint = fingerprint  # type: ignore[attr-defined]
    run.train(1, steps, eval_every=30, pace=pace)
    run.finish(steps)
    run.write(folder)
    if config:
        (folder / "config.yaml").write_text(config)
    return folder


@pytest.fixture
def pair(tmp_path: Path) -> list[Path]:
    first = make(tmp_path / "a", config="train:\n  learning_rate: 0.001\n  seed: 1\ndata: {path: x}\n")
    second = make(
        tmp_path / "b", pace=0.25, config="train:\n  learning_rate: 0.01\n  seed: 1\n  new: 2\ndata: {path: x}\n"
    )
    return [first, second]


def rows(found: Any) -> dict[str, Any]:
    return {row.title: row for row in found}


def test_figures_and_the_better_run(pair: list[Path]) -> None:
    found = compare(pair)
    speed = rows(found.rows)["tokens per second, median"]
    assert speed.cells == ("64,000", "128,000")
    assert speed.best == 1
    assert rows(found.rows)["steps"].best is None, "more steps are not better"
    assert rows(found.rows)["evaluation loss, last"].best is None, "equal"


def test_differences_name_keys_and_values(pair: list[Path]) -> None:
    found = rows(compare(pair).differences)
    assert {key: row.cells for key, row in found.items()} == {
        "train.learning_rate": ("0.001", "0.01"),
        "train.new": ("–", "2"),
    }


def test_runs_on_different_data_are_not_compared_silently(tmp_path: Path) -> None:
    runs = [make(tmp_path / "a"), make(tmp_path / "b", fingerprint="b")]
    notes = " ".join(compare(runs).notes)
    assert "trained on different data" in notes
    assert "evaluated on different data" in notes
    assert "a has no readable config.yaml" in notes


def test_names_tell_runs_apart() -> None:
    assert distinct_names([Path("/x/a"), Path("/x/b")]) == ("a", "b")
    assert distinct_names([Path("/x/1/run"), Path("/x/2/run")]) == ("1/run", "2/run")


def test_one_run_twice_is_an_error(pair: list[Path]) -> None:
    with pytest.raises(RunDirectoryError, match="named twice"):
        compare([pair[0], pair[0] / "."])


def test_json_has_values_instead_of_texts(pair: list[Path]) -> None:
    found = json.loads(json.dumps(compare(pair).to_json()))
    assert found["config_differences"] == {"train.learning_rate": [0.001, 0.01], "train.new": [None, 2]}
    assert [run["run"]["tokens_per_second"] for run in found["runs"]] == [64_000, 128_000]


def test_the_page_draws_all_runs_over_each_other(pair: list[Path], tmp_path: Path) -> None:
    page = Page(write_comparison(compare(pair), tmp_path / "page.html"))
    loss = page.charts[0]["series"]
    assert {series["name"] for series in loss} == {"a", "b"}
    assert {series["role"] for series in loss} == {"run0", "run1"}
    strong = next(series for series in loss if series["name"] == "b" and series["smoothness"] == "strong")
    assert strong["axes"]["tokens"][-1] == 60 * 32_000
    assert strong["axes"]["minutes"][-1] == pytest.approx(60 * 0.25 / 60)
    assert "train.learning_rate | 0.001 | 0.01" in page.words
    style = (tmp_path / "page.html").read_text()
    assert all(f"--run{number}:" in style for number in range(8)), "the style sheet has the colors"


def test_a_file_that_is_no_report_is_not_replaced(pair: list[Path], tmp_path: Path) -> None:
    target = tmp_path / "notes.txt"
    target.write_text("mine")
    found = compare(pair)
    with pytest.raises(ConfigError, match="not a report"):
        write_comparison(found, target)
    assert target.read_text() == "mine"
    with pytest.raises(ConfigError, match="no folder"):
        write_comparison(found, tmp_path / "nowhere" / "page.html")
    page = tmp_path / "page.html"
    assert write_comparison(found, page) == write_comparison(found, page), "a report is replaced"


@pytest.mark.parametrize("text", ["a: [", "- 1\n- 2\n", "!!python/object/apply:os.system ['true']", "\x00"])
def test_a_damaged_config_is_no_config(tmp_path: Path, text: str) -> None:
    assert read_run(make(tmp_path / "run", steps=1, config=text)).config is None


def test_folders_without_events_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "events.jsonl").write_text("not json\n")
    for name, what in (("file", "is a file"), ("none", "no folder"), (".", "no events"), ("empty", "empty or damaged")):
        with pytest.raises(RunDirectoryError, match=what):
            read_run(tmp_path / name)


def test_a_config_that_expands_without_end_is_left_out(tmp_path: Path) -> None:
    """Aliases of aliases: 700 bytes with a billion values."""
    lines = ["a: &a {x: 1, y: 2}"]
    for name, last in zip("bcdefghij", "abcdefghi", strict=True):
        lines.append(f"{name}: &{name} {{" + ", ".join(f"k{i}: *{last}" for i in range(9)) + "}")
    bomb = make(tmp_path / "a", config="\n".join(lines))
    assert read_run(bomb).config is None
    assert list(compare([bomb]).notes) == ["a has no readable config.yaml."]
