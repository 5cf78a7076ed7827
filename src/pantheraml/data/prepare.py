"""prepare: from the user's files to tokenised, packed, cached data, once for all ranks and for later runs.

The files are hashed; if the cache holds data of that fingerprint, nothing else is read. Otherwise every row is checked
and tokenised, chunk by chunk, in parallel, and written to the cache. Training starts only after the last row was
checked.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pantheraml.base.errors import DataError
from pantheraml.base.events import Emit
from pantheraml.data import formats
from pantheraml.data.build import Build, bad_row_error, no_rows_error
from pantheraml.data.cache import cache_folder, locked
from pantheraml.data.fingerprint import data_fingerprint, tokenizer_digest
from pantheraml.data.pool import available_workers, ordered_map
from pantheraml.data.progress import Progress
from pantheraml.data.rows import BadRow, Chunk, RowError
from pantheraml.data.sources import SourceFile, content_digest, find_files
from pantheraml.data.store import is_whole, read_meta
from pantheraml.data.tokenise import ChunkResult, Recipe, Side, Tokeniser
from pantheraml.specs.train import DataConfig

_BYTES_PER_WORKER = 2 << 20  # with less than this for each, starting processes costs more than they save
_ROWS_FOR_DETECTION = 100


@dataclass(frozen=True)
class PreparedData:
    """Folders inside the cache, to be opened with TokenDataset."""

    train: Path
    eval: Path | None
    format: str


def prepare(config: DataConfig, *, tokenizer: Any, emit: Emit) -> PreparedData:
    """Make (or find in the cache) the training and evaluation data that `config` describes."""
    if tokenizer.eos_token_id is None:
        emit("warning", message="the tokenizer has no end-of-sequence token: the model cannot learn where to stop")
    train = _Preparation(config, Path(config.path), "train", tokenizer, emit)
    folders = train.run()
    if config.eval_path is not None:
        folders |= _Preparation(config, Path(config.eval_path), "eval", tokenizer, emit).run()
    return PreparedData(folders["train"], folders.get("eval"), train.format)


class _Preparation:
    """The preparation of one data path, which gives one side, or both where a fraction is held out."""

    def __init__(self, config: DataConfig, path: Path, side: Side, tokenizer: Any, emit: Emit) -> None:
        self._config = config
        self._path = path
        self._side: Side = side
        self._tokenizer = tokenizer
        self._emit = emit
        self._files = find_files(path, emit)
        self._bytes = sum(file.size for file in self._files)
        self.format = config.format if config.format != "auto" else self._detect_format()

    def run(self) -> dict[Side, Path]:
        started = time.monotonic()
        recipe = Recipe(
            format=self.format,
            seq_len=self._config.seq_len,
            on_long_row=self._config.on_long_row,
            eval_fraction=self._config.eval_fraction if self._side == "train" else 0.0,
            side=self._side,
        )
        tokeniser = Tokeniser(recipe, self._tokenizer)  # also refuses a tokenizer that cannot do what the format needs
        folder = cache_folder(self._config.cache_dir)
        targets = {side: folder / name for side, name in self._fingerprints(recipe).items()}
        with locked(folder, targets[self._side].name, self._emit):
            cached = all(is_whole(target) for target in targets.values())
            if not cached:
                build = Build(
                    recipe=recipe,
                    packing=self._config.packing,
                    pad_id=pad_id(self._tokenizer),
                    on_bad_row=self._config.on_bad_row,
                    targets=targets,
                    emit=self._emit,
                )
                with contextlib.closing(self._results(tokeniser)) as results:  # an error ends the processes at once
                    build.run(results)
        for side, target in targets.items():
            self._announce(side, target, cached=cached, seconds=time.monotonic() - started)
        return targets

    def _detect_format(self) -> str:
        rows = ((chunk, number, row) for chunk in _chunks_of(self._files) for number, row in chunk.rows())
        columns: dict[str, None] = {}
        first_bad: BadRow | None = None
        for chunk, number, row in itertools.islice(rows, _ROWS_FOR_DETECTION):
            if isinstance(row, RowError):
                first_bad = first_bad or BadRow(chunk.file, chunk.unit, number, row.field, row.problem)
                continue
            columns |= dict.fromkeys(map(str, row))
            found = formats.detect(row)
            if found is not None:
                used = " + ".join(f"`{name}`" for name in formats.COLUMNS[found])
                self._emit("notice", message=f"{self._side} data: format `{found}`, detected from the columns {used}")
                return found
        if columns:
            raise DataError(
                f"The data has no usable columns. Found: {', '.join(f'`{name}`' for name in columns)}. "
                f"Accepted: {formats.ACCEPTED}.",
                where=str(self._path),
                todo="Rename the columns.",
            )
        if first_bad is not None:
            raise bad_row_error([first_bad], can_skip=False)
        raise no_rows_error()

    def _fingerprints(self, recipe: Recipe) -> dict[Side, str]:
        progress = Progress(self._emit, split=self._side, stage="hash", total=self._bytes)
        content = content_digest(self._files, progress.advance)
        progress.finish()
        tokenizer = tokenizer_digest(self._tokenizer, with_template=self.format == "messages")
        sides: tuple[Side, ...] = ("train", "eval") if recipe.eval_fraction else (self._side,)
        return {
            side: data_fingerprint(
                content,
                tokenizer,
                format=recipe.format,
                seq_len=recipe.seq_len,
                packing=self._config.packing,
                on_bad_row=self._config.on_bad_row,
                on_long_row=recipe.on_long_row,
                eval_fraction=recipe.eval_fraction,
                held_out=side != self._side,
            )
            for side in sides
        }

    def _results(self, tokeniser: Tokeniser) -> Generator[ChunkResult]:
        asked = self._config.workers or available_workers()
        workers = max(1, min(asked, self._bytes // _BYTES_PER_WORKER))
        progress = Progress(self._emit, split=self._side, stage="tokenise", total=self._bytes)
        with contextlib.closing(ordered_map(tokeniser, _chunks_of(self._files), workers)) as results:
            for result in results:
                progress.advance(result.size)
                yield result
        progress.finish()

    def _announce(self, side: Side, target: Path, *, cached: bool, seconds: float) -> None:
        meta = read_meta(target)
        assert meta is not None, "written or found whole a moment ago"
        self._emit(
            "data.ready",
            split=side,
            format=meta.format,
            rows=meta.rows,
            skipped_rows=meta.skipped_rows,
            truncated_rows=meta.truncated_rows,
            tokens=meta.tokens,
            target_tokens=meta.target_tokens,
            sequences=meta.sequences,
            seq_len=meta.seq_len,
            packing=meta.packed,
            efficiency=meta.efficiency(),
            fingerprint=meta.fingerprint,
            cached=cached,
            seconds=seconds,
        )


def _chunks_of(files: list[SourceFile]) -> Iterator[Chunk]:
    for file in files:
        yield from file.chunks()


def pad_id(tokenizer: Any) -> int:
    """What to fill up sequences with. Padding is masked and bears no loss, so any token will do where none is set."""
    known = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    return next(token for token in known if token is not None)
