"""Which files a data path stands for, what they hold, and what identifies their content.

A path is a file (.jsonl, .ndjson, .json, .csv, .parquet, .txt), a folder of such files (searched recursively, taken in
the order of their relative names), or a folder saved by `datasets`. A text file holds one document per line, as the
`datasets` library reads it; documents of several lines belong into JSON Lines.

A folder is taken as it is given, perhaps by somebody else: what it names or links to must lie inside it.
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
from pantheraml.data import chunks, columnar
from pantheraml.data.bounds import mebibytes
from pantheraml.data.rows import Chunk, Unit, names

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
_BRING = "Copy the file into the folder, or give its own path as data.path."


@dataclass(frozen=True)
class SourceFile:
    path: Path
    kind: Kind
    size: int
    modified_ns: int

    @property
    def unit(self) -> Unit:
        """What its rows are counted in."""
        return "row" if self.kind in ("parquet", "arrow") else "line"

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
                yield from columnar.read_parquet(self.path)
            case "arrow":
                yield from columnar.read_arrow(self.path)


def find_files(path: Path, emit: Emit) -> list[SourceFile]:
    """The files behind a data path, in their fixed order."""
    if not path.exists():
        raise DataError(f"There is no data at {path}.", todo=f"Check the path; it should be {_ACCEPTED}.")
    if not path.is_dir():
        if not path.is_file():
            raise DataError(f"{path} is neither a file nor a folder.", todo=f"Give {_ACCEPTED}.")
        if path.suffix.lower() not in _KINDS:
            raise DataError(f"The file type of {path} is not known.", todo=f"Give {_ACCEPTED}.")
        files = [(path, _KINDS[path.suffix.lower()])]
    elif (path / "state.json").is_file():
        files = [(file, "arrow") for file in _saved_files(path, path)]
    elif (path / "dataset_dict.json").is_file():
        files = [(file, "arrow") for file in _saved_files(_train_split(path, emit), path)]
    else:
        files = list(_folder(path, emit))
    files = [(file, _kind_within(file, kind, emit)) for file, kind in files]
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
        emit("notice", message=f"{len(ignored)} files in {path} are not data files and are left out: {names(ignored)}")
    for file in usable:
        yield _inside(path, file), _KINDS[file.suffix.lower()]


def _inside(root: Path, file: Path) -> Path:
    """`file`, if it lies inside `root` after all links are followed; DataError, which says nothing of it, if not.

    A folder of the Hugging Face cache is made of links to the blobs beside it: these are inside as well.
    """
    roots = [root.resolve()]
    for folder in roots[0].parents:
        if folder.name == "snapshots" and folder.parent.name.startswith(_HUB_CACHE):
            roots.append(folder.parent / "blobs")
    try:
        target = file.resolve()
    except (OSError, RuntimeError, ValueError) as err:  # a name with a null byte, or links that go in a circle
        raise DataError("The data folder names a file that cannot be found.", where=str(root), todo=_BRING) from err
    if not any(target.is_relative_to(allowed) for allowed in roots):
        raise DataError(
            f"The data folder names a file outside of it: {_relative(root, file)}.", where=str(root), todo=_BRING
        )
    return file


def _relative(root: Path, file: Path) -> str:
    return ascii(str(file.relative_to(root)) if file.is_relative_to(root) else str(file))


def _kind_within(file: Path, kind: Kind, emit: Emit) -> Kind:
    """The kind of a file by what it holds, where people often give it another name; a notice says so."""
    try:
        if kind == "jsonl" and chunks.starts_array(file):
            emit("notice", message=f"{file} is a JSON array, not JSON Lines; it is read as such")
            return "json"
        if kind == "csv" and (delimiter := chunks.csv_delimiter(file)) != ",":
            shown = {"\t": "tabs", ";": "semicolons", "|": "vertical bars"}[delimiter]
            emit("notice", message=f"{file} is divided by {shown}, as its header shows")
    except OSError as err:
        raise DataError(f"The file cannot be read: {err.strerror}.", where=str(file), todo="Check the file.") from err
    return kind


def _saved_files(folder: Path, root: Path) -> list[Path]:
    """The Arrow files of a folder written by `Dataset.save_to_disk`, in the order that its state.json lists them."""
    state = _read_json(_inside(root, folder / "state.json"))
    listed = state.get("_data_files") if isinstance(state, dict) else None
    if not isinstance(listed, list) or not all(
        isinstance(entry, dict) and isinstance(entry.get("filename"), str) for entry in listed
    ):
        raise DataError(
            "The folder's state.json does not list its data files.",
            where=str(folder / "state.json"),
            todo="Save the data set again with `save_to_disk`.",
        )
    files = [_inside(root, folder / entry["filename"]) for entry in listed]
    for file in files:
        if not file.is_file():
            raise DataError(
                f"The data set lacks its file {file.name}.", where=str(folder), todo="Copy the whole folder again."
            )
    return files


def _train_split(folder: Path, emit: Emit) -> Path:
    listed = _read_json(_inside(folder, folder / "dataset_dict.json"))
    splits = listed.get("splits") if isinstance(listed, dict) else None
    if not isinstance(splits, list) or not all(isinstance(name, str) for name in splits):
        raise DataError(
            "The folder's dataset_dict.json does not list its splits.",
            where=str(folder / "dataset_dict.json"),
            todo="Save the data set again with `save_to_disk`.",
        )
    split = "train" if "train" in splits else splits[0] if len(splits) == 1 else None
    if split is None:
        raise DataError(
            f"The data set at {folder} has no split `train`; it has: {names(splits) or 'none'}.",
            todo="Give the folder of one split.",
        )
    if len(splits) > 1:
        emit("notice", message=f"{folder} holds the splits {names(splits)}; `train` is used")
    return _inside(folder, folder / split)


def _read_json(path: Path) -> Any:
    """A small JSON file that `datasets` wrote. Errors do not show what stands in it."""
    try:
        with open(path, "rb") as file:
            data = file.read(_DESCRIPTION_BYTES + 1)
        if len(data) <= _DESCRIPTION_BYTES:
            return json.loads(data.decode("utf-8"))
        problem = f"it is longer than {mebibytes(_DESCRIPTION_BYTES)}"
    except OSError as err:
        problem = str(err.strerror)
    except (ValueError, RecursionError):
        problem = "it is not JSON"
    raise DataError(f"The file cannot be read: {problem}.", where=str(path), todo="Save the data set again.")


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
