"""A run under a supervisor of its own, seen from the process that asked for it (the service).

The supervisor (`supervisor`) is a small process without torch, in a session of its own, that runs `run_training`. It
outlives the process that started it: its whole state is in the job's folder, so any later process can adopt the run.

    request.json      what to run; written before the start
    supervisor.json   the supervisor's identity (boot, pid, start time); written by it first
    exit.json         how it ended; written by it last
    supervisor.log    its output
    run/              the run folder

Every start has a token, larger than all before (fencing). A supervisor whose token is no longer that of `request.json`
does nothing, so a delayed start cannot overwrite a newer one.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil
from pydantic import BaseModel, ConfigDict, ValidationError

from pantheraml.base import env
from pantheraml.base.errors import LaunchError
from pantheraml.base.folders import write_text
from pantheraml.base.private import open_private, private_folder
from pantheraml.launch.local import LOG_FILE
from pantheraml.launch.script import python_module
from pantheraml.runs.errors import Ending
from pantheraml.runs.process_identity import ProcessIdentity
from pantheraml.specs.run_dir import RunDir

JOB = "PANTHERAML_JOB"
"""Environment variable that marks all processes of a job: `<name>:<token>`."""

_Record = TypeVar("_Record", bound=BaseModel)


class RunRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str
    token: int
    config: dict[str, Any]
    """A TrainConfig."""
    cores: list[int] | None = None
    """Cores that its processes may use; None: all."""


class SupervisorRecord(BaseModel):
    token: int
    identity: ProcessIdentity


class RunExit(BaseModel):
    token: int
    status: Ending
    error: str | None = None
    """Class name (`base.errors`)."""
    what: str | None = None
    where: str | None = None
    fix: str | None = None
    time: float


@dataclass(frozen=True)
class Limits:
    """Limits on what the processes of a run may access."""

    roots: Sequence[Path]
    """Folders that all of its paths must be in."""
    cache: Path

    def environment(self, folder: Path, **changes: str | None) -> dict[str, str]:
        """Return the environment of a process that works in `folder` within these limits."""
        roots = [path.resolve() for path in (*self.roots, folder, self.cache)]  # it has a current folder of its own
        return env.worker_environment(
            PANTHERAML_ALLOWED_ROOTS=os.pathsep.join(map(str, roots)),
            PANTHERAML_NO_FOREIGN_CODE="1",
            PANTHERAML_CACHE=str(self.cache.resolve()),
            HF_HUB_OFFLINE="1",
            HF_TOKEN=None,
            HUGGING_FACE_HUB_TOKEN=None,
            **env.outside_of_launch(),
            **changes,
        )


@dataclass(frozen=True)
class SupervisedRun:
    """The run in a job's folder."""

    folder: Path
    name: str

    @property
    def run_dir(self) -> RunDir:
        return RunDir(self.folder / "run")

    @property
    def log(self) -> Path:
        """Output of the workers."""
        return self.run_dir.path / LOG_FILE

    @property
    def request_file(self) -> Path:
        return self.folder / "request.json"

    def start(
        self, config: dict[str, Any], token: int, limits: Limits, cores: Sequence[int] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start the run, or continue it from its newest checkpoint. Poll the result now and then, to reap it."""
        private_folder(self.folder)
        for name in ("exit.json", "supervisor.json"):
            (self.folder / name).unlink(missing_ok=True)
        request = RunRequest(name=self.name, token=token, config=config, cores=None if cores is None else list(cores))
        write_text(self.request_file, request.model_dump_json())
        environment = limits.environment(self.folder, **{JOB: f"{self.name}:{token}"})
        with open(open_private(self.folder / "supervisor.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab") as output:
            try:
                return subprocess.Popen(
                    [*python_module("pantheraml.runs.supervisor"), str(self.folder), str(token)],
                    cwd=self.folder,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    start_new_session=True,
                )
            except OSError as err:
                raise LaunchError(
                    f"The supervisor of {self.name} could not be started: {err}.",
                    fix="Check the limits of processes and memory (`ulimit -a`).",
                ) from err

    def ending(self, token: int) -> RunExit | None:
        """Return how the start with this token ended; None: it has not, or could not record it."""
        found = _read(self.folder / "exit.json", RunExit)
        return found if found is not None and found.token == token else None

    def is_running(self, token: int) -> bool:
        """True while the supervisor of this start lives. One that was started a moment ago is found by its mark."""
        record = _read(self.folder / "supervisor.json", SupervisorRecord)
        if record is not None and record.token == token:
            return record.identity.is_running()
        return bool(self._marked(token))

    def ask_to_stop(self, token: int) -> None:
        """Have the run save a checkpoint and end."""
        self._signal(token, signal.SIGTERM)

    def stop_now(self, token: int) -> None:
        """Have the supervisor kill its workers at once, record how the run ended, and exit."""
        self._signal(token, signal.SIGTERM)
        self._signal(token, signal.SIGINT)

    def is_anyone_left(self) -> bool:
        """True while any process of the job lives, of whatever start."""
        return bool(self._marked(None))

    def kill(self) -> int:
        """Kill every remaining process of the job, whatever its parent is now; return how many."""
        left = self._marked(None)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=5)
        return len(left)

    def _signal(self, token: int, number: signal.Signals) -> None:
        record = _read(self.folder / "supervisor.json", SupervisorRecord)
        if record is not None and record.token == token:
            if record.identity.is_running():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(record.identity.pid, number)
            return
        for process in self._marked(token):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def _marked(self, token: int | None) -> list[psutil.Process]:
        """Return the processes with the job's mark, of one start or of all."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError, ValueError):
                name, _, number = process.environ().get(JOB, "").rpartition(":")
                ours = name == self.name and token in (None, int(number))
                if ours and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found


def _read(path: Path, model: type[_Record]) -> _Record | None:
    try:
        return model.model_validate_json(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValidationError):
        return None
