"""RunDir: the folder of a run, its file names, and its lock.

A folder that contains `run.lock` is a run folder. The process that executes a run holds a lock on that file, so a
second one is refused. Files that a run does not write are never removed.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pantheraml.base.errors import RunDirectoryError
from pantheraml.base.event_stream import FILE_NAME, read_events
from pantheraml.base.events import TrainStarted
from pantheraml.base.folders import PARTIAL, write_text
from pantheraml.base.private import open_private, private_folder, refuse_links
from pantheraml.base.roots import require_allowed
from pantheraml.specs.config_file import dump_yaml, load_config
from pantheraml.specs.consent import Consent
from pantheraml.specs.plan import Plan
from pantheraml.specs.train import TrainConfig

LOCK = "run.lock"
REPLACED = ".replaced"
CONTENTS = (
    *("config.yaml", "plan.json", "data.json", FILE_NAME, "run.json", "report.html", "worker.log", "stop-requested"),
    *("checkpoints", "incidents", "stacks", "faults", "adapter", "model"),
    *("sinks", "tensorboard", "wandb", "mlflow", "trackio"),
)
"""Names of everything that a run writes."""
OTHERS = ("tensorboard", "wandb", "mlflow", "trackio")
"""Folders among CONTENTS that trackers write, possibly with symlinks of their own."""


@dataclass(frozen=True)
class RunDir:
    path: Path

    @property
    def config_file(self) -> Path:
        return self.path / "config.yaml"

    @property
    def plan_file(self) -> Path:
        return self.path / "plan.json"

    @property
    def data_file(self) -> Path:
        """Location of the prepared data; written by the `prepare` task for the `train` task."""
        return self.path / "data.json"

    @property
    def stop_file(self) -> Path:
        """If this file exists, the workers save and exit."""
        return self.path / "stop-requested"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def stacks(self) -> Path:
        """Stack traces of the ranks of a hung run."""
        return self.path / "stacks"

    @property
    def incidents(self) -> Path:
        """Reports on bad steps."""
        return self.path / "incidents"

    @property
    def faults(self) -> Path:
        """Markers of injected faults that have fired."""
        return self.path / "faults"

    @property
    def adapter(self) -> Path:
        return self.path / "adapter"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    # Contents ---------------------------------------------------------------------------------------------------------

    def holds_run(self) -> bool:
        return (self.path / LOCK).is_file()

    def holds_work(self) -> bool:
        """Return True if the run got as far as training; one that failed earlier (invalid data) has nothing to lose."""
        return self.checkpoints.exists() or any(isinstance(event, TrainStarted) for event in read_events(self.path))

    def last_checkpoint(self) -> int | None:
        """Step of the newest complete checkpoint."""
        steps = [int(path.parent.name.removeprefix("step-")) for path in self.checkpoints.glob("step-*/manifest.json")]
        return max(steps, default=None)

    def config(self) -> TrainConfig:
        self.require()
        return load_config(self.config_file)

    def received_config(self, consent: Consent) -> TrainConfig:
        """Return the config of a run folder of unknown origin; ConfigError if it needs more than `consent`."""
        require_allowed(self.path, key="the run folder")
        config = self.config()
        consent.check(config.model, where=str(self.config_file))
        return config

    def plan(self) -> Plan:
        try:
            return Plan.model_validate(json.loads(self.plan_file.read_text()))
        except (OSError, ValueError) as err:
            raise RunDirectoryError(
                f"The plan of this run cannot be read: {err}.", where=str(self.plan_file), fix="Resume or rerun it."
            ) from err

    def data(self) -> dict[str, Any]:
        """Read `data_file`: the folders `train` and `eval` (or None), the `format` of rows, and the `sources` (file and
        unit of each; empty if an earlier version wrote it)."""
        try:
            description = json.loads(self.data_file.read_text(encoding="utf-8"))
            if not _describes_data(description):
                raise ValueError("it does not describe data")
        except (OSError, ValueError, RecursionError) as err:
            raise RunDirectoryError(
                "The run folder's data.json, which describes its data, is missing or damaged.",
                where=str(self.data_file),
                fix="Restore the file, or run `pantheraml resume` to prepare the data again.",
            ) from err
        return {"sources": [], **description}

    def write_config(self, config: TrainConfig) -> None:
        write_text(self.config_file, dump_yaml(config))

    def write_plan(self, plan: Plan) -> None:
        write_text(self.plan_file, json.dumps(plan.model_dump(mode="json"), indent=1))

    def trained(self) -> Path:
        """Folder of the trained weights."""
        for name in ("adapter", "model"):
            if (self.path / name).is_dir():
                return self.path / name
        raise RunDirectoryError(
            "This run has no trained weights yet.", where=str(self.path), fix="Finish it with `pantheraml resume`."
        )

    def require(self) -> None:
        if not self.config_file.is_file():
            raise RunDirectoryError(
                f"{self.path} is not a run folder: it has no config.yaml.",
                fix="Use a folder created by `pantheraml train --output`.",
            )

    # Locking ----------------------------------------------------------------------------------------------------------

    def mark(self) -> None:
        """Create the folder and mark it as a run folder."""
        try:
            private_folder(self.path)
            os.close(open_private(self.path / LOCK, os.O_RDWR | os.O_CREAT))
        except OSError as err:
            raise self._unusable(err) from err

    def _unusable(self, err: OSError) -> RunDirectoryError:
        return RunDirectoryError(
            f"The output folder {self.path} cannot be used: {err.strerror}.", fix="Choose another --output."
        )

    @contextmanager
    def claim(self, *, resume: bool, overwrite: bool) -> Iterator[Replacement]:
        """Lock the folder for a run. One that contains a run needs `resume` or `overwrite`; other files are refused."""
        require_allowed(self.path, key="--output")
        if self.path.is_dir() and any(self.path.iterdir()) and not self.holds_run():
            raise RunDirectoryError(
                f"The output folder {self.path} contains other files.",
                fix="Choose an empty or new folder for --output.",
            )
        self.mark()
        with self._lock_file() as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as err:
                raise RunDirectoryError(
                    f"Another process is using {self.path}.",
                    fix="Wait for it, stop it, or choose another --output.",
                ) from err
            self._refuse_links()
            replacement = Replacement(self.path)
            if not resume and self.holds_work() and not overwrite:
                raise RunDirectoryError(
                    f"The output folder {self.path} already contains a run.",
                    fix="Add --resume to continue it, --overwrite to replace it, or choose another --output.",
                )
            if not resume:
                replacement.move_aside()
            self.stop_file.unlink(missing_ok=True)
            try:
                yield replacement
            finally:
                replacement.restore()

    @contextmanager
    def _lock_file(self) -> Iterator[int]:
        try:
            descriptor = open_private(self.path / LOCK, os.O_RDWR | os.O_CREAT)
        except OSError as err:
            raise self._unusable(err) from err
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def _refuse_links(self) -> None:
        """Refuse symlinks: a folder made by someone else must not redirect writes or deletions."""
        partial = tuple(path.name for path in self.path.glob(f"{PARTIAL}*"))
        try:
            refuse_links(self.path, (*(name for name in CONTENTS if name not in OTHERS), LOCK, REPLACED, *partial))
            for name in OTHERS:
                if (self.path / name).is_symlink():
                    raise OSError(errno.ELOOP, f"{name} in it is a symlink")
        except OSError as err:
            raise self._unusable(err) from err


class Replacement:
    """Backup of an overwritten run: kept until the new run has started, and restored if it fails before."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._backup = path / REPLACED

    def move_aside(self) -> None:
        shutil.rmtree(self._backup, ignore_errors=True)
        self._backup.mkdir()
        for name in CONTENTS:
            if (self._path / name).exists():
                os.rename(self._path / name, self._backup / name)

    def commit(self) -> None:
        shutil.rmtree(self._backup, ignore_errors=True)

    def restore(self) -> None:
        """Restore an old run that had trained; do nothing after `commit`."""
        if not self._backup.is_dir():
            return
        if RunDir(self._backup).holds_work():
            remove_contents(self._path)
            for path in self._backup.iterdir():
                os.rename(path, self._path / path.name)
        shutil.rmtree(self._backup)


def _describes_data(values: Any) -> bool:
    return (
        isinstance(values, dict)
        and isinstance(values.get("train"), str)
        and isinstance(values.get("eval"), str | None)
        and values.get("format") in ("text", "prompt", "messages", "instruction")
        and isinstance(values.get("sources", []), list)
        and all(
            isinstance(source, list) and [type(part) for part in source] == [str, str]
            for source in values.get("sources", [])
        )
    )


def remove_contents(folder: Path) -> None:
    """Remove the files that a run writes, and nothing else."""
    for path in [*(folder / name for name in CONTENTS), *folder.glob(f"{PARTIAL}*")]:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
