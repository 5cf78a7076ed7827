from __future__ import annotations

import json
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


def test_a_missing_file_is_named(tmp_path: Path, events: Any) -> None:
    with pytest.raises(DataError, match=r"no data at .*nowhere\.jsonl"):
        find_files(tmp_path / "nowhere.jsonl", events)


def test_an_empty_file_is_named(tmp_path: Path, events: Any) -> None:
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(DataError, match="empty") as caught:
        find_files(tmp_path / "empty.jsonl", events)
    assert caught.value.where == str(tmp_path / "empty.jsonl")


def test_an_unknown_type_lists_the_known_ones(tmp_path: Path, events: Any) -> None:
    (tmp_path / "data.xlsx").write_bytes(b"x")
    with pytest.raises(DataError, match="not known") as caught:
        find_files(tmp_path / "data.xlsx", events)
    assert ".parquet" in str(caught.value.todo)


def test_a_folder_is_read_in_the_order_of_names_and_says_what_it_leaves_out(tmp_path: Path, events: Any) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.jsonl").write_text('{"text": "b"}\n')
    (tmp_path / "a.txt").write_text("a\n")
    (tmp_path / "sub" / "c.csv").write_text("text\nc\n")
    (tmp_path / ".hidden.jsonl").write_text("nonsense")
    (tmp_path / "README.md").write_text("words")
    assert rows_of(tmp_path, events) == [{"text": "a"}, {"text": "b"}, {"text": "c"}]
    assert "README.md" in events.of("notice")[0]["message"]


def test_a_folder_without_data_is_refused(tmp_path: Path, events: Any) -> None:
    with pytest.raises(DataError, match="no data files"):
        find_files(tmp_path, events)


def save(folder: Path, shards: list[list[dict[str, str]]]) -> None:
    """What `Dataset.save_to_disk` leaves in a folder."""
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


def test_of_a_saved_dictionary_the_train_split_is_read(tmp_path: Path, events: Any) -> None:
    for name in ("test", "train"):
        save(tmp_path / "saved" / name, [[{"text": name}]])
    (tmp_path / "saved" / "dataset_dict.json").write_text(json.dumps({"splits": ["test", "train"]}))
    assert rows_of(tmp_path / "saved", events) == [{"text": "train"}]
    assert "`train` is used" in events.of("notice")[0]["message"]
    assert rows_of(tmp_path / "saved" / "test", events) == [{"text": "test"}]


def test_a_saved_dictionary_without_train_lists_its_splits(tmp_path: Path, events: Any) -> None:
    (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": ["dev", "test"]}))
    with pytest.raises(DataError, match="dev, test"):
        find_files(tmp_path, events)


def test_a_saved_folder_that_lacks_a_file_is_refused(tmp_path: Path, events: Any) -> None:
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


def test_where_files_are_divided_counts(tmp_path: Path, events: Any) -> None:
    for folder, parts in (("x", ("ab", "c")), ("y", ("a", "bc"))):
        (tmp_path / folder).mkdir()
        for index, part in enumerate(parts):
            (tmp_path / folder / f"{index}.txt").write_text(part)
    assert digest(tmp_path / "x", events) != digest(tmp_path / "y", events)


def test_a_file_that_grows_while_it_is_read_is_refused(tmp_path: Path, events: Any) -> None:
    path = tmp_path / "data.txt"
    path.write_text("one\n")
    (source,) = find_files(path, events)
    with path.open("a") as file:
        file.write("two\n")
    with pytest.raises(DataError, match="changed while"):
        list(source.chunks())


def test_arrow_files_of_the_wrong_kind_are_refused(tmp_path: Path, events: Any) -> None:
    (tmp_path / "data.parquet").write_bytes(pa.py_buffer(b"PAR1 but not really"))
    (source,) = find_files(tmp_path / "data.parquet", events)
    with pytest.raises(DataError, match="Parquet"):
        list(source.chunks())
