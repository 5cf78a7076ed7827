"""Conversations with images: find the images of a row, read them, and put their placeholders into the messages.

An image is a part of a message (`{"type": "image", "image": ...}`) or in the row's column `images` (or `image`); there
it fills the placeholders (`{"type": "image"}`) in order, or precedes the first user message if there are none. It is a
PIL image, a path, an array, or what `datasets` has for an image that is not decoded.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, UnidentifiedImageError

from pantheraml.base.errors import DataError
from pantheraml.base.roots import require_allowed
from pantheraml.data.rows import Row, excerpt

Picture = Image.Image
COLUMNS = ("images", "image")
CONVERSATIONS = ("messages", "conversations")
_OTHER_MEDIA = ("audio", "video")
_KEYS = ("image", "url", "path")
"""Keys of an image part that may hold the image."""


class Conversation(NamedTuple):
    messages: list[dict[str, Any]]
    """Contents are lists of parts; image parts are placeholders."""
    images: list[Picture]
    """In the order of the placeholders."""


def has_images(row: Row) -> bool:
    """Return whether the row has an image, without reading it."""
    if any(_given(row, name) for name in COLUMNS):
        return True
    return any(_is_image(part) for part in _all_parts(row))


def reject_other_media(row: Row) -> None:
    """DataError if the row has a recording or a video."""
    for part in _all_parts(row):
        if isinstance(part, Mapping) and part.get("type") in _OTHER_MEDIA:
            raise _other_media(part["type"], "the data set")


def _all_parts(row: Row) -> list[Any]:
    messages = next((row[name] for name in CONVERSATIONS if row.get(name)), ())
    contents = [message.get("content") for message in messages if isinstance(message, Mapping)]
    return [part for content in contents if isinstance(content, list) for part in content]


def _other_media(kind: str, where: str) -> DataError:
    return DataError(
        f"A message has {kind}, which is not supported: texts and images are.",
        where=where,
        fix="Train on rows with images or text, or pass a data collator of your own to the trainer.",
    )


def read_conversation(row: Row, number: int, resize: Callable[[Picture], Picture]) -> Conversation:
    """Return the row's messages and images; DataError, naming the row, if they cannot be used."""
    where = f"row {number} of the batch"
    messages = next((row[name] for name in CONVERSATIONS if row.get(name)), None)
    if not isinstance(messages, list | tuple) or not all(isinstance(message, Mapping) for message in messages):
        raise DataError(
            f"A row has no messages; its columns are {', '.join(map(str, row)) or 'none'}.",
            where=where,
            fix='Give each row "messages": a list of {"role": ..., "content": [{"type": "image", "image": ...}, '
            '{"type": "text", "text": ...}]}.',
        )
    column = [image for name in COLUMNS for image in _given(row, name)]
    parts = [[_part(part, where) for part in _parts(message, where)] for message in messages]
    placeholders = [part for content in parts for part in content if _is_image(part)]
    empty = [part for part in placeholders if _source(part) is None]
    if column and not placeholders:
        first = next((at for at, message in enumerate(messages) if message.get("role") == "user"), 0)
        empty = [{"type": "image"} for _ in column]
        parts[first] = [*empty, *parts[first]]
        placeholders = empty
    if len(column) != len(empty):
        raise DataError(
            f"The messages have {len(empty)} image(s) to fill in, but the row's images column has {len(column)}.",
            where=where,
            fix="Give every image part of the messages one image, in their order.",
        )
    for part, image in zip(empty, column, strict=True):
        part["image"] = image
    images = [resize(_read(_source(part), where)) for part in placeholders]
    made = [
        {**message, "content": [{"type": "image"} if _is_image(part) else part for part in content]}
        for message, content in zip(messages, parts, strict=True)
    ]
    return Conversation([_without_empty(message) for message in made], images)


def _given(row: Row, name: str) -> list[Any]:
    value = row.get(name)
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def _parts(message: Mapping[str, Any], where: str) -> list[Any]:
    content = message.get("content")
    if content is None or isinstance(content, str):
        return [{"type": "text", "text": content or ""}]
    if not isinstance(content, list | tuple):
        raise DataError(
            f"The content of a message is a {type(content).__name__}, not a text or a list.",
            where=where,
            fix="Use a string, or a list of parts such as {'type': 'text', 'text': ...} and {'type': 'image'}.",
        )
    return list(content)


def _part(part: Any, where: str) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, Mapping):
        raise DataError(
            f"A part of a message is a {type(part).__name__}.",
            where=where,
            fix="Use parts such as {'type': 'text', 'text': ...} and {'type': 'image'}.",
        )
    # tables have every key in every part, and templates ask whether a part has the key `image`
    kept = _without_empty(part)
    kind = kept.get("type")
    if kind in _OTHER_MEDIA:
        raise _other_media(kind, where)
    if kind not in ("text", "image"):
        raise DataError(
            f"A part of a message has the type {kind!r}.", where=where, fix='Supported are "text" and "image".'
        )
    return kept


def _without_empty(mapping: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in mapping.items() if value is not None}


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "image"


def _source(part: Mapping[str, Any]) -> Any:
    return next((part[key] for key in _KEYS if part.get(key) is not None), None)


def _read(source: Any, where: str) -> Picture:
    """Return the image in RGB."""
    try:
        return _open(source).convert("RGB")
    except (OSError, ValueError, TypeError, SyntaxError, Image.DecompressionBombError) as err:
        shown = source if isinstance(source, str) else f"a {type(source).__name__}"
        problem = "it is not an image" if isinstance(err, UnidentifiedImageError) else str(err) or type(err).__name__
        raise DataError(
            f"An image cannot be read: {excerpt(str(shown), 200)}: {problem}.",
            where=where,
            fix="Remove the row, or give a PIL image or the path of an image file.",
        ) from err


def _open(source: Any) -> Picture:
    if isinstance(source, Image.Image):
        return source
    if isinstance(source, Mapping):  # an image of `datasets` that is not decoded
        if source.get("bytes") is not None:
            return Image.open(io.BytesIO(source["bytes"]), formats=_formats())
        source = source.get("path")
    if isinstance(source, np.ndarray):
        return Image.fromarray(source)
    if isinstance(source, str) and source.startswith(("http://", "https://", "data:")):
        raise ValueError("it is a URL, and batches are made from local images only; download it first")
    if isinstance(source, str | Path):
        path = Path(str(source).removeprefix("file://"))
        require_allowed(path, key="image")
        if path.exists() and not path.is_file():
            raise ValueError("it is not a file")  # reading a pipe would wait forever
        return Image.open(path, formats=_formats())
    raise TypeError("it is neither an image nor a path")


@functools.cache
def _formats() -> list[str]:
    """All that Pillow reads, apart from PostScript: that is a program, for which Pillow starts Ghostscript."""
    Image.init()
    return [name for name in Image.ID if name != "EPS"]
