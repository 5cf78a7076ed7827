"""Find the source files of a data path, detect their kind and hash their content.

A path is a file (.jsonl, .ndjson, .json, .csv, .parquet, .txt), a folder of such files (searched recursively, sorted by
relative path), or a folder saved by `datasets`. A text file holds one document per line, as the `datasets` library
reads it; use JSON Lines for documents of several lines.

A folder is untrusted: every file that it names or links to must lie inside it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pantheraml.base.errors import DataError
from pantheraml.base.events import Emit, Notice
from pantheraml.data import chunks, columnar
from pantheraml.data.bounds import format_mib
from pantheraml.data.rows import Chunk, Unit, join_names

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
_DESCRIPTION_BYTES = 16 << 20  # of state.json and dataset_dict.json
_HUB_CACHE = ("datasets--", "models--")
_COPY_FIX = "Copy the file into the folder, or set data.path to the file itself."


@dataclass(frozen=True)
class SourceFile:
    path: Path
    kind: Kind
    size: int
    modified_ns: int

    @property
    def unit(self) -> Unit:
        """Unit of its row numbers."""
        return "row" if self.kind in ("parquet", "arrow") else "line"

    def chunks(self) -> Iterator[Chunk]:
        """Read the file in chunks; DataError if it changed since it was found."""
        try:
            yield from self._read()
        except OSError as err:
            raise DataError(f"The file cannot be read: {err}.", where=str(self.path), fix="Check the file.") from err
        if _stat(self.path) != (self.size, self.modified_ns):
            raise DataError(
                "The file changed while it was being read.", where=str(self.path), fix="Rerun when it is complete."
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
                yield from columnar.read_parquet(self.path)
            case "arrow":
                yield from columnar.read_arrow(self.path)


def find_files(path: Path, emit: Emit) -> list[SourceFile]:
    """Return the source files of a data path, in a fixed order."""
    if not path.exists():
        raise DataError(f"There is no data at {path}.", fix=f"Check the path; it must be {_ACCEPTED}.")
    if not path.is_dir():
        if not path.is_file():
            raise DataError(f"{path} is neither a file nor a folder.", fix=f"Give {_ACCEPTED}.")
        if path.suffix.lower() not in _KINDS:
            raise DataError(f"The file type of {path} is not known.", fix=f"Give {_ACCEPTED}.")
        files = [(path, _KINDS[path.suffix.lower()])]
    elif (path / "state.json").is_file():
        files = [(file, "arrow") for file in _saved_files(path, path)]
    elif (path / "dataset_dict.json").is_file():
        files = [(file, "arrow") for file in _saved_files(_train_split(path, emit), path)]
    else:
        files = list(_folder(path, emit))
    files = [(file, _detect_kind(file, kind, emit)) for file, kind in files]
    sources = [SourceFile(file, kind, *_stat(file)) for file, kind in files]
    for source in sources:
        if source.size == 0:
            raise DataError("The data file is empty.", where=str(source.path), fix="Check how it was written.")
    return sources


def _folder(path: Path, emit: Emit) -> Iterator[tuple[Path, Kind]]:
    visible = sorted(
        (file.relative_to(path).parts, file)
        for file in path.rglob("*")
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(path).parts)
    )
    ignored = [file.name for _, file in visible if file.suffix.lower() not in _KINDS]
    usable = [file for _, file in visible if file.suffix.lower() in _KINDS]
    if not usable:
        raise DataError(f"The folder {path} holds no data files.", fix=f"Give {_ACCEPTED}.")
    if ignored:
        emit(
            Notice(message=f"{len(ignored)} files in {path} are not data files and are ignored: {join_names(ignored)}")
        )
    for file in usable:
        yield _inside(path, file), _KINDS[file.suffix.lower()]


def _inside(root: Path, file: Path) -> Path:
    """Return `file` if it lies inside `root` after resolving links; else DataError, without revealing the target.

    Folders of the Hugging Face cache consist of links to the `blobs` folder next to them, which counts as inside.
    """
    roots = [root.resolve()]
    for folder in roots[0].parents:
        if folder.name == "snapshots" and folder.parent.name.startswith(_HUB_CACHE):
            roots.append(folder.parent / "blobs")
    try:
        target = file.resolve()
    except (OSError, RuntimeError, ValueError) as err:  # a name with a null byte, or a cycle of links
        raise DataError("The data folder names a file that cannot be found.", where=str(root), fix=_COPY_FIX) from err
    if not any(target.is_relative_to(allowed) for allowed in roots):
        raise DataError(
            f"The data folder names a file outside of it: {_relative(root, file)}.", where=str(root), fix=_COPY_FIX
        )
    return file


def _relative(root: Path, file: Path) -> str:
    return ascii(str(file.relative_to(root)) if file.is_relative_to(root) else str(file))


def _detect_kind(file: Path, kind: Kind, emit: Emit) -> Kind:
    """Detect kinds that often come with the wrong extension from the content of the file, with a notice."""
    try:
        if kind == "jsonl" and chunks.starts_array(file):
            emit(Notice(message=f"{file} is a JSON array, not JSON Lines; reading it as an array"))
            return "json"
        if kind == "csv" and (delimiter := chunks.csv_delimiter(file)) != ",":
            shown = {"\t": "tabs", ";": "semicolons", "|": "vertical bars"}[delimiter]
            emit(Notice(message=f"{file} is delimited by {shown}, according to its header"))
    except OSError as err:
        raise DataError(f"The file cannot be read: {err.strerror}.", where=str(file), fix="Check the file.") from err
    return kind


def _saved_files(folder: Path, root: Path) -> list[Path]:
    """Return the Arrow files of a folder written by `Dataset.save_to_disk`, in the order of its state.json."""
    state = _read_json(_inside(root, folder / "state.json"))
    listed = state.get("_data_files") if isinstance(state, dict) else None
    if not isinstance(listed, list) or not all(
        isinstance(entry, dict) and isinstance(entry.get("filename"), str) for entry in listed
    ):
        raise DataError(
            "The folder's state.json does not list its data files.",
            where=str(folder / "state.json"),
            fix="Save the data set again with `save_to_disk`.",
        )
    files = [_inside(root, folder / entry["filename"]) for entry in listed]
    for file in files:
        if not file.is_file():
            raise DataError(
                f"The data set lacks its file {file.name}.", where=str(folder), fix="Copy the whole folder again."
            )
    return files


def _train_split(folder: Path, emit: Emit) -> Path:
    listed = _read_json(_inside(folder, folder / "dataset_dict.json"))
    splits = listed.get("splits") if isinstance(listed, dict) else None
    if not isinstance(splits, list) or not all(isinstance(name, str) for name in splits):
        raise DataError(
            "The folder's dataset_dict.json does not list its splits.",
            where=str(folder / "dataset_dict.json"),
            fix="Save the data set again with `save_to_disk`.",
        )
    split = "train" if "train" in splits else splits[0] if len(splits) == 1 else None
    if split is None:
        raise DataError(
            f"The data set at {folder} has no split `train`; it has: {join_names(splits) or 'none'}.",
            fix="Give the folder of one split.",
        )
    if len(splits) > 1:
        emit(Notice(message=f"{folder} holds the splits {join_names(splits)}; `train` is used"))
    return _inside(folder, folder / split)


def _read_json(path: Path) -> Any:
    """Read a small JSON file written by `datasets`. Errors do not reveal its content."""
    try:
        with open(path, "rb") as file:
            data = file.read(_DESCRIPTION_BYTES + 1)
        if len(data) <= _DESCRIPTION_BYTES:
            return json.loads(data.decode("utf-8"))
        problem = f"it is longer than {format_mib(_DESCRIPTION_BYTES)}"
    except OSError as err:
        problem = str(err.strerror)
    except (ValueError, RecursionError):
        problem = "it is not JSON"
    raise DataError(f"The file cannot be read: {problem}.", where=str(path), fix="Save the data set again.")


def _stat(path: Path) -> tuple[int, int]:
    try:
        stat = path.stat()
    except OSError as err:
        raise DataError(f"The file cannot be read: {err.strerror}.", where=str(path), fix="Check the path.") from err
    return stat.st_size, stat.st_mtime_ns


def content_digest(files: Iterable[SourceFile], advance: Callable[[int], None]) -> str:
    """Hash the content and kind of the files; names, folders and timestamps are not part of it."""
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
                f"The file cannot be read: {err.strerror}.", where=str(source.path), fix="Check its permissions."
            ) from err
        whole.update(source.kind.encode() + digest.digest())
    return whole.hexdigest()
