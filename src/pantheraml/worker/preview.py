"""Task `preview`: the tokens of a file's first rows, and which of them bear loss, by the code that prepares a run."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pantheraml.base.event_stream import EventWriter
from pantheraml.base.folders import write_text
from pantheraml.data.chunks import read_lines
from pantheraml.data.formats import Encoder
from pantheraml.data.row_formats import validate_row
from pantheraml.data.rows import Row, RowError
from pantheraml.models.loader import load_tokenizer
from pantheraml.specs.tasks import PreviewRequest
from pantheraml.specs.train import ModelConfig

MOST_TOKENS = 800
"""Shown of a row."""
_PIECE_TOKENS = 4
"""A character has at most so many tokens that are no text by themselves."""


def preview_task(folder: Path, emit: EventWriter) -> None:
    request = PreviewRequest.read(folder)
    tokenizer = load_tokenizer(ModelConfig(path=str(request.model)))
    rows = list(itertools.islice(_rows(request), request.rows))
    encoded = Encoder(request.format, tokenizer).encode([row for _, row in rows])
    found = []
    for (line, _), document in zip(rows, encoded, strict=True):
        if isinstance(document, RowError):
            found.append({"line": line, "problem": document.problem})
        else:
            found.append({"line": line, **_described(*document, request.seq_len, tokenizer)})
    write_text(folder / "preview.json", json.dumps({"rows": found}))


def _rows(request: PreviewRequest) -> Iterator[tuple[int, Row]]:
    for chunk in read_lines(request.data, plain=False):
        for number, row in chunk.rows():
            if not isinstance(row, RowError):
                yield number, validate_row(request.format, row)


def _described(tokens: Any, runs: Any, seq_len: int, tokenizer: Any) -> dict[str, Any]:
    ids, trained = tokens.tolist(), _mask(runs, len(tokens))
    kept = min(len(ids), seq_len)
    shown = min(kept, MOST_TOKENS)
    return {
        "tokens": len(ids),
        "trained_tokens": sum(trained[:kept]),
        "cut_tokens": len(ids) - kept,
        "pieces": list(_pieces(ids[:shown], trained[:shown], tokenizer)),
        "not_shown": kept - shown,
    }


def _mask(runs: Any, length: int) -> list[bool]:
    """`runs`: alternating lengths without and with loss."""
    mask: list[bool] = []
    for index, run in enumerate(runs.tolist()):
        mask += [index % 2 == 1] * run
    return mask + [False] * (length - len(mask))


def _pieces(ids: Sequence[int], trained: Sequence[bool], tokenizer: Any) -> Iterator[dict[str, Any]]:
    """Text of each token; tokens that are only together a character are one piece."""
    pending: list[int] = []
    for index, token in enumerate(ids):
        pending.append(token)
        text = tokenizer.decode(pending, clean_up_tokenization_spaces=False)
        more = index + 1 < len(ids) and trained[index + 1] == trained[index] and len(pending) < _PIECE_TOKENS
        if "\ufffd" in text and more:
            continue
        yield {"text": text, "trained": trained[index], "tokens": len(pending)}
        pending = []
