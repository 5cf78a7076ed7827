"""Complete checkpoints of transformers' trainer: incomplete ones are never used.

The trainer writes the files of `checkpoint-N` one by one, in place. A manifest with their sizes and checksums, written
last, commits it. Resuming takes the newest whole checkpoint; one that was cut short is passed over with a warning.
"""

from __future__ import annotations

import json
from pathlib import Path

from transformers import TrainingArguments

from pantheraml.base import log
from pantheraml.base.errors import CheckpointError, DamagedCheckpointError
from pantheraml.base.folders import write_text
from pantheraml.checkpoint.manifest import MANIFEST, file_entries, read_json, verify, write_manifest

logger = log.get(__name__)

STATE_FILE = "trainer_state.json"
"""Written last by the trainer itself."""


OWN_FILE = "pantheraml.json"
"""Settings that a resumed run must share with the one that wrote the checkpoint."""


def begin(folder: Path) -> None:
    """Make `folder` uncommitted before files in it are replaced."""
    (folder / MANIFEST).unlink(missing_ok=True)


def commit(folder: Path, args: TrainingArguments) -> None:
    """Commit `folder`, once all ranks have written their files."""
    write_text(folder / OWN_FILE, json.dumps({"global_batch_size": global_batch_size(args)}))
    files = [path for path in folder.iterdir() if path.is_file() and path.name != MANIFEST]
    write_manifest(folder, file_entries(files))


def find(wanted: str | bool, output: Path) -> str:
    """Return the folder to resume from: `wanted`, or the newest usable one in `output`; CheckpointError otherwise."""
    if isinstance(wanted, bool):
        return str(_newest(output))
    _check(Path(wanted))
    return str(wanted)


def _newest(output: Path) -> Path:
    """Return the newest usable checkpoint in `output`; CheckpointError if there is none."""
    for _, folder in sorted(saved_steps(output).items(), reverse=True):
        problem = _problem(folder)
        if problem is None:
            return folder
        logger.warning("%s is skipped: %s", folder, problem)
    raise CheckpointError(
        f"{output} contains no usable checkpoint.",
        where=str(output),
        fix="Call train() without resume_from_checkpoint to start from the beginning, and set save_steps.",
    )


def _check(folder: Path) -> None:
    """DamagedCheckpointError if `folder` is incomplete, or differs from its manifest."""
    problem = _problem(folder)
    if problem is not None:
        raise DamagedCheckpointError(
            f"The checkpoint {folder.name} cannot be used: {problem}.",
            where=str(folder),
            fix="Pass resume_from_checkpoint=True for the newest complete one in output_dir.",
        )


def warn_of_changes(folder: Path, args: TrainingArguments) -> None:
    """Warn if the run continues with another global batch: the trainer then skips other samples than were used."""
    if not (folder / OWN_FILE).is_file():
        return
    then, now = read_json(folder / OWN_FILE).get("global_batch_size"), global_batch_size(args)
    if then != now:
        logger.warning(
            "%s was written with a global batch of %s rows, and it is %s now: some samples of the epoch are repeated or"
            " left out",
            folder,
            then,
            now,
        )


def global_batch_size(args: TrainingArguments) -> int:
    return int(args.train_batch_size * args.gradient_accumulation_steps * args.world_size)


def _problem(folder: Path) -> str | None:
    if not (folder / STATE_FILE).is_file():
        return f"it has no {STATE_FILE}, so writing it was interrupted"
    if not (folder / MANIFEST).is_file():
        logger.info("%s has no %s: it was written by another trainer, and is not checked", folder, MANIFEST)
        return None
    try:
        verify(folder)
    except DamagedCheckpointError as err:
        return err.what.rstrip(".")
    return None


def saved_steps(output: Path) -> dict[int, Path]:
    """Return the checkpoints in `output`, whole or not, by step."""
    folders = [path for path in output.glob("checkpoint-*") if path.is_dir()]
    numbers = {folder: folder.name.removeprefix("checkpoint-") for folder in folders}
    return {int(number): folder for folder, number in numbers.items() if number.isdecimal()}
