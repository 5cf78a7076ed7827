"""prepare: turn the user's files into tokenized, packed, cached data, once for all ranks and for later runs.

The files are hashed; if the cache holds data with that fingerprint, nothing else is read. Otherwise every row is
validated and tokenized in parallel, chunk by chunk, and written to the cache. Training starts only after the last row
was validated.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pantheraml.base.events import DataReady, Emit, WarningIssued
from pantheraml.data.cache import cache_folder, fingerprint_lock
from pantheraml.data.data_folder import DataFolder, read_meta
from pantheraml.data.fingerprint import data_fingerprint, tokenizer_digest
from pantheraml.data.origin import Source
from pantheraml.data.prepare_progress import PrepareProgress
from pantheraml.data.rows import Chunk
from pantheraml.data.sources import SourceFile, content_digest, find_files
from pantheraml.data.survey import Survey
from pantheraml.data.token_writer import DatasetBuild
from pantheraml.data.tokenize import ChunkResult, ChunkTokenizer, Recipe, SplitName
from pantheraml.data.worker_pool import available_workers, ordered_map
from pantheraml.specs.train import DataConfig

_BYTES_PER_WORKER = 2 << 20  # with less input per process, starting processes costs more than it saves


@dataclass(frozen=True)
class PreparedData:
    """Cache folders of the prepared data; open them with TokenDataset."""

    train: Path
    eval: Path | None
    format: str
    sources: tuple[Source, ...] = field(default=(), compare=False)
    """Source files of the training data, in the order of its file indices."""


def prepare(config: DataConfig, *, tokenizer: Any, emit: Emit) -> PreparedData:
    """DatasetBuild, or find in the cache, the training and evaluation data of `config`."""
    if tokenizer.eos_token_id is None:
        emit(WarningIssued(message="the tokenizer has no end-of-sequence token: the model cannot learn where to stop"))
    train = _Preparation(config, Path(config.path), "train", tokenizer, emit)
    folders = train.run()
    if config.eval_path is not None:
        folders |= _Preparation(config, Path(config.eval_path), "eval", tokenizer, emit).run()
    return PreparedData(folders["train"], folders.get("eval"), train.format, train.sources())


class _Preparation:
    """Preparation of one data path: one split, or both if data.eval_fraction is held out."""

    def __init__(self, config: DataConfig, path: Path, split: SplitName, tokenizer: Any, emit: Emit) -> None:
        self._config = config
        self._path = path
        self._split: SplitName = split
        self._tokenizer = tokenizer
        self._emit = emit
        self._files = find_files(path, emit)
        self._bytes = sum(file.size for file in self._files)
        self._survey = Survey(_chunks_of(self._files), path, split, emit)
        self.format = config.format if config.format != "auto" else self._survey.format()

    def sources(self) -> tuple[Source, ...]:
        return tuple(Source(str(file.path), file.unit) for file in self._files)

    def run(self) -> dict[SplitName, Path]:
        started = time.monotonic()
        recipe = Recipe(
            format=self.format,
            seq_len=self._config.seq_len,
            on_long_row=self._config.on_long_row,
            eval_fraction=self._config.eval_fraction if self._split == "train" else 0.0,
            split=self._split,
        )
        tokenizer = ChunkTokenizer(recipe, self._tokenizer)  # rejects a tokenizer that does not support the format
        self._survey.report(self.format, self._tokenizer)
        folder = cache_folder(self._config.cache_dir)
        targets = {split: folder / name for split, name in self._fingerprints(recipe).items()}
        with fingerprint_lock(folder, targets[self._split].name, self._emit):
            cached = all(self._is_intact(target) for target in targets.values())
            if not cached:
                build = DatasetBuild(
                    recipe=recipe,
                    packing=self._config.packing,
                    pad_id=pad_id(self._tokenizer),
                    tokenizer=type(self._tokenizer).__name__,
                    on_bad_row=self._config.on_bad_row,
                    targets=targets,
                    emit=self._emit,
                    files=[str(file.path) for file in self._files],
                )
                with contextlib.closing(self._results(tokenizer)) as results:  # kills the workers on an error
                    build.run(results)
        meta = read_meta(targets[self._split])
        self._survey.report_unused(self.format, meta.unused_columns)
        for split, target in targets.items():
            self._announce(split, target, cached=cached, seconds=time.monotonic() - started)
        return targets

    def _is_intact(self, target: Path) -> bool:
        """Return whether the cache holds this data, with a valid checksum. Checked once here, for all ranks."""
        try:
            with DataFolder(target) as folder:
                if not folder.is_complete():
                    return False
                same, meta = folder.matches_checksum(), folder.meta()
        except PermissionError as err:
            self._emit(WarningIssued(message=f"the cached data ({target}) is not used, {err}: preparing it again"))
            return False
        except OSError:
            return False
        if not same and meta is not None and meta.checksum:
            self._emit(
                WarningIssued(
                    message=f"the cached {self._split} data fails its checksum ({target}): preparing it again",
                )
            )
        return same

    def _fingerprints(self, recipe: Recipe) -> dict[SplitName, str]:
        progress = PrepareProgress(self._emit, split=self._split, stage="hash", total=self._bytes)
        content = content_digest(self._files, progress.advance)
        progress.finish()
        tokenizer = tokenizer_digest(self._tokenizer, with_template=self.format == "messages")
        splits: tuple[SplitName, ...] = ("train", "eval") if recipe.eval_fraction else (self._split,)
        return {
            split: data_fingerprint(
                content,
                tokenizer,
                format=recipe.format,
                seq_len=recipe.seq_len,
                packing=self._config.packing,
                on_bad_row=self._config.on_bad_row,
                on_long_row=recipe.on_long_row,
                eval_fraction=recipe.eval_fraction,
                held_out=split != self._split,
            )
            for split in splits
        }

    def _results(self, tokenizer: ChunkTokenizer) -> Generator[ChunkResult]:
        requested = self._config.workers or available_workers()
        workers = max(1, min(requested, self._bytes // _BYTES_PER_WORKER))
        progress = PrepareProgress(self._emit, split=self._split, stage="tokenize", total=self._bytes)
        with contextlib.closing(ordered_map(tokenizer, _chunks_of(self._files), workers)) as results:
            for result in results:
                progress.advance(result.size)
                yield result
        progress.finish()

    def _announce(self, split: SplitName, target: Path, *, cached: bool, seconds: float) -> None:
        meta = read_meta(target)
        self._emit(
            DataReady(
                split=split,
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
        )


def _chunks_of(files: list[SourceFile]) -> Iterator[Chunk]:
    for file in files:
        yield from file.chunks()


def pad_id(tokenizer: Any) -> int:
    """Return the padding token. Padding is masked and bears no loss, so any token works if the tokenizer has none."""
    known = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    return next(token for token in known if token is not None)
