from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from pantheraml.base.errors import DataError
from pantheraml.data import bounds, columnar
from pantheraml.data.rows import RowError


def rows_of(found: Any) -> list[tuple[int, Any]]:
    return [(number, str(row) if isinstance(row, RowError) else row) for chunk in found for number, row in chunk.rows()]


def test_parquet_and_arrow_rows_are_numbered_across_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columnar, "_BATCH_ROWS", 3)
    table = pa.table({"text": [f"row {i}" for i in range(1, 11)]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=4)
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=5)
    expected = [(i, {"text": f"row {i}"}) for i in range(1, 11)]
    assert rows_of(columnar.read_parquet(tmp_path / "a.parquet")) == expected
    assert rows_of(columnar.read_arrow(tmp_path / "a.arrow")) == expected


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_a_pickled_chunk_does_not_carry_its_whole_batch(tmp_path: Path, kind: str) -> None:
    table = pa.table({"text": ["x" * 100] * 20_000})
    path = tmp_path / f"a.{kind}"
    if kind == "parquet":
        pyarrow.parquet.write_table(table, path)
    else:
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table)
    read = columnar.read_parquet if kind == "parquet" else columnar.read_arrow
    sizes = [len(pickle.dumps(chunk)) for chunk in read(path)]
    assert len(sizes) == 40
    assert max(sizes) < 512 * 110 + 2000


@pytest.mark.parametrize("read", [columnar.read_parquet, columnar.read_arrow])
def test_a_file_that_is_not_arrow_is_rejected(tmp_path: Path, read: Any) -> None:
    path = tmp_path / "file"
    path.write_text("not arrow at all")
    with pytest.raises(DataError, match="cannot be read as"):
        list(read(path))


# reads a file in a subprocess without torch: an out-of-bounds read would crash pytest itself
READ = """
import resource, sys
from pathlib import Path
from pantheraml.base.errors import DataError
from pantheraml.data import columnar
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    read = getattr(columnar, sys.argv[1])
    print(sum(len(str(row)) for chunk in read(Path(sys.argv[2])) for _, row in chunk.rows()), "characters")
except DataError as err:
    print(str(err))
assert "torch" not in sys.modules
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def read_in_child(reader: str, path: Path) -> tuple[str, int]:
    """Return the output of reading and the memory it used, in MiB."""
    done = subprocess.run(
        [sys.executable, "-c", READ, reader, str(path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    output, _, used_mib = done.stdout.strip().rpartition("\n")
    return output, int(used_mib)


def arrow_stream(column: Any) -> bytearray:
    sink = pa.BufferOutputStream()
    batch = pa.record_batch([column], names=["text"])
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return bytearray(sink.getvalue().to_pybytes())


def replaced(data: bytearray, before: list[int], after: list[int]) -> bytes:
    """Return the stream with other int32 values in one of its buffers."""
    old, new = (np.array(values, dtype=np.int32).tobytes() for values in (before, after))
    assert data.count(old) == 1
    return bytes(data.replace(old, new))


FIVE = ["aaaaa", "bbbbb"]
CRAFTED = {
    "offsets": replaced(arrow_stream(pa.array(FIVE)), [0, 5, 10], [0, 5, 1 << 30]),
    "list": replaced(arrow_stream(pa.array([[7], [7, 7, 7, 7, 7]])), [0, 1, 6], [0, 1, 1 << 29]),
    "dictionary index": replaced(
        arrow_stream(pa.DictionaryArray.from_arrays(pa.array([0, 1, 1, 0, 1], pa.int32()), FIVE)),
        [0, 1, 1, 0, 1],
        [0, 1, 1 << 29, 0, 1],
    ),
    "dictionary values": replaced(
        arrow_stream(pa.DictionaryArray.from_arrays(pa.array([0, 1, 1, 0, 1], pa.int32()), FIVE)),
        [0, 5, 10],
        [0, 5, 1 << 30],
    ),
}


@pytest.mark.parametrize("what", CRAFTED)
def test_a_batch_with_out_of_bounds_offsets_is_rejected(tmp_path: Path, what: str) -> None:
    path = tmp_path / "data.arrow"
    path.write_bytes(CRAFTED[what])
    output, _ = read_in_child("read_arrow", path)
    assert "cannot be read as Arrow" in output
    assert str(path) in output


def test_invalid_utf8_in_arrow_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "data.arrow"
    path.write_bytes(bytes(arrow_stream(pa.array(FIVE)).replace(b"aaaaa", b"aa\xffaa")))
    with pytest.raises(DataError, match="UTF8"):
        list(columnar.read_arrow(path))


def test_a_decompression_bomb_is_rejected_within_the_memory_limit(tmp_path: Path) -> None:
    path = tmp_path / "bomb.parquet"
    text = pa.DictionaryArray.from_arrays(pa.array([0] * 1024, pa.int32()), ["x" * 7_000_000])
    with pyarrow.parquet.ParquetWriter(path, pa.schema([("text", text.type)]), compression="zstd") as writer:
        writer.write_table(pa.table({"text": text}))
    assert path.stat().st_size < 10_000
    output, used_mib = read_in_child("read_parquet", path)
    assert f"more than {bounds.MAX_DECODE_BYTES >> 20} MiB" in output
    assert used_mib < (bounds.MAX_DECODE_BYTES >> 20) + 600


def save(table: Any, path: Path, reader: str) -> None:
    if reader == "read_parquet":
        pyarrow.parquet.write_table(table, path)
    else:
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table)


@pytest.mark.parametrize("reader", ["read_parquet", "read_arrow"])
def test_a_row_over_the_size_limit_is_a_bad_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reader: str) -> None:
    monkeypatch.setattr(columnar, "MAX_ROW_BYTES", 1 << 20)
    monkeypatch.setattr(columnar, "_CHUNK_BYTES", 1 << 20)
    save(pa.table({"text": ["x" * 300_000] * 9 + ["y" * (2 << 20), "z"]}), tmp_path / "file", reader)
    found = list(getattr(columnar, reader)(tmp_path / "file"))
    rows = rows_of(found)
    assert [number for number, _ in rows] == list(range(1, 12))
    assert rows[9][1] == "expected a shorter row: it is longer than 16 MiB, the maximum for one row"
    assert rows[10][1] == {"text": "z"}
    assert max(len(getattr(chunk, "data", b"")) for chunk in found) < (1 << 20) + 2000


@pytest.mark.parametrize("reader", ["read_parquet", "read_arrow"])
def test_a_small_file_with_excessive_rows_is_rejected(tmp_path: Path, reader: str) -> None:
    path = tmp_path / "file"
    if reader == "read_parquet":
        save(pa.table({"text": ["x"] * 300_000}), path, reader)
    else:  # 2^40 rows, which Arrow accepts, since nulls take no memory
        many, more = (np.array([count], dtype=np.int64).tobytes() for count in (123_457, 1 << 40))
        path.write_bytes(bytes(arrow_stream(pa.nulls(123_457))).replace(many, more))
    maximum = bounds.ROWS_BASE + bounds.ROWS_PER_BYTE * path.stat().st_size
    assert maximum < 90_000
    with pytest.raises(DataError, match=f"more than {maximum} rows") as raised:
        list(getattr(columnar, reader)(path))
    assert raised.value.where == str(path)


def test_a_small_file_with_excessive_values_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columnar, "DECODED_BASE", 1 << 20)
    text = pa.DictionaryArray.from_arrays(pa.array([0] * 10_000, pa.int32()), ["x" * 5_000])
    pyarrow.parquet.write_table(pa.table({"text": text}), tmp_path / "a.parquet", compression="zstd")
    with pytest.raises(DataError, match=r"more than \d+ MiB of values"):
        list(columnar.read_parquet(tmp_path / "a.parquet"))


LONG_VALUE = "x" * 3_000_000
REPEATED = {
    "dictionary": pa.DictionaryArray.from_arrays(pa.array([0] * 2000, pa.int32()), [LONG_VALUE]),
    "dictionary in lists": pa.ListArray.from_arrays(
        pa.array(range(2001), pa.int32()),
        pa.DictionaryArray.from_arrays(pa.array([0] * 2000, pa.int32()), [LONG_VALUE]),
    ),
}


@pytest.mark.parametrize("what", REPEATED)
def test_a_dictionary_value_counts_for_each_of_its_rows(tmp_path: Path, what: str) -> None:
    save(pa.table({"text": REPEATED[what]}), tmp_path / "data.arrow", "read_arrow")
    output, used_mib = read_in_child("read_arrow", tmp_path / "data.arrow")
    assert f"more than {bounds.MAX_DECODE_BYTES >> 20} MiB" in output
    assert used_mib < (bounds.MAX_DECODE_BYTES >> 20) + 600


def test_run_end_encoding_is_rejected(tmp_path: Path) -> None:
    """Arrow cannot expand run-end encoding, so the size of the rows is unknown before they are decoded."""
    runs = pa.RunEndEncodedArray.from_arrays(pa.array([2000], pa.int32()), ["x"])
    save(pa.table({"text": runs}), tmp_path / "data.arrow", "read_arrow")
    with pytest.raises(DataError, match="run_end_encoded"):
        list(columnar.read_arrow(tmp_path / "data.arrow"))


@pytest.mark.parametrize("kind", [pa.dictionary(pa.int32(), pa.string()), pa.string_view(), pa.large_string()])
def test_other_types_of_text_are_read_as_text(tmp_path: Path, kind: Any) -> None:
    values = ["a", "b" * 40, "a", None]
    save(pa.table({"text": pa.array(values).cast(kind)}), tmp_path / "data.arrow", "read_arrow")
    assert [row["text"] for _, row in rows_of(columnar.read_arrow(tmp_path / "data.arrow"))] == values


def test_columns_nested_over_the_limit_are_rejected(tmp_path: Path) -> None:
    value: Any = "x"
    for _ in range(bounds.MAX_NESTING + 1):
        value = {"x": value}
    path = tmp_path / "deep.parquet"
    pyarrow.parquet.write_table(pa.table({"text": [value]}), path)
    with pytest.raises(DataError, match="deeper than 64"):
        list(columnar.read_parquet(path))


def test_keys_that_arrow_filled_with_null_are_dropped_at_any_depth(tmp_path: Path) -> None:
    rows = [{"tools": [{"name": "f", "parameters": {"a": 1}}]}, {"tools": [{"name": "g", "parameters": {"b": [2]}}]}]
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert [row for _, row in rows_of(columnar.read_parquet(tmp_path / "a.parquet"))] == rows


def test_a_value_that_python_cannot_represent_is_a_data_error(tmp_path: Path) -> None:
    table = pa.table({"text": ["a"], "when": pa.array([2**31 - 1], pa.date32())})  # a date after the year 9999
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(DataError, match="cannot be read"):
        rows_of(columnar.read_parquet(tmp_path / "a.parquet"))
