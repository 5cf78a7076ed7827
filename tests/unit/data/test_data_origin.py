"""Every document of prepared data is traced to its file and row, through splitting, truncation and packing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from pantheraml.data import origin
from pantheraml.data.dataset import TokenDataset
from pantheraml.data.origin import Document, Origin, Origins, first_words, summarize_origins
from pantheraml.data.prepare import prepare
from pantheraml.models.loader import load_tokenizer
from pantheraml.specs.train import DataConfig, ModelConfig
from tests import toy
from tests.harness import silent


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tokenizer")
    toy.write_tokenizer(folder)
    return load_tokenizer(ModelConfig(path=str(folder)))


@pytest.mark.parametrize("packing", [True, False])
def test_documents_are_traced_to_file_and_row(tmp_path: Path, tokenizer: Any, packing: bool) -> None:
    rows = [{"text": f"{number} {'word ' * (number % 7)}"} for number in range(60)]
    folder = tmp_path / "data"
    folder.mkdir()
    lines = [json.dumps(row) for row in rows[:20]]
    lines.insert(3, "")  # counts as a line
    lines.insert(9, '{"text": 5}')  # an invalid row
    (folder / "a.jsonl").write_text("\n".join(lines))
    (folder / "b.jsonl").write_text('{"text": []}\n')  # a file without a document
    (folder / "c.csv").write_text("text\n" + "\n".join(row["text"] for row in rows[20:40]))
    pa.parquet.write_table(pa.Table.from_pylist(rows[40:]), folder / "d.parquet")
    config = DataConfig(
        path=str(folder),
        seq_len=32,
        packing=packing,
        on_bad_row="skip",
        eval_fraction=0.3,
        cache_dir=str(tmp_path / "cache"),
    )
    prepared = prepare(config, tokenizer=tokenizer, emit=silent)
    assert [unit for _, unit in prepared.sources] == ["line", "line", "line", "row"]
    assert prepared.eval is not None
    seen = []
    for place in (prepared.train, prepared.eval):
        dataset = TokenDataset.open(place)
        origins = Origins(dataset, prepared.sources, lambda: tokenizer)
        for sample in range(len(dataset)):
            (found,) = origins([sample])
            assert found.count == len(dataset.sequence(sample).document_lengths)
            seen += found.documents
    assert len(seen) == len(rows)
    for document in seen:
        assert document.file is not None
        assert document.number is not None
        name, number = Path(document.file).name, document.number
        if name == "a.jsonl":
            text = json.loads(lines[number - 1])["text"]
        else:
            text = rows[number + 18]["text"] if name == "c.csv" else rows[number + 39]["text"]
        assert first_words(f"{text}<eos>").startswith(document.text)
        assert document.unit == ("row" if name == "d.parquet" else "line")


def test_a_token_position_finds_its_document(tmp_path: Path, tokenizer: Any) -> None:
    toy.write_jsonl(tmp_path / "data.jsonl", [{"text": f"number {number}"} for number in range(30)])
    config = DataConfig(path=str(tmp_path / "data.jsonl"), seq_len=256, cache_dir=str(tmp_path / "cache"))
    prepared = prepare(config, tokenizer=tokenizer, emit=silent)
    dataset = TokenDataset.open(prepared.train)
    lengths = dataset.sequence(0).document_lengths.tolist()
    assert len(lengths) > origin.MAX_DOCUMENTS
    origins = Origins(dataset, prepared.sources, lambda: tokenizer)
    (before,) = origins([0])
    assert not any(document.suspect for document in before.documents)
    for number in (0, 5, len(lengths) - 1):
        for token in (sum(lengths[:number]), sum(lengths[: number + 1]) - 1):
            (found,) = origins([0], [token])
            first, *others = found.documents
            assert first.suspect
            assert not any(document.suspect for document in others)
            assert len(found.documents) == origin.MAX_DOCUMENTS
            if number < origin.MAX_DOCUMENTS:
                assert first.number == before.documents[number].number
    (padding,) = origins([0], [sum(lengths)])
    assert padding == before


def test_first_words() -> None:
    assert first_words("  a\n\tb  c ") == "a b c"
    assert first_words("\x1b[2Jx\x00\u202e") == "\\x1b[2Jx\\x00\\u202e"
    assert first_words("ab " * 40) == ("ab " * 20).strip() + "..."


def test_summarize_origins() -> None:
    documents = [Document(f"/data/{number}.jsonl", "line", number, f"text {number}") for number in range(5)]
    assert summarize_origins([Origin(3, documents[:1], 1)]) == '0.jsonl line 0 "text 0"'
    assert summarize_origins([Origin(3, documents[:2], 2), Origin(4, documents[2:], 9)]) == (
        '0.jsonl line 0 "text 0", 1.jsonl line 1 "text 1", 2.jsonl line 2 "text 2" and 8 more'
    )
    assert summarize_origins([Origin(3, [Document(None, None, None, "text")], 1)]) == '"text"'
