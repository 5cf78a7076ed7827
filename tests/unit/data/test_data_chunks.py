from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from pantheraml.base.errors import DataError
from pantheraml.data import chunks
from pantheraml.data.rows import RowError


def rows_of(found: Any) -> list[tuple[int, Any]]:
    return [(number, str(row) if isinstance(row, RowError) else row) for chunk in found for number, row in chunk.rows()]


def write(tmp_path: Path, data: bytes | str) -> Path:
    path = tmp_path / "file"
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


@pytest.mark.parametrize("size", [1, 3, 7, 64, 1 << 20])
def test_lines_are_complete_and_numbered_for_any_chunk_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(chunks, "_CHUNK_BYTES", size)
    path = write(tmp_path, '{"text": "é"}\r\n\n{"text": "\u2028"}\n  \n{"text": "last"}')
    expected = [(1, {"text": "é"}), (3, {"text": "\u2028"}), (5, {"text": "last"})]
    assert rows_of(chunks.read_lines(path, plain=False)) == expected


def test_a_text_file_is_one_document_per_line(tmp_path: Path) -> None:
    path = write(tmp_path, "\ufefffirst line\r\n\n   \nsecond\n")
    assert rows_of(chunks.read_lines(path, plain=True)) == [(1, {"text": "first line"}), (4, {"text": "second"})]


def test_a_file_with_only_a_byte_order_mark_has_no_rows(tmp_path: Path) -> None:
    assert rows_of(chunks.read_lines(write(tmp_path, "\ufeff"), plain=True)) == []


def test_a_line_that_is_not_an_object_is_described(tmp_path: Path) -> None:
    path = write(tmp_path, '{"text": \n[1]\n"x"\n3\n' + "y" * 500)
    problems = rows_of(chunks.read_lines(path, plain=False))
    assert [number for number, _ in problems] == [1, 2, 3, 4, 5]
    assert "not JSON" in problems[0][1]
    assert [problem.partition("found ")[2] for _, problem in problems[1:4]] == [
        "the list [1]",
        "the string 'x'",
        "the number 3",
    ]
    assert len(problems[4][1]) < 200


def test_invalid_utf8_is_reported_with_line_and_offset(tmp_path: Path) -> None:
    path = write(tmp_path, b'\xef\xbb\xbf{"text": "a"}\n{"text": "caf\xe9"}\n{"text": "b"}\n')
    rows = rows_of(chunks.read_lines(path, plain=False))
    assert rows[0] == (1, {"text": "a"})
    assert rows[2] == (3, {"text": "b"})
    offset = path.read_bytes().index(b"\xe9")
    assert rows[1] == (2, f"expected UTF-8 text, found byte 0xe9 at byte offset {offset}")


@pytest.mark.parametrize("read", [chunks.read_json, chunks.read_csv, lambda path: chunks.read_lines(path, plain=True)])
def test_utf16_is_rejected(tmp_path: Path, read: Any) -> None:
    path = write(tmp_path, "text\nhello".encode("utf-16"))
    with pytest.raises(DataError, match="UTF-16"):
        list(read(path))


@pytest.mark.parametrize("size", [1, 5, 40, 1 << 20])
def test_a_json_array_is_read_element_by_element(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(chunks, "_CHUNK_BYTES", size)
    rows = [{"text": "é]},[{"}, {"text": 'quoted "x"', "n": [1, {"a": -1.5e3}]}, {"text": "\U0001f600"}]
    path = write(tmp_path, "\ufeff" + json.dumps(rows, indent=1, ensure_ascii=False) + "\n")
    found = rows_of(chunks.read_json(path))
    assert [row for _, row in found] == rows
    text = path.read_text(encoding="utf-8")
    starts = [text.index(mark) for mark in ('{\n  "text": "é', '{\n  "text": "quoted', '{\n  "text": "\U0001f600')]
    assert [number for number, _ in found] == [text.count("\n", 0, start) + 1 for start in starts]


def test_numbers_at_the_window_edge_are_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "_CHUNK_BYTES", 2)
    assert rows_of(chunks.read_json(write(tmp_path, "[12345, {}]"))) == [
        (1, "expected a JSON object, found the number 12345"),
        (1, {}),
    ]


@pytest.mark.parametrize(
    ("text", "problem", "line"),
    [
        ('[{"text": "a"},\n{"text": ', "not JSON", 2),
        ('[{"text": "a"}\n', "ends inside", 2),
        ('[{"text": "a"}\n{"text": "b"}]', "expected `,`", 2),
        ('[{"text": "a"}]\n\n[]', "follows the end", 1),
        ('[\n{text: "a"}' + " " * 99 + "]", "not JSON", 2),
    ],
)
def test_a_broken_array_reports_its_line(tmp_path: Path, text: str, problem: str, line: int) -> None:
    with pytest.raises(DataError, match=problem) as caught:
        list(chunks.read_json(write(tmp_path, text)))
    assert caught.value.where is not None
    assert caught.value.where.endswith(f"line {line}")


def test_a_syntax_error_does_not_read_the_rest_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "_CHUNK_BYTES", 64)
    path = write(tmp_path, "[{bad}" + " " * 100_000 + "]")
    text = chunks._SlidingText(path)
    text.skip("[")
    with pytest.raises(DataError):
        text.element()
    assert len(text._text) < 200


def test_wrong_encoding_in_an_array_reports_line_and_offset(tmp_path: Path) -> None:
    path = write(tmp_path, b'[\n{"text": "caf\xe9"}]')
    with pytest.raises(DataError, match="0xe9 at byte offset 15") as caught:
        list(chunks.read_json(path))
    assert caught.value.where == f"{path}, line 2"


def test_json_lines_with_a_json_extension_are_read(tmp_path: Path) -> None:
    assert rows_of(chunks.read_json(write(tmp_path, '{"text": "a"}\n{"text": "b"}\n'))) == [
        (1, {"text": "a"}),
        (2, {"text": "b"}),
    ]


def test_csv_with_quotes_line_breaks_and_long_fields(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "_CHUNK_BYTES", 20)
    limit = csv.field_size_limit()
    long = "x" * 200_000
    path = write(tmp_path, f'\ufeffprompt,completion\r\n"a, ""b""\nc",d\r\ne,{long}\r\n\r\nonly one\r\n"é",f\r\n')
    assert rows_of(chunks.read_csv(path)) == [
        (2, {"prompt": 'a, "b"\nc', "completion": "d"}),
        (4, {"prompt": "e", "completion": long}),
        (6, "expected 2 fields (prompt, completion), found 1"),
        (7, {"prompt": "é", "completion": "f"}),
    ]
    assert csv.field_size_limit() == limit


def test_csv_errors_report_the_line(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not valid CSV") as caught:
        list(chunks.read_csv(write(tmp_path, 'a,b\n1,2\n"x"y,2\n')))
    assert str(caught.value.where).endswith("line 3")
    with pytest.raises(DataError, match="0xff at byte offset 6") as caught:
        list(chunks.read_csv(write(tmp_path, b"a,b\n1,\xff\n")))
    assert str(caught.value.where).endswith("line 2")


LONG = {
    "array": ('[{"text": "a"},\n{"text": "' + "x" * 3000 + '"}]', chunks.read_json),
    "array of spaces": ("[\n1" + "0" * 3000 + "]", chunks.read_json),
    "field": ("text\n" + "x" * 3000 + "\n", chunks.read_csv),
    "open quote": ('text\n"' + "some words\n" * 300, chunks.read_csv),
    "many fields": ("text\n" + "x," * 1500 + "\n", chunks.read_csv),
}


@pytest.mark.parametrize("size", [64, 1 << 20])
@pytest.mark.parametrize("end", ["", "\n", "\nlast\n"])
def test_a_line_over_the_size_limit_is_a_bad_row_and_not_kept_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, end: str
) -> None:
    monkeypatch.setattr(chunks, "MAX_ROW_BYTES", 1000)
    monkeypatch.setattr(chunks, "_CHUNK_BYTES", size)
    text = "first\n" + "x" * (2 * size + 3000) + end
    found = list(chunks.read_lines(write(tmp_path, text), plain=True))
    assert rows_of(found)[:2] == [
        (1, {"text": "first"}),
        (2, "expected a shorter row: it is longer than 16 MiB, the maximum for one row"),
    ]
    assert rows_of(found)[2:] == ([(3, {"text": "last"})] if "last" in end else [])
    assert max(len(getattr(chunk, "data", b"")) for chunk in found) < size + 1000


@pytest.mark.parametrize("what", LONG)
def test_a_row_over_the_size_limit_is_rejected_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(chunks, "MAX_ROW_BYTES", 1000)
    monkeypatch.setattr(chunks, "_CHUNK_BYTES", 64)
    text, read = LONG[what]
    with pytest.raises(DataError, match="longer than 16 MiB") as caught:
        list(read(write(tmp_path, text)))
    assert ", line" in str(caught.value.where)


def test_a_long_element_is_not_retried_for_every_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "_CHUNK_BYTES", 16)
    path = write(tmp_path, json.dumps([{"text": "x" * 100_000}]))
    tries = []
    text = chunks._SlidingText(path)
    decode = text._decoder.raw_decode
    monkeypatch.setattr(text._decoder, "raw_decode", lambda *given: tries.append(1) or decode(*given))
    text.skip("[")
    assert text.element() == {"text": "x" * 100_000}
    assert len(tries) < 20


@pytest.mark.parametrize("depth", [100, 100_000])
@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_deep_nesting_makes_a_bad_row(tmp_path: Path, depth: int, opening: str) -> None:
    closing = {"[": "]", '{"a":': "}"}[opening]
    deep = '{"text": ' + opening * depth + "1" + closing * depth + "}"
    lines = rows_of(chunks.read_lines(write(tmp_path, f'{deep}\n{{"text": "b"}}'), plain=False))
    assert lines == [(1, "expected at most 64 levels of lists and objects, found more"), (2, {"text": "b"})]
    if depth == 100:
        assert rows_of(chunks.read_json(write(tmp_path, f"[{deep}]")))[0] == lines[0]
    else:
        with pytest.raises(DataError, match="64 levels"):
            list(chunks.read_json(write(tmp_path, f"[{deep}]")))


def test_nesting_within_the_limit_is_read(tmp_path: Path) -> None:
    value: Any = "x"
    for _ in range(60):
        value = [value]
    assert rows_of(chunks.read_lines(write(tmp_path, json.dumps({"text": value})), plain=False)) == [
        (1, {"text": value})
    ]


@pytest.mark.parametrize("mark", [",", ";", "\t", "|"])
def test_the_csv_delimiter_is_detected_from_the_header(tmp_path: Path, mark: str) -> None:
    path = write(tmp_path, f'\ufeff"prompt"{mark}completion\r\n"a{mark}b"{mark}c, d; e\r\n'.replace("c, d; e", "c d"))
    assert chunks.csv_delimiter(path) == mark
    assert rows_of(chunks.read_csv(path)) == [(2, {"prompt": f"a{mark}b", "completion": "c d"})]


@pytest.mark.parametrize("header", ["text", "", '"a;b;c",d', "a|b,c", "text\n1;2;3;4", "x" * 200_000 + ";y"])
def test_the_default_csv_delimiter_is_a_comma(tmp_path: Path, header: str) -> None:
    assert chunks.csv_delimiter(write(tmp_path, header)) == ","
