"""Find the weight files of a model folder, and check that they are complete and safe to read.

The folder may come from an untrusted source, so an index may only name weight files of its own kind inside the folder:
a `.bin` among safetensors would load a pickle without consent, and `../` would read other users' files. File
contents never appear in error messages.
"""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open

from pantheraml.base.errors import ModelError
from pantheraml.models.hub import links_outside

PICKLED = ".bin"


def weight_files(folder: Path, *, allow_pickle: bool) -> list[Path]:
    """Return all weight files; ModelError if any is missing."""
    stems = ["model.safetensors"] + (["pytorch_model.bin"] if allow_pickle else [])
    for name in stems:
        if (folder / name).is_file():
            return [folder / name]
        index = folder / f"{name}.index.json"
        if index.is_file():
            return _indexed_files(index, Path(name).suffix)
    if not allow_pickle and any(folder.glob(f"*{PICKLED}")):
        raise ModelError(
            f"The weights in {folder} are pickled (.bin), and loading a pickle can run code.",
            fix="Convert them to safetensors, or set model.allow_pickle=true if you trust their source.",
        )
    raise ModelError(
        f"The model folder {folder} has no weights (no model.safetensors).",
        fix="Download the complete model, or set model.init=random to train from scratch.",
    )


def _indexed_files(index: Path, suffix: str) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as err:
        raise ModelError(f"The weight index is corrupted: {index}.", fix="Download the model again.") from err
    for name in names:
        _check_name(index, name, suffix)
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise ModelError(
            f"{len(missing)} of {len(names)} weight files are missing, such as {missing[0]}.",
            where=str(index.parent),
            fix="Download the missing files.",
        )
    return [index.parent / name for name in names]


def _check_name(index: Path, name: str, suffix: str) -> None:
    if not isinstance(name, str) or not name.endswith(suffix):
        raise ModelError(
            f"The weight index names {name!r}, which is not a {suffix} file.",
            where=str(index),
            fix="Download the model again; if its weights are pickled, see model.allow_pickle.",
        )
    if "\0" in name or Path(name).is_absolute() or ".." in Path(name).parts or links_outside(index.parent, name):
        raise ModelError(
            f"The weight index names {name!r}, which is outside the model folder.",
            where=str(index),
            fix="Download the model again from a source you trust.",
        )


def check_safetensors(file: Path) -> None:
    """Check the header, which safetensors validates against the file's length, so a truncated file is found."""
    try:
        with safe_open(file, framework="pt") as opened:
            opened.keys()
    except (SafetensorError, OSError) as err:
        raise ModelError(
            f"The weight file {file} is corrupted: {short_error(err)}.", fix="Download the model again."
        ) from err


def short_error(err: Exception) -> str:
    """Return safetensors' message up to where it quotes the file."""
    return ": ".join(str(err).strip().partition("\n")[0].split(": ")[:2])
