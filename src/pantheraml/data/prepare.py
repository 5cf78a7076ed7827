"""prepare: from the user's files to tokenised, packed, cached data, once for all ranks and for later runs.

The files are hashed; if the cache holds data of that fingerprint, nothing else is read. Otherwise every row is checked
and tokenised, chunk by chunk, in parallel, and written to the cache. Training starts only after the last row was
checked.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pantheraml.base.events import Emit
from pantheraml.data.build import Build
from pantheraml.data.cache import cache_folder, is_own_entry, locked
from pantheraml.data.fingerprint import data_fingerprint, tokenizer_digest
from pantheraml.data.origin import Source
from pantheraml.data.pool import available_workers, ordered_map
from pantheraml.data.progress import Progress
from pantheraml.data.rows import Chunk
from pantheraml.data.sources import SourceFile, content_digest, find_files
from pantheraml.data.store import is_as_written, is_whole, read_meta
from pantheraml.data.survey import Survey
from pantheraml.data.tokenise import ChunkResult, Recipe, Side, Tokeniser
from pantheraml.specs.train import DataConfig

_BYTES_PER_WORKER = 2 << 20  # with less than this for each, starting processes costs more than they save


@dataclass(frozen=True)
class PreparedData:
    """Folders inside the cache, to be opened with TokenDataset."""

    train: Path
    eval: Path | None
    format: str
    sources: tuple[Source, ...] = field(default=(), compare=False)
    """What the training data was read from, in the order in which its documents count them."""


def prepare(config: DataConfig, *, tokenizer: Any, emit: Emit) -> PreparedData:
    """Make (or find in the cache) the training and evaluation data that `config` describes."""
    if tokenizer.eos_token_id is None:
        emit("warning", message="the tokenizer has no end-of-sequence token: the model cannot learn where to stop")
    train = _Preparation(config, Path(config.path), "train", tokenizer, emit)
    folders = train.run()
    if config.eval_path is not None:
        folders |= _Preparation(config, Path(config.eval_path), "eval", tokenizer, emit).run()
    return PreparedData(folders["train"], folders.get("eval"), train.format, train.sources())


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
        self._survey = Survey(_chunks_of(self._files), path, side, emit)
        self.format = config.format if config.format != "auto" else self._survey.format()

    def sources(self) -> tuple[Source, ...]:
        return tuple(Source(str(file.path), file.unit) for file in self._files)

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
        self._survey.tell(self.format, self._tokenizer)
        folder = cache_folder(self._config.cache_dir)
        targets = {side: folder / name for side, name in self._fingerprints(recipe).items()}
        with locked(folder, targets[self._side].name, self._emit):
            cached = all(self._is_intact(target) for target in targets.values())
            if not cached:
                build = Build(
                    recipe=recipe,
                    packing=self._config.packing,
                    pad_id=pad_id(self._tokenizer),
                    tokenizer=type(self._tokenizer).__name__,
                    on_bad_row=self._config.on_bad_row,
                    targets=targets,
                    emit=self._emit,
                    files=[str(file.path) for file in self._files],
                )
                with contextlib.closing(self._results(tokeniser)) as results:  # an error ends the processes at once
                    build.run(results)
        meta = read_meta(targets[self._side])
        assert meta is not None, "written or found whole a moment ago"
        self._survey.tell_unread(self.format, meta.unread)
        for side, target in targets.items():
            self._announce(side, target, cached=cached, seconds=time.monotonic() - started)
        return targets

    def _is_intact(self, target: Path) -> bool:
        """Whether the cache holds this data, as it was written. All ranks train on it, so it is hashed once, here."""
        if not is_own_entry(target, self._emit) or not is_whole(target):
            return False
        same, meta = is_as_written(target), read_meta(target)
        if not same and meta is not None and meta.checksum:
            self._emit(
                "warning",
                message=f"the cached {self._side} data is not what was written ({target}): it is prepared again",
            )
        return same

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
