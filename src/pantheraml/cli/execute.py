"""Carrying out a run from the outside: folder, plan, workers, readers, and the one way in which all of it ends.

This is the parent process. It never imports torch; what the workers do reaches it as events.
"""

from __future__ import annotations

import contextlib
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pantheraml import __version__
from pantheraml.base.errors import InterruptedRunError, PantheraError, StorageError, WorkerError, error_classes
from pantheraml.base.events import Event, EventWriter
from pantheraml.devices.probe import probe
from pantheraml.launch import local
from pantheraml.planner.choose import choose
from pantheraml.readers.follow import Follower, Reader
from pantheraml.readers.progress import ProgressBar
from pantheraml.readers.report import write_report
from pantheraml.readers.sinks import open_sink
from pantheraml.readers.summary import write_run_json
from pantheraml.specs.plan import Plan
from pantheraml.specs.run_dir import RunDir
from pantheraml.specs.tasks import Request
from pantheraml.specs.train import TrainConfig


@dataclass(frozen=True)
class Screen:
    """What a person gets to see: a progress bar with a title, or nothing (for --json)."""

    title: str = ""
    quiet: bool = False

    def readers(self) -> list[Reader]:
        return [] if self.quiet else [ProgressBar(self.title)]


def run_training(
    config: TrainConfig, output: Path, *, resume: bool = False, overwrite: bool = False, screen: Screen
) -> dict[str, Any]:
    """Train, and return what run.json holds. Raises what stopped the run, after everything was written down."""
    plan = choose(config, probe())
    sinks = [(name, config.report.project) for name in config.report.sinks]
    run = RunDir(output)
    run.create(resume=resume, overwrite=overwrite)
    run.write_config(config)
    run.write_plan(plan)
    readers = screen.readers() + [open_sink(name, run_dir=output, project=project) for name, project in sinks]
    begin = time.monotonic()
    with EventWriter(output) as emit, local.StopRequests().installed() as stops:
        follower = _Errors(Follower(output, readers, from_end=True))
        emit("run.started", command=shlex.join(sys.argv), pantheraml=__version__, output=str(output))
        emit("plan.made", plan=plan.model_dump(mode="json"))
        status = "failed"
        try:
            _run_task("prepare", run, None, config, stops, follower)
            _run_task("train", run, plan, config, stops, follower)
            status = "stopped" if stops.count else "succeeded"
        except InterruptedRunError:
            status = "stopped"
            raise
        except WorkerError:
            status = "crashed"
            raise
        except PantheraError as err:
            if not follower.reported:
                _emit_error(emit, err)
            raise
        finally:
            run.stop_file.unlink(missing_ok=True)
            with _not_hiding_the_cause():
                emit("run.finished", status=status, seconds=time.monotonic() - begin)
                follower.close()
                summary = write_run_json(output)
                if config.report.html:
                    write_report(output)
        if stops.count and not summary["output"]:
            raise InterruptedRunError(
                f"Stopped on request after step {summary['steps'] or 0}; a checkpoint is saved.",
                where=str(output),
                todo=f"Continue with: pantheraml resume {shlex.quote(str(output))}",
            )
    return summary


@contextlib.contextmanager
def _not_hiding_the_cause() -> Iterator[None]:
    """A full disk fails twice: first the checkpoint, then the report about it. The first error is the one to show."""
    cause = sys.exception()
    try:
        yield
    except StorageError:
        if cause is None:
            raise


def run_request(task: str, request: Request, *, screen: Screen, answer: Callable[[Path], Any]) -> Any:
    """A task beside a run, in a folder of its own; `answer` reads the result out of that folder."""
    with tempfile.TemporaryDirectory(prefix=f"pantheraml-{task}-") as name, local.StopRequests().installed() as stops:
        folder = Path(name)
        request.write(folder)
        follower = _Errors(Follower(folder, screen.readers()))
        try:
            status = local.run_workers(
                local.task_command(task, folder),
                folder,
                environment=local.worker_environment(None),
                stops=stops,
                ask_to_stop=None,
                grace_seconds=0,
                on_tick=follower.poll,
            )
        finally:
            follower.close()
        follower.raise_for(folder, status, interrupted=bool(stops.count))
        return answer(folder)


def _run_task(
    task: str, run: RunDir, plan: Plan | None, config: TrainConfig, stops: local.StopRequests, follower: _Errors
) -> None:
    training = plan is not None
    status = local.run_workers(
        local.training_command(run.path, plan) if plan is not None else local.task_command(task, run.path),
        run.path,
        environment=local.worker_environment(plan),
        stops=stops,
        ask_to_stop=run.stop_file.touch if training else None,
        grace_seconds=config.parallel.grace_seconds,
        on_tick=follower.poll,
    )
    follower.poll()
    follower.raise_for(run.path, status, interrupted=bool(stops.count))


class _Errors:
    """A follower that keeps the errors it sees."""

    def __init__(self, follower: Follower) -> None:
        self._follower = follower
        self._errors: list[Event] = []

    @property
    def reported(self) -> bool:
        return bool(self._errors)

    def poll(self) -> None:
        self._errors += [event for event in self._follower.poll() if event["kind"] == "error"]

    def close(self) -> None:
        self.poll()
        self._follower.close()

    def raise_for(self, folder: Path, status: int, *, interrupted: bool) -> None:
        """Raise what the workers reported, or what can be told about their end; nothing if all went well."""
        if self._errors:
            raise _rebuild(_cause(self._errors))
        if status == 0:
            return
        if interrupted:
            raise InterruptedRunError("Stopped on request.", where=str(folder), todo="Start it again when you like.")
        raise WorkerError(
            local.explain_death(folder, status),
            where=str(folder / local.LOG_FILE),
            todo="The log has the details; its last lines are:\n" + local.log_tail(folder, lines=8),
        )


def _cause(errors: Sequence[Event]) -> Event:
    """When one rank fails, its peers lose their connection and fail too: prefer an error that somebody foresaw."""
    foreseen = [event for event in errors if event["error"] != WorkerError.__name__]
    return (foreseen or list(errors))[0]


def _rebuild(event: Event) -> PantheraError:
    """The worker's error, as an exception of this process."""
    kind = error_classes().get(event["error"], WorkerError)
    err = kind(event["what"], where=event["where"], todo=event["todo"])
    if event.get("traceback"):
        err.add_note(event["traceback"])
    return err


def _emit_error(emit: EventWriter, err: PantheraError) -> None:
    emit(
        "error", error=type(err).__name__, what=err.what, where=err.where, todo=err.todo, exit_code=err.exit_code
    )  # fmt: skip
