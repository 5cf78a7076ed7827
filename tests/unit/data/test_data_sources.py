from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from pantheraml.base.errors import DataError
from pantheraml.data.sources import content_digest, find_files


def rows_of(path: Path, events: Any) -> list[Any]:
    return [row for file in find_files(path, events) for chunk in file.chunks() for _, row in chunk.rows()]


def digest(path: Path, events: Any) -> str:
    return content_digest(find_files(path, events), lambda size: None)


def test_a_missing_file_is_reported(tmp_path: Path, events: Any) -> None:
    with pytest.raises(DataError, match=r"no data at .*nowhere\.jsonl"):
        find_files(tmp_path / "nowhere.jsonl", events)


def test_an_empty_file_is_reported(tmp_path: Path, events: Any) -> None:
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(DataError, match="empty") as caught:
        find_files(tmp_path / "empty.jsonl", events)
    assert caught.value.where == str(tmp_path / "empty.jsonl")


def test_an_unknown_type_lists_the_known_ones(tmp_path: Path, events: Any) -> None:
    (tmp_path / "data.xlsx").write_bytes(b"x")
    with pytest.raises(DataError, match="not known") as caught:
        find_files(tmp_path / "data.xlsx", events)
    assert ".parquet" in str(caught.value.fix)


def test_a_folder_is_read_in_name_order_and_reports_ignored_files(tmp_path: Path, events: Any) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.jsonl").write_text('{"text": "b"}\n')
    (tmp_path / "a.txt").write_text("a\n")
    (tmp_path / "sub" / "c.csv").write_text("text\nc\n")
    (tmp_path / ".hidden.jsonl").write_text("nonsense")
    (tmp_path / "README.md").write_text("words")
    assert rows_of(tmp_path, events) == [{"text": "a"}, {"text": "b"}, {"text": "c"}]
    assert "README.md" in events.of("notice")[0]["message"]


def test_a_folder_without_data_is_rejected(tmp_path: Path, events: Any) -> None:
    with pytest.raises(DataError, match="no data files"):
        find_files(tmp_path, events)


def save(folder: Path, shards: list[list[dict[str, str]]]) -> None:
    """Write the same files as `Dataset.save_to_disk`."""
    folder.mkdir(parents=True)
    names = [f"data-{index:05d}-of-{len(shards):05d}.arrow" for index in range(len(shards))]
    for name, rows in zip(names, shards, strict=True):
        table = pa.Table.from_pylist(rows)
        with pa.OSFile(str(folder / name), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table)
    state = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "0", "_split": None}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")


def test_a_folder_saved_by_datasets_is_read(tmp_path: Path, events: Any) -> None:
    rows = [{"prompt": f"p{i}", "completion": f"c{i}"} for i in range(7)]
    save(tmp_path / "saved", [rows[:3], rows[3:5], rows[5:]])
    assert rows_of(tmp_path / "saved", events) == rows


def test_a_folder_really_saved_by_datasets_is_read(tmp_path: Path, events: Any) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{"messages": [{"role": "assistant", "content": f"c{i}"}]} for i in range(7)]
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"), num_shards=3)
    assert rows_of(tmp_path / "saved", events) == rows
    splits = {name: datasets.Dataset.from_list([{"text": name}]) for name in ("test", "train")}
    datasets.DatasetDict(splits).save_to_disk(str(tmp_path / "splits"))
    assert rows_of(tmp_path / "splits", events) == [{"text": "train"}]


def test_the_train_split_of_a_saved_dataset_dict_is_read(tmp_path: Path, events: Any) -> None:
    for name in ("test", "train"):
        save(tmp_path / "saved" / name, [[{"text": name}]])
    (tmp_path / "saved" / "dataset_dict.json").write_text(json.dumps({"splits": ["test", "train"]}))
    assert rows_of(tmp_path / "saved", events) == [{"text": "train"}]
    assert "`train` is used" in events.of("notice")[0]["message"]
    assert rows_of(tmp_path / "saved" / "test", events) == [{"text": "test"}]


def test_a_dataset_dict_without_train_lists_its_splits(tmp_path: Path, events: Any) -> None:
    (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": ["dev", "test"]}))
    with pytest.raises(DataError, match="dev, test"):
        find_files(tmp_path, events)


def test_a_saved_folder_with_a_missing_file_is_rejected(tmp_path: Path, events: Any) -> None:
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-0.arrow"}]}))
    with pytest.raises(DataError, match=r"lacks its file data-0\.arrow"):
        find_files(tmp_path, events)
    (tmp_path / "state.json").write_text("{")
    with pytest.raises(DataError, match="cannot be read"):
        find_files(tmp_path, events)


def test_the_digest_is_of_content_and_kind_not_of_names(tmp_path: Path, events: Any) -> None:
    for name in ("one.jsonl", "two.jsonl", "three.txt"):
        (tmp_path / name).write_text('{"text": "a"}\n')
    (tmp_path / "four.jsonl").write_text('{"text": "b"}\n')
    digests = [digest(tmp_path / name, events) for name in ("one.jsonl", "two.jsonl", "three.txt", "four.jsonl")]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


def test_the_digest_depends_on_file_boundaries(tmp_path: Path, events: Any) -> None:
    for folder, parts in (("x", ("ab", "c")), ("y", ("a", "bc"))):
        (tmp_path / folder).mkdir()
        for index, part in enumerate(parts):
            (tmp_path / folder / f"{index}.txt").write_text(part)
    assert digest(tmp_path / "x", events) != digest(tmp_path / "y", events)


def test_a_file_that_changes_during_the_read_is_rejected(tmp_path: Path, events: Any) -> None:
    path = tmp_path / "data.txt"
    path.write_text("one\n")
    (source,) = find_files(path, events)
    with path.open("a") as file:
        file.write("two\n")
    with pytest.raises(DataError, match="changed while"):
        list(source.chunks())


def test_arrow_files_of_the_wrong_kind_are_rejected(tmp_path: Path, events: Any) -> None:
    (tmp_path / "data.parquet").write_bytes(pa.py_buffer(b"PAR1 but not really"))
    (source,) = find_files(tmp_path / "data.parquet", events)
    with pytest.raises(DataError, match="Parquet"):
        list(source.chunks())


SECRET = "root:x:0:0:the owner's secret"


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A file outside of the data folder."""
    path = tmp_path / "outside" / "secret.jsonl"
    path.parent.mkdir()
    path.write_text(SECRET)
    return path


def error_text(path: Path, events: Any) -> str:
    with pytest.raises(DataError) as caught:
        rows_of(path, events)
    assert "secret" not in str(caught.value).replace("secret.jsonl", "")
    return str(caught.value)


@pytest.mark.parametrize("absolute", [True, False])
def test_a_link_that_leaves_the_folder_is_rejected(tmp_path: Path, outside: Path, events: Any, absolute: bool) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "a.jsonl").symlink_to(outside if absolute else Path("../outside/secret.jsonl"))
    assert "outside of it: 'a.jsonl'" in error_text(folder, events)


def test_links_inside_the_folder_and_to_the_folder_are_followed(tmp_path: Path, events: Any) -> None:
    folder = tmp_path / "data"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "a.txt").write_text("a")
    (folder / "b.txt").symlink_to("sub/a.txt")
    (tmp_path / "link").symlink_to(folder)
    (tmp_path / "link.txt").symlink_to(folder / "b.txt")
    assert rows_of(tmp_path / "link", events) == [{"text": "a"}] * 2
    assert rows_of(tmp_path / "link.txt", events) == [{"text": "a"}]


def test_hub_cache_links_are_followed_only_to_their_blobs(tmp_path: Path, outside: Path, events: Any) -> None:
    repository = tmp_path / "hub" / "datasets--someone--words"
    snapshot = repository / "snapshots" / "0123abcd" / "data"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    (repository / "blobs" / "feed").write_text("a")
    (snapshot / "train.txt").symlink_to("../../../blobs/feed")
    assert rows_of(snapshot.parent, events) == rows_of(snapshot, events) == [{"text": "a"}]
    (snapshot / "more.jsonl").symlink_to("../../../../../outside/secret.jsonl")
    assert "outside of it" in error_text(snapshot, events)
    (snapshot / "more.jsonl").unlink()
    (repository / "blobs" / "feed").unlink()
    (repository / "blobs").rmdir()
    (repository / "blobs").symlink_to(outside.parent)
    (outside.parent / "feed").write_text(SECRET)
    assert "outside of it" in error_text(snapshot, events)


@pytest.mark.parametrize("how", ["parent", "absolute", "link", "null byte"])
def test_a_state_json_that_names_a_file_outside_is_rejected(
    tmp_path: Path, outside: Path, events: Any, how: str
) -> None:
    folder = tmp_path / "saved"
    save(folder, [[{"text": "a"}]])
    names = {"parent": "../outside/secret.jsonl", "absolute": str(outside), "link": "link.arrow", "null byte": "a\0b"}
    (folder / "link.arrow").symlink_to(outside)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": names[how]}]}))
    assert "The data folder names a file" in error_text(folder, events)


def test_a_split_outside_of_the_folder_is_rejected(tmp_path: Path, outside: Path, events: Any) -> None:
    save(tmp_path / "other", [[{"text": SECRET}]])
    folder = tmp_path / "saved"
    folder.mkdir()
    for name in ("../other", str(tmp_path / "other")):
        (folder / "dataset_dict.json").write_text(json.dumps({"splits": [name]}))
        assert "outside of it" in error_text(folder, events)
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": ["train"]}))
    (folder / "train").symlink_to("../other")
    assert "outside of it" in error_text(folder, events)


@pytest.mark.parametrize("name", ["state.json", "dataset_dict.json"])
def test_metadata_is_not_read_through_links_nor_revealed(tmp_path: Path, outside: Path, events: Any, name: str) -> None:
    folder = tmp_path / "saved"
    folder.mkdir()
    (folder / name).symlink_to(outside)
    assert "outside of it" in error_text(folder, events)
    for text in (SECRET, "[" * 100_000, '{"splits": [{"secret": 1}], "_data_files": [{"filename": 3}]}', '"secret"'):
        (folder / name).unlink()
        (folder / name).write_text(text)
        error_text(folder, events)
    with open(folder / name, "wb") as file:
        file.truncate(17 << 20)
    assert "longer than 16 MiB" in error_text(folder, events)


def test_a_fifo_is_rejected_without_blocking(tmp_path: Path, events: Any) -> None:
    os.mkfifo(tmp_path / "data.jsonl")
    with pytest.raises(DataError, match="neither a file nor a folder"):
        find_files(tmp_path / "data.jsonl", events)


def test_a_semicolon_delimiter_emits_a_notice(tmp_path: Path, events: Any) -> None:
    (tmp_path / "data.csv").write_text("prompt;completion\n1,5;2\n")
    assert rows_of(tmp_path / "data.csv", events) == [{"prompt": "1,5", "completion": "2"}]
    assert "semicolons" in events.of("notice")[0]["message"]


def test_a_json_array_with_a_jsonl_extension_emits_a_notice(tmp_path: Path, events: Any) -> None:
    (tmp_path / "data.jsonl").write_text('[{"text": "a"},\n {"text": "b"}]')
    assert rows_of(tmp_path / "data.jsonl", events) == [{"text": "a"}, {"text": "b"}]
    assert "JSON array" in events.of("notice")[0]["message"]
