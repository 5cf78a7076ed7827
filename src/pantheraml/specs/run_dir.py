"""RunDir: the folder of a run, the names of what lies in it, and who may write there.

A folder is a run's if it holds `run.lock`, which only we write. The process that carries out a run holds a lock on that
file, so a second one is refused. Whatever else lies in the folder is not ours, and is never removed.
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
from pantheraml.base.events import FILE_NAME, read_events
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
"""Everything that a run writes."""
OTHERS = ("tensorboard", "wandb", "mlflow", "trackio")
"""Of that, what other tools write in their own way, with links of their own."""


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
        """Where the prepared data lies; written by the `prepare` task for the `train` task."""
        return self.path / "data.json"

    @property
    def stop_file(self) -> Path:
        """Its presence asks the workers to save and leave."""
        return self.path / "stop-requested"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def stacks(self) -> Path:
        """Where each rank was, if it did not get on for too long."""
        return self.path / "stacks"

    @property
    def incidents(self) -> Path:
        """What was found out about steps that went wrong."""
        return self.path / "incidents"

    @property
    def faults(self) -> Path:
        """Marks of failures that a test asked for and got."""
        return self.path / "faults"

    @property
    def adapter(self) -> Path:
        return self.path / "adapter"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    # What it holds ----------------------------------------------------------------------------------------------------

    def holds_run(self) -> bool:
        return (self.path / LOCK).is_file()

    def holds_work(self) -> bool:
        """Whether the run got as far as training; one that failed before (a bad row, say) has nothing to lose."""
        return self.checkpoints.exists() or any(event["kind"] == "train.started" for event in read_events(self.path))

    def last_checkpoint(self) -> int | None:
        """The step of the newest whole checkpoint."""
        steps = [int(path.parent.name.removeprefix("step-")) for path in self.checkpoints.glob("step-*/manifest.json")]
        return max(steps, default=None)

    def config(self) -> TrainConfig:
        self.require()
        return load_config(self.config_file)

    def received_config(self, consent: Consent) -> TrainConfig:
        """The same, for a folder that may be somebody else's: ConfigError if it asks for more than `consent`."""
        require_allowed(self.path, key="the run folder")
        config = self.config()
        consent.check(config.model, where=str(self.config_file))
        return config

    def plan(self) -> Plan:
        try:
            return Plan.model_validate(json.loads(self.plan_file.read_text()))
        except (OSError, ValueError) as err:
            raise RunDirectoryError(
                f"The plan of this run cannot be read: {err}.", where=str(self.plan_file), todo="Resume or rerun it."
            ) from err

    def data(self) -> dict[str, Any]:
        """What `data_file` holds: the folders `train` and `eval` (or None), the `format` of rows, and the `sources`
        (file and unit of each; none where an earlier version wrote it)."""
        try:
            found = json.loads(self.data_file.read_text(encoding="utf-8"))
            if not _describes_data(found):
                raise ValueError("it describes no data")
        except (OSError, ValueError, RecursionError) as err:
            raise RunDirectoryError(
                "The run folder's data.json, which says what its data is, is missing or damaged.",
                where=str(self.data_file),
                todo="Bring the file back, or have `pantheraml resume` prepare the data again.",
            ) from err
        return {"sources": [], **found}

    def write_config(self, config: TrainConfig) -> None:
        write_text(self.config_file, dump_yaml(config))

    def write_plan(self, plan: Plan) -> None:
        write_text(self.plan_file, json.dumps(plan.model_dump(mode="json"), indent=1))

    def trained(self) -> Path:
        """The folder with the trained weights."""
        for name in ("adapter", "model"):
            if (self.path / name).is_dir():
                return self.path / name
        raise RunDirectoryError(
            "This run has no trained weights yet.", where=str(self.path), todo="Finish it with `pantheraml resume`."
        )

    def require(self) -> None:
        if not self.config_file.is_file():
            raise RunDirectoryError(
                f"{self.path} is not a run folder: it has no config.yaml.",
                todo="Give the folder that `pantheraml train --output` made.",
            )

    # Who may write there ----------------------------------------------------------------------------------------------

    def mark(self) -> None:
        """Make the folder, and make it a run's."""
        try:
            private_folder(self.path)
            os.close(open_private(self.path / LOCK, os.O_RDWR | os.O_CREAT))
        except OSError as err:
            raise self._unusable(err) from err

    def _unusable(self, err: OSError) -> RunDirectoryError:
        return RunDirectoryError(
            f"The output folder {self.path} cannot be used: {err.strerror}.", todo="Choose another --output."
        )

    @contextmanager
    def claim(self, *, resume: bool, overwrite: bool) -> Iterator[Replacement]:
        """Hold the folder for a run. One that holds another run, or anything else, is left alone unless told so."""
        require_allowed(self.path, key="--output")
        if self.path.is_dir() and any(self.path.iterdir()) and not self.holds_run():
            raise RunDirectoryError(
                f"The output folder {self.path} holds other files.", todo="Choose an empty or new folder for --output."
            )
        self.mark()
        with self._lock_file() as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as err:
                raise RunDirectoryError(
                    f"Another process is at work in {self.path}.",
                    todo="Wait for it, stop it, or choose another --output.",
                ) from err
            self._refuse_links()
            replacement = Replacement(self.path)
            if not resume and self.holds_work() and not overwrite:
                raise RunDirectoryError(
                    f"The output folder {self.path} already holds a run.",
                    todo="Add --resume to continue it, --overwrite to replace it, or choose another --output.",
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
        """A folder that somebody else made must not have a run write to, or remove, what its links lead to."""
        partial = tuple(path.name for path in self.path.glob(f"{PARTIAL}*"))
        try:
            refuse_links(self.path, (*(name for name in CONTENTS if name not in OTHERS), LOCK, REPLACED, *partial))
            for name in OTHERS:
                if (self.path / name).is_symlink():
                    raise OSError(errno.ELOOP, f"{name} in it is a link")
        except OSError as err:
            raise self._unusable(err) from err


class Replacement:
    """An old run on its way out: kept aside until the new one is known to start, and put back if it does not."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._aside = path / REPLACED

    def move_aside(self) -> None:
        shutil.rmtree(self._aside, ignore_errors=True)
        self._aside.mkdir()
        for name in CONTENTS:
            if (self._path / name).exists():
                os.rename(self._path / name, self._aside / name)

    def commit(self) -> None:
        shutil.rmtree(self._aside, ignore_errors=True)

    def restore(self) -> None:
        """Put an old run that trained back in place of the new one that did not; do nothing after `commit`."""
        if not self._aside.is_dir():
            return
        if RunDir(self._aside).holds_work():
            remove_contents(self._path)
            for path in self._aside.iterdir():
                os.rename(path, self._path / path.name)
        shutil.rmtree(self._aside)


def _describes_data(found: Any) -> bool:
    return (
        isinstance(found, dict)
        and isinstance(found.get("train"), str)
        and isinstance(found.get("eval"), str | None)
        and found.get("format") in ("text", "prompt", "messages", "instruction")
        and isinstance(found.get("sources", []), list)
        and all(
            isinstance(one, list) and [type(part) for part in one] == [str, str] for one in found.get("sources", [])
        )
    )


def remove_contents(folder: Path) -> None:
    """Remove what a run writes, and nothing else."""
    for path in [*(folder / name for name in CONTENTS), *folder.glob(f"{PARTIAL}*")]:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
