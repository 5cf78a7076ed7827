"""The files of a model folder that hold its weights: which they are, that all are there, and that they are its own.

A folder may be somebody else's. An index therefore names nothing but weights of its own kind, inside the folder: with
a `.bin` among safetensors it would have a pickle loaded that nobody allowed, and by `../` it would read other people's
files. What a file holds never becomes part of an error's text.
"""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open

from pantheraml.base.errors import ModelError
from pantheraml.models.hub import leads_outside

SAFETENSORS = ".safetensors"
PICKLED = ".bin"


def weight_files(folder: Path, *, allow_pickle: bool) -> list[Path]:
    """All of them, and all of them there; ModelError otherwise."""
    stems = ["model.safetensors"] + (["pytorch_model.bin"] if allow_pickle else [])
    for name in stems:
        if (folder / name).is_file():
            return [folder / name]
        index = folder / f"{name}.index.json"
        if index.is_file():
            return _indexed_files(index, Path(name).suffix)
    if not allow_pickle and any(folder.glob(f"*{PICKLED}")):
        raise ModelError(
            f"The weights in {folder} are pickled (.bin), which can run code when loaded.",
            todo="Convert them to safetensors, or set model.allow_pickle=true if you trust where they come from.",
        )
    raise ModelError(
        f"The model folder {folder} has no weights (no model.safetensors).",
        todo="Get the whole model, or set model.init=random to train from scratch.",
    )


def _indexed_files(index: Path, suffix: str) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as err:
        raise ModelError(f"The index of the weights is damaged: {index}.", todo="Get the model again.") from err
    for name in names:
        _check_name(index, name, suffix)
    gone = [name for name in names if not (index.parent / name).is_file()]
    if gone:
        raise ModelError(
            f"{len(gone)} of {len(names)} weight files are missing, such as {gone[0]}.",
            where=str(index.parent),
            todo="Get the missing files.",
        )
    return [index.parent / name for name in names]


def _check_name(index: Path, name: str, suffix: str) -> None:
    if not isinstance(name, str) or not name.endswith(suffix):
        raise ModelError(
            f"The index of the weights names {name!r}, which is no {suffix} file.",
            where=str(index),
            todo="Get the model again; if its weights are pickled, see model.allow_pickle.",
        )
    if "\0" in name or Path(name).is_absolute() or ".." in Path(name).parts or leads_outside(index.parent, name):
        raise ModelError(
            f"The index of the weights names {name!r}, which is not inside the model folder.",
            where=str(index),
            todo="Get the model again from somebody you trust.",
        )


def check_safetensors(file: Path) -> None:
    """Reads the header, which safetensors checks against the file's length: finds a file that was cut short."""
    try:
        with safe_open(file, framework="pt") as opened:
            opened.keys()
    except (SafetensorError, OSError) as err:
        raise ModelError(f"The weight file {file} is damaged: {in_short(err)}.", todo="Get the model again.") from err


def in_short(err: Exception) -> str:
    """What safetensors says, up to where it quotes the file."""
    return ": ".join(str(err).strip().partition("\n")[0].split(": ")[:2])
