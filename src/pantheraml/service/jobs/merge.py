"""A tuned model in one piece: its adapter merged into the base, in a worker process, as artifacts `merged/...`.

One merge at a time, on a CPU: it needs the memory of the base. The folder appears when it is whole. A service that is
stopped meanwhile ends the worker; whoever asks again begins anew.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Literal

from pantheraml.base.errors import PantheraError, RunDirectoryError
from pantheraml.base.folders import no_scratch_left
from pantheraml.runs.supervised import Limits, SupervisedRun
from pantheraml.service.jobs.worker_task import run_task
from pantheraml.service.settings import Settings
from pantheraml.specs.consent import Consent
from pantheraml.specs.run_dir import RunDir
from pantheraml.specs.tasks import ExportRequest

FOLDER = "merged"
"""Folder of merged weights in the run folder."""
MOST_WAITING = 16
_SECONDS = 4 * 3600.0
MergeStatus = Literal["none", "merging", "merged", "failed"]


class Merger:
    def __init__(self, settings: Settings, limits: Limits) -> None:
        self._settings, self._limits = settings, limits
        self._working = asyncio.Lock()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._errors: dict[str, PantheraError] = {}

    def status(self, job_id: str) -> tuple[MergeStatus, PantheraError | None]:
        if (self._run(job_id).path / FOLDER).is_dir():
            return "merged", None
        if job_id in self._tasks:
            return "merging", None
        error = self._errors.get(job_id)
        return ("none", None) if error is None else ("failed", error)

    def start(self, job_id: str) -> None:
        """Begin, unless it is merged, or about to be. RunDirectoryError if too many wait."""
        if self.status(job_id)[0] in ("merging", "merged"):
            return
        if len(self._tasks) >= MOST_WAITING:
            raise RunDirectoryError(f"{MOST_WAITING} models wait to be merged.", fix="Try again later.")
        self._errors.pop(job_id, None)
        task = asyncio.create_task(self._merge(job_id))
        self._tasks[job_id] = task
        task.add_done_callback(lambda _: self._tasks.pop(job_id))

    async def wait(self, job_id: str) -> None:
        if (task := self._tasks.get(job_id)) is not None:
            await asyncio.wait([task])

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _run(self, job_id: str) -> RunDir:
        return SupervisedRun(self._settings.jobs.resolve() / job_id, job_id).run_dir

    async def _merge(self, job_id: str) -> None:
        async with self._working:
            run = self._run(job_id)
            try:
                request = ExportRequest(
                    run_dir=run.path,
                    consent=Consent(),
                    output=run.path / FOLDER,
                    precision=run.plan().precision,
                    base="trained",
                )
                with tempfile.TemporaryDirectory(dir=self._limits.cache, prefix="merge-") as name:
                    request.write(Path(name))
                    limits = Limits([*self._limits.roots, run.path.parent], self._limits.cache)
                    with no_scratch_left(request.output):
                        await run_task("export", Path(name), limits, seconds=_SECONDS)
            except PantheraError as err:
                self._errors[job_id] = err
