"""Which files a data path stands for, what they hold, and what identifies their content.

A path is a file (.jsonl, .ndjson, .json, .csv, .parquet, .txt), a folder of such files (searched recursively, taken in
the order of their relative names), or a folder saved by `datasets`. A text file holds one document per line, as the
`datasets` library reads it; documents of several lines belong into JSON Lines.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pantheraml.base.errors import DataError
from pantheraml.base.events import Emit
from pantheraml.data import chunks
from pantheraml.data.rows import Chunk

Kind = Literal["jsonl", "json", "csv", "parquet", "text", "arrow"]

_KINDS: dict[str, Kind] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".parquet": "parquet",
    ".txt": "text",
}
_ACCEPTED = "a .jsonl, .ndjson, .json, .csv, .parquet or .txt file, a folder of these, or a folder saved by `datasets`"
_HASH_BLOCK = 1 << 20


@dataclass(frozen=True)
class SourceFile:
    path: Path
    kind: Kind
    size: int
    modified_ns: int

    def chunks(self) -> Iterator[Chunk]:
        """The file piece by piece; refuses a file that has changed since it was found."""
        try:
            yield from self._read()
        except OSError as err:
            raise DataError(f"The file cannot be read: {err}.", where=str(self.path), todo="Check the file.") from err
        if _stat(self.path) != (self.size, self.modified_ns):
            raise DataError(
                "The file changed while it was being read.", where=str(self.path), todo="Run again when it is complete."
            )

    def _read(self) -> Iterator[Chunk]:
        match self.kind:
            case "jsonl":
                yield from chunks.read_lines(self.path, plain=False)
            case "text":
                yield from chunks.read_lines(self.path, plain=True)
            case "json":
                yield from chunks.read_json(self.path)
            case "csv":
                yield from chunks.read_csv(self.path)
            case "parquet":
                yield from chunks.read_parquet(self.path)
            case "arrow":
                yield from chunks.read_arrow(self.path)


def find_files(path: Path, emit: Emit) -> list[SourceFile]:
    """The files behind a data path, in their fixed order."""
    if not path.exists():
        raise DataError(f"There is no data at {path}.", todo=f"Check the path; it should be {_ACCEPTED}.")
    if not path.is_dir():
        if path.suffix.lower() not in _KINDS:
            raise DataError(f"The file type of {path} is not known.", todo=f"Give {_ACCEPTED}.")
        files = [(path, _KINDS[path.suffix.lower()])]
    elif (path / "state.json").is_file():
        files = [(file, "arrow") for file in _saved_files(path)]
    elif (path / "dataset_dict.json").is_file():
        files = [(file, "arrow") for file in _saved_files(_train_split(path, emit))]
    else:
        files = list(_folder(path, emit))
    found = [SourceFile(file, kind, *_stat(file)) for file, kind in files]
    for source in found:
        if source.size == 0:
            raise DataError("The data file is empty.", where=str(source.path), todo="Check how it was written.")
    return found


def _folder(path: Path, emit: Emit) -> Iterator[tuple[Path, Kind]]:
    visible = sorted(
        (file.relative_to(path).parts, file)
        for file in path.rglob("*")
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(path).parts)
    )
    ignored = [file.name for _, file in visible if file.suffix.lower() not in _KINDS]
    usable = [file for _, file in visible if file.suffix.lower() in _KINDS]
    if not usable:
        raise DataError(f"The folder {path} holds no data files.", todo=f"Give {_ACCEPTED}.")
    if ignored:
        names = ", ".join(ignored[:5]) + (", ..." if len(ignored) > 5 else "")
        emit("notice", message=f"{len(ignored)} files in {path} are not data files and are left out: {names}")
    for file in usable:
        yield file, _KINDS[file.suffix.lower()]


def _saved_files(folder: Path) -> list[Path]:
    """The Arrow files of a folder written by `Dataset.save_to_disk`, in the order that its state.json lists them."""
    state = _read_json(folder / "state.json")
    listed = state.get("_data_files") if isinstance(state, dict) else None
    if not isinstance(listed, list) or not all(isinstance(entry, dict) and "filename" in entry for entry in listed):
        raise DataError(
            "The folder's state.json does not list its data files.",
            where=str(folder / "state.json"),
            todo="Save the data set again with `save_to_disk`.",
        )
    files = [folder / entry["filename"] for entry in listed]
    for file in files:
        if not file.is_file():
            raise DataError(
                f"The data set lacks its file {file.name}.", where=str(folder), todo="Copy the whole folder again."
            )
    return files


def _train_split(folder: Path, emit: Emit) -> Path:
    listed = _read_json(folder / "dataset_dict.json")
    splits = listed.get("splits", []) if isinstance(listed, dict) else []
    split = "train" if "train" in splits else splits[0] if len(splits) == 1 else None
    if split is None:
        raise DataError(
            f"The data set at {folder} has no split `train`; it has: {', '.join(splits) or 'none'}.",
            todo=f"Give the folder of one split, such as {folder / (splits[0] if splits else 'train')}.",
        )
    if len(splits) > 1:
        emit("notice", message=f"{folder} holds the splits {', '.join(splits)}; `{split}` is used")
    return folder / str(split)


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as err:
        raise DataError(f"The file cannot be read: {err}.", where=str(path), todo="Save the data set again.") from err


def _stat(path: Path) -> tuple[int, int]:
    try:
        stat = path.stat()
    except OSError as err:
        raise DataError(f"The file cannot be read: {err.strerror}.", where=str(path), todo="Check the path.") from err
    return stat.st_size, stat.st_mtime_ns


def content_digest(files: Iterable[SourceFile], advance: Callable[[int], None]) -> str:
    """A hash of what the files hold and how it is read; names, folders and times do not enter."""
    whole = hashlib.blake2b(digest_size=16)
    for source in files:
        digest = hashlib.blake2b(digest_size=16)
        try:
            with open(source.path, "rb") as file:
                while block := file.read(_HASH_BLOCK):
                    digest.update(block)
                    advance(len(block))
        except OSError as err:
            raise DataError(
                f"The file cannot be read: {err.strerror}.", where=str(source.path), todo="Check its permissions."
            ) from err
        whole.update(source.kind.encode() + digest.digest())
    return whole.hexdigest()
