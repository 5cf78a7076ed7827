"""Worker tasks beside a run: data preparation alone, generate, export, quantize, verify, replay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pantheraml.base.errors import InterruptedRunError
from pantheraml.base.event_stream import read_events
from pantheraml.base.events import Notice, WarningIssued
from pantheraml.base.folders import working_folder
from pantheraml.launch import local
from pantheraml.readers.follow import Follower, Reader
from pantheraml.runs.attempt import Attempt, WorkerCommand
from pantheraml.specs.plan import Plan
from pantheraml.specs.run_dir import RunDir
from pantheraml.specs.tasks import Request
from pantheraml.specs.train import TrainConfig


def run_prepare(run: RunDir, config: TrainConfig, *, readers: Sequence[Reader] = ()) -> None:
    """Prepare the data of a run folder, without training."""
    command = local.command_for("prepare", run.path, None)
    environment = local.worker_environment(None, grace_seconds=config.parallel.grace_seconds)
    with local.StopRequests().installed() as stops:
        attempt = Attempt(Follower(run.path, readers))
        try:
            attempt.supervise(run, config, WorkerCommand(command, environment, ask_to_stop=None), stops)
        finally:
            attempt.close()


def run_request(
    task: str,
    request: Request,
    *,
    plan: Plan | None = None,
    readers: Sequence[Reader] = (),
    answer: Callable[[Path], Any],
) -> Any:
    """Run a task in a folder of its own, and return what `answer` reads from that folder.

    The folder is kept if the error points to its log. With a plan the task runs on all of the plan's ranks.
    """
    with working_folder(task) as folder, local.StopRequests().installed() as stops:
        request.write(folder)
        attempt = Attempt(Follower(folder, readers))
        try:
            status = local.run_workers(
                local.command_for(task, folder, plan),
                folder,
                environment=local.worker_environment(plan),
                stops=stops,
                ask_to_stop=None,
                grace_seconds=0,
                on_tick=attempt.poll,
            )
        finally:
            attempt.close()
        if stops.count and status:
            raise InterruptedRunError("Stopped on request.", fix="Nothing was saved; rerun to start over.")
        attempt.raise_for(folder, status, log_from=0)
        return answer(folder)


def messages(folder: Path) -> list[str]:
    """Notices and warnings of a task, for commands without a progress bar."""
    return [event.message for event in read_events(folder) if isinstance(event, Notice | WarningIssued)]
