from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pantheraml.base.errors import DataError
from pantheraml.data.cache import locked
from pantheraml.data.dataset import TokenDataset
from pantheraml.data.prepare import PreparedData, prepare
from pantheraml.specs.train import DataConfig


def cut_data(folder: Path) -> None:
    os.truncate(folder / "data.arrow", (folder / "data.arrow").stat().st_size // 2)


def lose_middle(folder: Path) -> None:
    data = (folder / "data.arrow").read_bytes()
    (folder / "data.arrow").write_bytes(data[:16] + data[64:])


def overwrite_footer(folder: Path) -> None:
    with open(folder / "data.arrow", "r+b") as file:
        file.seek(-40, os.SEEK_END)
        file.write(b"\0" * 40)


def lose_data(folder: Path) -> None:
    (folder / "data.arrow").unlink()


def cut_meta(folder: Path) -> None:
    os.truncate(folder / "meta.json", 10)


def old_layout(folder: Path) -> None:
    meta = folder / "meta.json"
    meta.write_text(meta.read_text().replace('"layout": 2', '"layout": 0'))


@pytest.mark.parametrize("damage", [cut_data, lose_middle, overwrite_footer, lose_data, cut_meta, old_layout])
def test_a_damaged_entry_is_noticed_and_built_again(
    write_jsonl: Callable[..., Path],
    prepared: Callable[..., PreparedData],
    events: Any,
    damage: Callable[[Path], None],
) -> None:
    path = write_jsonl([{"text": f"row {i}"} for i in range(50)])
    folder = prepared(path).train
    before = (folder / "data.arrow").read_bytes()
    damage(folder)
    with pytest.raises(DataError, match="missing or damaged"):
        TokenDataset.open(folder)
    assert prepared(path).train == folder
    assert (folder / "data.arrow").read_bytes() == before
    assert [ready["cached"] for ready in events.of("data.ready")] == [False, False]


def prepare_in_child(path: Path, cache: Path, tokenizer: Any, answers: Any) -> None:
    seen: list[tuple[str, Any]] = []

    def emit(kind: str, /, **fields: Any) -> None:
        seen.append((kind, fields.get("cached")))

    config = DataConfig(path=str(path), cache_dir=str(cache), seq_len=64)
    answers.put((str(prepare(config, tokenizer=tokenizer, emit=emit).train), seen))


def test_runs_that_start_together_prepare_once(
    write_jsonl: Callable[..., Path], tmp_path: Path, tokenizer: Any
) -> None:
    path = write_jsonl([{"text": f"row {i} " * 20} for i in range(2000)])
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    runs = [
        context.Process(target=prepare_in_child, args=(path, tmp_path / "cache", tokenizer, answers)) for _ in range(3)
    ]
    for run in runs:
        run.start()
    found = [answers.get(timeout=200) for _ in runs]
    for run in runs:
        run.join()
    assert len({folder for folder, _ in found}) == 1
    cached = sorted(seen for _, events in found for kind, seen in events if kind == "data.ready")
    assert cached == [False, True, True]
    assert len(TokenDataset.open(Path(found[0][0]))) > 0


def test_waiting_for_another_run_is_said(tmp_path: Path, events: Any) -> None:
    context = multiprocessing.get_context("fork")
    holds, release = context.Event(), context.Event()

    def hold() -> None:
        with locked(tmp_path, "abc", events):
            holds.set()
            release.wait(100)

    other = context.Process(target=hold)
    other.start()
    assert holds.wait(100)

    def emit(kind: str, /, **fields: Any) -> None:
        events(kind, **fields)
        release.set()

    with locked(tmp_path, "abc", emit):
        pass
    other.join()
    assert "waiting" in events.of("notice")[0]["message"]
