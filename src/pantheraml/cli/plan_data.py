"""Estimate the lengths of a training set's rows from its beginning, without preparing it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pantheraml.specs.train import TrainConfig

ROWS = 200
"""Number of rows that are tokenized."""
ROW_CHARACTERS = 200_000
"""Characters of a row that are tokenized; the rest counts in proportion."""
REST_SHARE = 0.99
"""Of the bytes; line breaks between chunks are not counted."""
PER_MESSAGE = 5
"""Approximate tokens that a chat template adds to a message."""


@dataclass(frozen=True)
class Lengths:
    """Tokens of the first rows, and the estimated number of rows."""

    tokens: tuple[int, ...]
    rows: float

    def trained(self, config: TrainConfig) -> float:
        """Different tokens that a run trains on, prompts included."""
        seq_len = config.data.seq_len
        kept = sum(min(tokens, seq_len) for tokens in self.tokens) / len(self.tokens)
        everything, train = self.rows * kept, config.train
        if train.max_steps is None:
            return everything * min(1.0, train.epochs)
        of_sequence = everything / self.sequences(seq_len, packed=config.data.packing)
        return min(everything, train.max_steps * train.global_batch_size * of_sequence)

    def sequences(self, seq_len: int, *, packed: bool) -> float:
        """Sequences of an epoch."""
        if not packed:
            return self.rows
        kept = sum(min(tokens, seq_len) for tokens in self.tokens) / len(self.tokens)
        return max(1.0, self.rows * kept / seq_len)


def estimate(config: TrainConfig) -> Lengths | None:
    """Estimate the lengths; None: no row, or no local tokenizer. Raises the data errors of a run."""
    tokenizer = Path(config.model.tokenizer or config.model.path).expanduser() / "tokenizer.json"
    if not tokenizer.is_file():
        return None
    from tokenizers import Tokenizer

    from pantheraml.base.errors import PantheraError
    from pantheraml.data.sources import find_files

    try:
        encoder = Tokenizer.from_file(str(tokenizer))
    except Exception:  # noqa: BLE001 - the library raises bare Exceptions; a run names what is wrong with the file
        return None
    counts: list[int] = []
    read, total, rest = 0, 0, False
    try:
        files = find_files(Path(config.data.path).expanduser(), lambda event: None)
        total = sum(file.path.stat().st_size for file in files)
        chunks = (chunk for file in files for chunk in file.chunks())
        for chunk in chunks:
            rows = [row for _, row in chunk.rows() if isinstance(row, dict)]
            taken = rows[: ROWS - len(counts)]
            counts += [_tokens(row, encoder) for row in taken]
            read += round(chunk.size * len(taken) / max(1, len(rows)))
            rest = len(taken) < len(rows)
            if rest or len(counts) == ROWS:
                rest = rest or read < REST_SHARE * total
                break
    except PantheraError:
        return None
    if not counts:
        return None
    return Lengths(tuple(counts), len(counts) * max(1.0, total / max(1, read)) if rest else len(counts))


def _tokens(row: dict[str, Any], encoder: Any) -> int:
    tokens = 1  # at the end
    for text in _texts(row):
        shown = text[:ROW_CHARACTERS]
        count = len(encoder.encode(shown, add_special_tokens=False).ids)
        tokens += round(count * len(text) / max(1, len(shown)))
        tokens += PER_MESSAGE if "messages" in row or "conversations" in row else 0
    return tokens


def _texts(value: Any) -> Iterator[str]:
    """Text that becomes tokens: of columns, and contents of messages."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for part in value:
            yield from _texts(part)
    elif isinstance(value, dict):
        for name, part in value.items():
            if name not in ("role", "from", "id", "type", "source"):
                yield from _texts(part)
