from __future__ import annotations

import json
import multiprocessing
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pantheraml.base.errors import DataError, StorageError
from pantheraml.base.events import EventBase
from pantheraml.data import cache
from pantheraml.data.cache import fingerprint_lock
from pantheraml.data.data_folder import DataFolder
from pantheraml.data.dataset import TokenDataset
from pantheraml.data.prepare import PreparedData, prepare
from pantheraml.data.token_store import LAYOUT_VERSION, to_numpy
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
    meta.write_text(meta.read_text().replace(f'"layout": {LAYOUT_VERSION}', '"layout": 0'))


@pytest.mark.parametrize("damage", [cut_data, lose_middle, overwrite_footer, lose_data, cut_meta, old_layout])
def test_a_damaged_cache_entry_is_detected_and_rebuilt(
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


def replace_tokens(folder: Path, other: Path) -> None:
    """Replace tokens without changing lengths or sums."""
    data = bytearray((folder / "data.arrow").read_bytes())
    with DataFolder(folder) as opened:
        table = opened.table()
    tokens = to_numpy(table.column("tokens").combine_chunks().values).tobytes()
    begin = bytes(data).index(tokens[:40])
    data[begin : begin + 40] = tokens[40:80]
    (folder / "data.arrow").write_bytes(data)


def replace_by_other_data(folder: Path, other: Path) -> None:
    """Replace the folder by complete data of other rows."""
    shutil.rmtree(folder)
    shutil.copytree(other, folder)


@pytest.mark.parametrize("replace", [replace_tokens, replace_by_other_data])
def test_replaced_tokens_are_detected_and_rebuilt(
    write_jsonl: Callable[..., Path],
    prepared: Callable[..., PreparedData],
    events: Any,
    replace: Callable[[Path, Path], None],
) -> None:
    path = write_jsonl([{"text": f"row {i}"} for i in range(50)])
    folder = prepared(path).train
    other = prepared(write_jsonl([{"text": f"evil {i}"} for i in range(50)], name="other.jsonl")).train
    before = (folder / "data.arrow").read_bytes()
    assert prepared(path).train == folder
    replace(folder, other)
    assert (folder / "data.arrow").read_bytes() != before
    assert prepared(path).train == folder
    assert (folder / "data.arrow").read_bytes() == before
    assert [ready["cached"] for ready in events.of("data.ready")] == [False, False, True, False]
    (warning,) = [event["message"] for event in events.of("warning") if "fails its checksum" in event["message"]]
    assert str(folder) in warning


def test_an_entry_of_an_earlier_version_is_rebuilt_without_warning(
    write_jsonl: Callable[..., Path], prepared: Callable[..., PreparedData], events: Any
) -> None:
    path = write_jsonl([{"text": f"row {i}"} for i in range(50)])
    folder = prepared(path).train
    meta = json.loads((folder / "meta.json").read_text())
    del meta["checksum"]
    (folder / "meta.json").write_text(json.dumps(meta))
    prepared(path)
    assert [ready["cached"] for ready in events.of("data.ready")] == [False, False]
    assert not [event for event in events.of("warning") if "fails its checksum" in event["message"]]


def test_untrusted_data_is_validated_before_it_is_read(
    write_jsonl: Callable[..., Path], prepared: Callable[..., PreparedData]
) -> None:
    """Out-of-bounds offsets are detected, not followed."""
    folder = prepared(write_jsonl([{"text": f"row {i}"} for i in range(50)])).train
    TokenDataset.open(folder, untrusted=True)
    with DataFolder(folder) as opened:
        offsets = opened.table().column("tokens").combine_chunks().offsets
    end = np.array([offsets[len(offsets) - 1].as_py()], dtype=np.int32).tobytes()
    data = bytearray((folder / "data.arrow").read_bytes())
    first = bytes(data).index(to_numpy(offsets).tobytes())
    last = first + 4 * (len(offsets) - 1)
    assert bytes(data[last : last + 4]) == end
    data[last : last + 4] = np.array([2**30], dtype=np.int32).tobytes()
    (folder / "data.arrow").write_bytes(data)
    TokenDataset.open(folder)  # the index columns do not show it
    with pytest.raises(DataError, match="missing or damaged"):
        TokenDataset.open(folder, untrusted=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can change the owner")
@pytest.mark.parametrize("planted", ["folder", "file", "link"])
def test_data_that_another_user_swapped_in_after_the_check_is_not_opened(
    write_jsonl: Callable[..., Path], prepared: Callable[..., PreparedData], tmp_path: Path, planted: str
) -> None:
    """Ranks open the data later than it was checked. In a folder without sticky bit, others can rename it meanwhile."""
    folder = prepared(write_jsonl([{"text": f"row {i}"} for i in range(50)])).train
    evil = shutil.copytree(folder, tmp_path / "evil" / folder.name)
    for path in {"folder": [evil], "file": [evil / "data.arrow"], "link": [evil, *evil.iterdir()]}[planted]:
        os.chown(path, 12345, 12345)
    folder.rename(tmp_path / "kept")
    if planted == "link":
        folder.symlink_to(evil)
    else:
        evil.rename(folder)
    with pytest.raises(DataError, match="a symlink" if planted == "link" else r"another user \(uid 12345\)"):
        TokenDataset.open(folder)


def test_an_opened_folder_stays_what_it_was_checked_to_be(
    write_jsonl: Callable[..., Path], prepared: Callable[..., PreparedData]
) -> None:
    folder = prepared(write_jsonl([{"text": f"row {i}"} for i in range(50)])).train
    other = prepared(write_jsonl([{"text": f"evil {i}"} for i in range(400)], name="other.jsonl")).train
    before = len(TokenDataset.open(folder))
    assert before != len(TokenDataset.open(other))
    with DataFolder(folder) as opened:
        folder.rename(folder.with_name("kept"))
        other.rename(folder)
        assert opened.table().num_rows == before
        assert opened.matches_checksum()
    with pytest.raises(DataError, match="missing or damaged"):
        TokenDataset.open(folder)  # complete, but of another fingerprint


def prepare_in_child(path: Path, cache: Path, tokenizer: Any, answers: Any) -> None:
    seen: list[tuple[str, Any]] = []

    def emit(event: EventBase, /) -> None:
        kind, fields = event.kind, event.model_dump()
        seen.append((kind, fields.get("cached")))

    config = DataConfig(path=str(path), cache_dir=str(cache), seq_len=64)
    answers.put((str(prepare(config, tokenizer=tokenizer, emit=emit).train), seen))


def test_concurrent_runs_prepare_once(write_jsonl: Callable[..., Path], tmp_path: Path, tokenizer: Any) -> None:
    path = write_jsonl([{"text": f"row {i} " * 20} for i in range(2000)])
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    runs = [
        context.Process(target=prepare_in_child, args=(path, tmp_path / "cache", tokenizer, answers)) for _ in range(3)
    ]
    for run in runs:
        run.start()
    results = [answers.get(timeout=200) for _ in runs]
    for run in runs:
        run.join()
    assert len({folder for folder, _ in results}) == 1
    cached = sorted(seen for _, events in results for kind, seen in events if kind == "data.ready")
    assert cached == [False, True, True]
    assert len(TokenDataset.open(Path(results[0][0]))) > 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can change the owner")
@pytest.mark.parametrize("planted", ["entry", "file", "link"])
def test_data_that_another_user_put_into_a_shared_cache_is_not_used(
    write_jsonl: Callable[..., Path], prepared: Callable[..., PreparedData], events: Any, tmp_path: Path, planted: str
) -> None:
    """The planted data has a matching checksum, so only its owner reveals it."""
    path = write_jsonl([{"text": f"row {i}"} for i in range(50)])
    folder = prepared(path).train
    folder.parent.chmod(0o777)
    before = (folder / "data.arrow").read_bytes()
    other = prepared(write_jsonl([{"text": f"evil {i}"} for i in range(50)], name="other.jsonl")).train
    shutil.rmtree(folder)
    shutil.copytree(other, folder if planted != "link" else tmp_path / "elsewhere")
    meta = (other / "meta.json").read_text().replace(other.name, folder.name)
    if planted == "link":
        folder.symlink_to(tmp_path / "elsewhere")
    (folder / "meta.json").write_text(meta)
    for entry in {"entry": [folder, *folder.iterdir()], "file": [folder / "data.arrow"], "link": []}[planted]:
        os.chown(entry, 12345, 12345)
    assert prepared(path).train == folder
    assert not folder.is_symlink()
    assert (folder / "data.arrow").read_bytes() == before
    assert [ready["cached"] for ready in events.of("data.ready")] == [False, False, False]
    (warning,) = [event["message"] for event in events.of("warning") if " is not used, it " in event["message"]]
    assert str(folder) in warning


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can change the owner")
def test_a_lock_of_another_user_is_rejected(tmp_path: Path, events: Any) -> None:
    tmp_path.chmod(0o777)
    (tmp_path / "abc.lock").touch()
    os.chown(tmp_path / "abc.lock", 12345, 12345)
    with (
        pytest.raises(StorageError, match=r"belongs to another user \(uid 12345\)") as raised,
        fingerprint_lock(tmp_path, "abc", events),
    ):
        pytest.fail("locked")
    assert raised.value.where == str(tmp_path / "abc.lock")


def test_waiting_for_another_run_has_a_timeout(tmp_path: Path, events: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "LOCK_SECONDS", 0.2)
    with (
        fingerprint_lock(tmp_path, "abc", events),
        pytest.raises(StorageError, match=r"held the lock of abc\.lock"),
        fingerprint_lock(tmp_path, "abc", events),
    ):
        pytest.fail("locked")


def test_waiting_for_another_run_emits_a_notice(tmp_path: Path, events: Any) -> None:
    context = multiprocessing.get_context("fork")
    holds, release = context.Event(), context.Event()

    def hold() -> None:
        with fingerprint_lock(tmp_path, "abc", events):
            holds.set()
            release.wait(100)

    other = context.Process(target=hold)
    other.start()
    assert holds.wait(100)

    def emit(event: EventBase, /) -> None:
        events(event)
        release.set()

    with fingerprint_lock(tmp_path, "abc", emit):
        pass
    other.join()
    assert "waiting" in events.of("notice")[0]["message"]
