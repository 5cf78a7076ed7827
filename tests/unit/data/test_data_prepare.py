from __future__ import annotations

import json
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from pantheraml.base.errors import DataError, ModelError, StorageError
from pantheraml.data import chunks, prepare
from pantheraml.data.dataset import TokenDataset

Prepared = Callable[..., prepare.PreparedData]
Write = Callable[..., Path]


def documents(path: Path, tokenizer: Any) -> list[str]:
    """Return the text of every document in the data, sorted."""
    data = TokenDataset.open(path)
    decoded = []
    for index in range(len(data)):
        sequence = data.sequence(index)
        offsets = np.cumsum(sequence.document_lengths)[:-1]
        decoded += [tokenizer.decode(part) for part in np.split(sequence.input_ids, offsets)]
    return sorted(decoded)


def texts(count: int) -> list[dict[str, str]]:
    random = np.random.default_rng(count)
    return [{"text": f"document {i} " + "hello " * int(random.integers(0, 12))} for i in range(count)]


def test_every_row_becomes_one_document(write_jsonl: Write, prepared: Prepared, tokenizer: Any, events: Any) -> None:
    rows = texts(200)
    result = prepared(write_jsonl(rows))
    assert documents(result.train, tokenizer) == sorted(f"<s>{row['text']}</s>" for row in rows)
    assert result.eval is None
    assert result.format == "text"
    (ready,) = events.of("data.ready")
    assert (ready["split"], ready["rows"], ready["cached"], ready["packing"]) == ("train", 200, False, True)
    assert "`text`" in events.of("notice")[0]["message"]


def test_the_index_agrees_with_the_sequences(write_jsonl: Write, prepared: Prepared, events: Any) -> None:
    rows = [{"prompt": f"question {i} " * (i % 5 + 1), "completion": f"answer {i}"} for i in range(150)]
    data = TokenDataset.open(prepared(write_jsonl(rows)).train)
    ids = np.arange(len(data))
    sequences = [data.sequence(int(i)) for i in ids]
    assert data.largest_token == max(int(sequence.input_ids.max()) for sequence in sequences)
    assert data.longest_document == max(int(sequence.document_lengths.max()) for sequence in sequences)
    assert data.target_tokens(ids).tolist() == [int((sequence.labels != -100).sum()) for sequence in sequences]
    for sequence in sequences:
        assert len(sequence.input_ids) <= data.seq_len == 64
        assert sequence.document_lengths.sum() == len(sequence.input_ids)
        starts = np.cumsum(sequence.document_lengths) - sequence.document_lengths
        assert (sequence.labels[starts] == -100).all()
        bears_loss = sequence.labels != -100
        assert (sequence.labels[bears_loss] == sequence.input_ids[bears_loss]).all()
    (ready,) = events.of("data.ready")
    assert ready["tokens"] == sum(len(sequence.input_ids) for sequence in sequences)
    assert ready["target_tokens"] == data.target_tokens(ids).sum()
    assert ready["efficiency"] == pytest.approx(ready["tokens"] / (len(data) * 64))
    assert ready["efficiency"] > 0.9


def test_without_packing_every_sequence_is_one_document(write_jsonl: Write, prepared: Prepared) -> None:
    data = TokenDataset.open(prepared(write_jsonl(texts(30)), packing=False).train)
    assert len(data) == 30
    assert not data.packed
    assert all(len(data.sequence(i).document_lengths) == 1 for i in range(30))


def test_all_kinds_of_files_give_the_same_documents(tmp_path: Path, prepared: Prepared, tokenizer: Any) -> None:
    rows = [{"prompt": f'say {i}, "é"\n', "completion": f"é {i}"} for i in range(20)]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    (tmp_path / "a.json").write_text(json.dumps(rows, indent=2, ensure_ascii=False), encoding="utf-8")
    lines = "\n".join('"{}","{}"'.format(r["prompt"].replace('"', '""'), r["completion"]) for r in rows)
    (tmp_path / "a.csv").write_text(f"prompt,completion\n{lines}\n", encoding="utf-8")
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    found = [
        documents(prepared(tmp_path / f"a.{kind}").train, tokenizer) for kind in ("jsonl", "json", "csv", "parquet")
    ]
    assert found[0] == sorted(f"<s>{row['prompt']}{row['completion']}</s>" for row in rows)
    assert found[1] == found[2] == found[3] == found[0]


@pytest.mark.parametrize("packing", [True, False])
def test_the_number_of_workers_does_not_change_the_result(
    write_jsonl: Write, prepared: Prepared, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, packing: bool
) -> None:
    monkeypatch.setattr(chunks, "_CHUNK_BYTES", 500)
    monkeypatch.setattr(prepare, "_BYTES_PER_WORKER", 500)
    path = write_jsonl(texts(200))
    stored = []
    for workers in (1, 2, 3):
        cache = tmp_path / f"cache{workers}"
        result = prepared(path, workers=workers, packing=packing, cache_dir=str(cache), eval_fraction=0.2)
        assert result.eval is not None
        stored.append([(folder.name, (folder / "data.arrow").read_bytes()) for folder in (result.train, result.eval)])
    assert stored[0] == stored[1] == stored[2]


def test_a_second_run_reads_from_the_cache(write_jsonl: Write, prepared: Prepared, events: Any) -> None:
    first = prepared(write_jsonl(texts(20)))
    assert prepared(write_jsonl(texts(20), name="moved.jsonl")) == first
    assert [ready["cached"] for ready in events.of("data.ready")] == [False, True]
    assert [event["stage"] for event in events.of("data.progress")] == ["hash", "tokenize", "hash"]


def test_progress_ends_at_the_total(write_jsonl: Write, prepared: Prepared, events: Any) -> None:
    path = write_jsonl(texts(20))
    prepared(path)
    for event in events.of("data.progress"):
        assert event["done"] == event["total"] == path.stat().st_size


@pytest.mark.parametrize(
    "change",
    [{"seq_len": 32}, {"packing": False}, {"on_long_row": "stop"}, {"on_bad_row": "skip"}, {"eval_fraction": 0.5}],
)
def test_settings_that_change_the_result_change_the_fingerprint(
    write_jsonl: Write, prepared: Prepared, change: dict[str, Any]
) -> None:
    rows = [{"text": f"row {i}"} for i in range(20)]
    plain, changed = (TokenDataset.open(prepared(write_jsonl(rows), **more).train) for more in ({}, change))
    assert plain.fingerprint != changed.fingerprint


def test_another_tokenizer_changes_the_fingerprint(
    write_jsonl: Write, prepared: Prepared, tokenizer: Any, chat_tokenizer: Any
) -> None:
    path = write_jsonl(texts(5))
    assert prepared(path).train != prepared(path, tokenizer=chat_tokenizer).train


def test_earlier_tokenizer_calls_do_not_change_the_fingerprint(
    write_jsonl: Write, prepared: Prepared, tokenizer: Any
) -> None:
    path = write_jsonl(texts(5))
    first = prepared(path).train
    tokenizer(["a b c d e f"], truncation=True, max_length=3)  # the tokenizer keeps this as state
    assert tokenizer.backend_tokenizer.truncation is not None
    assert prepared(path).train == first


def test_the_split_is_by_content(write_jsonl: Write, prepared: Prepared, tokenizer: Any, events: Any) -> None:
    rows = texts(300)
    first = prepared(write_jsonl(rows), eval_fraction=0.25)
    assert first.eval is not None
    held_out = documents(first.eval, tokenizer)
    assert 45 <= len(held_out) <= 105  # 75 expected, standard deviation 7.5
    assert sorted(held_out + documents(first.train, tokenizer)) == sorted(f"<s>{r['text']}</s>" for r in rows)
    again = prepared(write_jsonl([{**row, "id": 1} for row in reversed(rows)] + texts(10)), eval_fraction=0.25)
    assert again.eval is not None
    assert set(held_out) <= set(documents(again.eval, tokenizer))
    assert [ready["split"] for ready in events.of("data.ready")[:2]] == ["train", "eval"]


def test_separate_evaluation_data(write_jsonl: Write, prepared: Prepared, tokenizer: Any, events: Any) -> None:
    evaluation = write_jsonl([{"text": "held out"}], name="eval.jsonl")
    result = prepared(write_jsonl(texts(5)), eval_path=str(evaluation))
    assert result.eval is not None
    assert documents(result.eval, tokenizer) == ["<s>held out</s>"]
    assert [ready["split"] for ready in events.of("data.ready")] == ["train", "eval"]


def test_an_eval_fraction_that_leaves_a_split_empty_is_rejected(write_jsonl: Write, prepared: Prepared) -> None:
    with pytest.raises(DataError, match="leaves no rows for eval"):
        prepared(write_jsonl(texts(3)), eval_fraction=0.001)


def test_a_bad_row_stops_with_its_location(write_jsonl: Write, prepared: Prepared, tmp_path: Path) -> None:
    path = write_jsonl([{"text": "a"}, {"text": 5}, "{not json", {"text": "b"}])
    with pytest.raises(DataError, match="expected a string, found the number 5") as caught:
        prepared(path)
    assert caught.value.where == f"{path}, line 2, field `text`"
    assert "also line 3" in caught.value.what
    assert "on_bad_row=skip" in str(caught.value.fix)
    assert [entry.suffix for entry in (tmp_path / "cache").iterdir()] == [".lock"]


def test_the_last_row_is_validated(write_jsonl: Write, prepared: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "_CHUNK_BYTES", 500)
    monkeypatch.setattr(prepare, "_BYTES_PER_WORKER", 500)
    path = write_jsonl([*texts(200), {"txt": "typo"}])
    with pytest.raises(DataError) as caught:
        prepared(path, workers=2)
    assert caught.value.where == f"{path}, line 201, field `text`"


def test_bad_rows_are_skipped_and_counted(write_jsonl: Write, prepared: Prepared, tokenizer: Any, events: Any) -> None:
    path = write_jsonl([{"text": "a"}, {"text": 5}, "{not json", {"text": "b"}])
    result = prepared(path, on_bad_row="skip")
    assert documents(result.train, tokenizer) == ["<s>a</s>", "<s>b</s>"]
    (ready,) = events.of("data.ready")
    assert (ready["rows"], ready["skipped_rows"]) == (2, 2)
    (warning,) = events.of("warning")
    assert "2 invalid rows" in warning["message"]
    assert "line 3" in warning["message"]


def test_only_bad_rows_are_an_error_even_when_skipping(write_jsonl: Write, prepared: Prepared) -> None:
    path = write_jsonl([{"text": 1}, {"text": 2}])
    with pytest.raises(DataError, match="None of the 2 rows") as caught:
        prepared(path, on_bad_row="skip")
    assert caught.value.where == f"{path}, line 1, field `text`"


def test_a_file_in_another_encoding_is_an_error_with_its_offset(tmp_path: Path, prepared: Prepared) -> None:
    path = tmp_path / "latin.jsonl"
    path.write_bytes('{"text": "ok"}\n{"text": "café"}\n'.encode("latin-1"))
    with pytest.raises(DataError, match="0xe9 at byte offset 28") as caught:
        prepared(path)
    assert caught.value.where == f"{path}, line 2"


def test_a_file_of_nonsense_is_an_error(tmp_path: Path, prepared: Prepared) -> None:
    path = tmp_path / "nonsense.jsonl"
    path.write_text("hello\nworld\n")
    with pytest.raises(DataError, match="not JSON") as caught:
        prepared(path, on_bad_row="skip")
    assert caught.value.where == f"{path}, line 1"
    assert "skip" not in str(caught.value.fix)


@pytest.mark.parametrize(("name", "content"), [("a.jsonl", "\n\n"), ("a.json", "[]"), ("a.csv", "text\n")])
def test_a_file_without_rows_is_an_error(tmp_path: Path, prepared: Prepared, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    for settings in ({}, {"format": "text"}):
        with pytest.raises(DataError, match="no rows"):
            prepared(tmp_path / name, **settings)


def test_missing_columns_list_found_and_accepted_ones(write_jsonl: Write, prepared: Prepared) -> None:
    with pytest.raises(DataError, match="`question`, `answer`") as caught:
        prepared(write_jsonl([{"question": "a", "answer": "b"}]))
    assert "`prompt` + `completion`" in caught.value.what


def test_a_set_format_is_not_detected(write_jsonl: Write, prepared: Prepared, tokenizer: Any, events: Any) -> None:
    rows = [{"text": "a", "prompt": "b", "completion": "c"}]
    assert documents(prepared(write_jsonl(rows), format="text").train, tokenizer) == ["<s>a</s>"]
    assert not [event for event in events.of("notice") if "detected" in event["message"]]


def test_long_rows_are_truncated_and_counted(write_jsonl: Write, prepared: Prepared, events: Any) -> None:
    result = prepared(write_jsonl([{"text": "x" * 200}, {"text": "short"}]), packing=False)
    data = TokenDataset.open(result.train)
    assert max(len(data.sequence(i).input_ids) for i in range(2)) == 64
    (ready,) = events.of("data.ready")
    assert (ready["rows"], ready["truncated_rows"], ready["skipped_rows"]) == (2, 1, 0)


def test_long_rows_can_stop(write_jsonl: Write, prepared: Prepared) -> None:
    path = write_jsonl([{"text": "short"}, {"text": "x" * 200}])
    with pytest.raises(DataError, match=r"has 202 tokens, but data\.seq_len is 64") as caught:
        prepared(path, on_long_row="stop", on_bad_row="skip")
    assert caught.value.where == f"{path}, line 2"


def test_rows_without_targets_are_skipped(write_jsonl: Write, prepared: Prepared, events: Any) -> None:
    long = {"prompt": "x" * 100, "completion": "never reached"}
    result = prepared(write_jsonl([long, {"prompt": "a", "completion": "b"}]))
    assert len(TokenDataset.open(result.train)) == 1
    (ready,) = events.of("data.ready")
    assert (ready["rows"], ready["truncated_rows"], ready["skipped_rows"]) == (1, 1, 1)
    assert "1 rows are skipped" in events.of("warning")[0]["message"]


def test_data_without_targets_is_an_error(write_jsonl: Write, prepared: Prepared) -> None:
    with pytest.raises(DataError, match="has a token that bears loss within"):
        prepared(write_jsonl([{"prompt": "x" * 100, "completion": "never reached"}]))


def test_messages_without_a_chat_template(write_jsonl: Write, prepared: Prepared, chat_tokenizer: Any) -> None:
    path = write_jsonl([{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}])
    with pytest.raises(ModelError, match="chat template"):
        prepared(path)
    result = prepared(path, tokenizer=chat_tokenizer)
    assert result.format == "messages"
    assert TokenDataset.open(result.train).format == "messages"


def test_the_chat_template_is_fingerprinted_for_messages_only(
    write_jsonl: Write, prepared: Prepared, chat_tokenizer: Any
) -> None:
    other = type(chat_tokenizer)(
        tokenizer_object=chat_tokenizer.backend_tokenizer,
        eos_token="</s>",
        chat_template=chat_tokenizer.chat_template.replace("<|im_end|>\n", "<|im_end|>"),
    )
    chat = write_jsonl(
        [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}], name="chat.jsonl"
    )
    text = write_jsonl([{"text": "abc"}], name="text.jsonl")
    assert prepared(chat, tokenizer=chat_tokenizer).train != prepared(chat, tokenizer=other).train
    assert prepared(text, tokenizer=chat_tokenizer).train == prepared(text, tokenizer=other).train


def test_a_tokenizer_without_pad_pads_with_its_end_token(write_jsonl: Write, prepared: Prepared) -> None:
    assert TokenDataset.open(prepared(write_jsonl(texts(3))).train).pad_id == 1


def test_a_tokenizer_without_end_token_is_warned_about(
    write_jsonl: Write, prepared: Prepared, tokenizer: Any, events: Any
) -> None:
    endless = type(tokenizer)(tokenizer_object=tokenizer.backend_tokenizer, bos_token="<s>")
    result = prepared(write_jsonl([{"text": "a b"}]), tokenizer=endless)
    assert documents(result.train, endless) == ["<s>a b"]
    assert TokenDataset.open(result.train).pad_id == 0
    assert "end-of-sequence" in events.of("warning")[0]["message"]


def test_a_full_disk_leaves_nothing_behind(write_jsonl: Write, prepared: Prepared, tmp_path: Path) -> None:
    path = write_jsonl(texts(2000))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        with pytest.raises(StorageError, match="the disk is full"):
            prepared(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [entry.suffix for entry in (tmp_path / "cache").iterdir()] == [".lock"]
    assert len(TokenDataset.open(prepared(path).train)) > 0


def test_a_cache_that_cannot_be_written_is_a_storage_error(
    write_jsonl: Write, prepared: Prepared, tmp_path: Path
) -> None:
    (tmp_path / "a file").touch()
    with pytest.raises(StorageError, match="cannot be written") as caught:
        prepared(write_jsonl(texts(3)), cache_dir=str(tmp_path / "a file"))
    assert "data.cache_dir" in str(caught.value.fix)
