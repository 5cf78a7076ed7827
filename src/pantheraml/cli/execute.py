"""Carrying out a run from the outside: folder, plan, workers, readers, and the one way in which all of it ends.

This is the parent process. It never imports torch; what the workers do reaches it as events.
"""

from __future__ import annotations

import contextlib
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pantheraml import __version__
from pantheraml.base import env
from pantheraml.base.errors import (
    HangError,
    InterruptedRunError,
    PantheraError,
    PreemptedError,
    RunDirectoryError,
    StorageError,
    WorkerError,
    WorkerKilledError,
    error_classes,
)
from pantheraml.base.events import Event, EventWriter, emit_error, read_events
from pantheraml.base.folders import write_text
from pantheraml.base.private import private_files
from pantheraml.base.text import printable
from pantheraml.cli.restarts import Restarts
from pantheraml.devices.probe import probe
from pantheraml.launch import local, ranks
from pantheraml.launch.stacks import HangWatch, explain_hang
from pantheraml.planner.choose import choose
from pantheraml.readers.follow import Follower, Reader
from pantheraml.readers.progress import ProgressBar
from pantheraml.readers.report import write_report
from pantheraml.readers.sinks import open_sink
from pantheraml.readers.summary import write_run_json
from pantheraml.specs.faults import check_allowed
from pantheraml.specs.plan import Plan
from pantheraml.specs.resume import check_resumable, with_absolute_paths
from pantheraml.specs.run_dir import CONTENTS, Replacement, RunDir
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
    check_allowed(config.faults)
    place = ranks.own_place(config.parallel)
    if place is not None:
        config = ranks.with_world_size(config, place)
    plan = choose(config, probe(), place)
    config = with_absolute_paths(config)
    if place is not None and place.rank > 0:
        ranks.become_worker(output, config, plan, place)
    run = RunDir(output)
    _refuse_inputs_inside(run, config, overwrite=overwrite)
    with run.claim(resume=resume, overwrite=overwrite) as replacement, private_files():
        insisted = check_resumable(run.config(), config) if resume and run.holds_work() else []
        before = {file: file.read_text() for file in (run.config_file, run.plan_file) if resume and file.is_file()}
        run.write_config(config)
        run.write_plan(plan)
        sinks = [open_sink(name, run_dir=output, project=config.report.project) for name in config.report.sinks]
        readers = [*screen.readers(), *sinks]
        with EventWriter(output) as emit, local.StopRequests().installed() as stops:
            leg = _Leg(Follower(output, readers, from_end=True))
            emit("run.started", command=shlex.join(sys.argv), pantheraml=__version__, output=str(output))
            if (because := env.restarted_because()) is not None:
                emit("run.restarted", message=because, step=run.last_checkpoint(), world_size=plan.world_size)
            emit("plan.made", plan=plan.model_dump(mode="json"))
            for message in plan.warnings:
                emit("warning", message=message)
            for notice in (notice for sink in sinks for notice in sink.notices):
                emit("notice", message=notice)
            for change in insisted:
                emit("warning", message=f"the run goes on although {change}, as --allow-change says")
            with _written_down(run, config, emit, leg), _put_back_unless_trained(before, leg):
                if place is None:
                    _train(run, plan, config, stops, leg, emit, replacement)
                else:
                    _run_rank(run, plan, config, place, stops, leg, replacement)
                if leg.stopped_by == "request":
                    raise _stopped(run, leg, stops)
    return write_run_json(output)


def _refuse_inputs_inside(run: RunDir, config: TrainConfig, *, overwrite: bool) -> None:
    """A run that replaces another cannot read from it."""
    own = [(run.path / name).resolve() for name in CONTENTS]
    for path in (config.model.path, config.model.tokenizer, config.data.path, config.data.eval_path):
        place = None if path is None else Path(path).resolve()
        if overwrite and place is not None and any(place == name or name in place.parents for name in own):
            raise RunDirectoryError(
                f"{path} belongs to the run that --overwrite replaces.", todo="Choose another --output."
            )


def _stopped(run: RunDir, leg: _Leg, stops: local.StopRequests) -> InterruptedRunError:
    by = leg.signal if stops.first is None else stops.first.name
    step = run.last_checkpoint()
    saved = "no checkpoint was saved" if step is None else f"the checkpoint of step {step} is saved"
    again = (
        f"Continue with: pantheraml resume {shlex.quote(str(run.path))}" if step else "Start it again when you like."
    )
    if by == "SIGINT":
        return InterruptedRunError(f"Stopped on request; {saved}.", where=str(run.path), todo=again)
    named = "a signal to one of its processes" if by is None else f"{by}, as schedulers send it"
    return PreemptedError(f"Stopped by {named}; {saved}.", where=str(run.path), todo=again)


@contextlib.contextmanager
def _written_down(run: RunDir, config: TrainConfig, emit: EventWriter, leg: _Leg) -> Iterator[None]:
    """However the block ends, the event stream, run.json and the report say so."""
    begin, status = time.monotonic(), "failed"
    try:
        yield
        status = "succeeded"
    except PantheraError as err:
        if isinstance(err, PreemptedError):
            status = "preempted"
        elif isinstance(err, InterruptedRunError):
            status = "stopped"
        else:
            status = "crashed" if isinstance(err, WorkerError) else "failed"
            if all(event["what"] != err.what for event in leg.errors):
                emit_error(emit, err)
        raise
    finally:
        run.stop_file.unlink(missing_ok=True)
        with _not_hiding_the_cause():
            emit("run.finished", status=status, seconds=time.monotonic() - begin)
            leg.close()
            write_run_json(run.path)
            if config.report.html:
                write_report(run.path)


@contextlib.contextmanager
def _put_back_unless_trained(before: Mapping[Path, str], leg: _Leg) -> Iterator[None]:
    """A run that was to go on with other settings, and was refused, keeps those that it had."""
    try:
        yield
    except PantheraError:
        if not leg.training:
            for file, text in before.items():
                write_text(file, text)
        raise


@contextlib.contextmanager
def _not_hiding_the_cause() -> Iterator[None]:
    """A full disk fails twice: first the checkpoint, then the report about it. The first error is the one to show."""
    cause = sys.exception()
    try:
        yield
    except StorageError:
        if cause is None:
            raise


def run_prepare(run: RunDir, config: TrainConfig, screen: Screen) -> None:
    """The data of a run folder that no training will follow in."""
    with local.StopRequests().installed() as stops:
        leg = _Leg(Follower(run.path, screen.readers()))
        try:
            _run_task("prepare", run, None, config, stops, leg)
        finally:
            leg.close()


def run_request(
    task: str, request: Request, *, plan: Plan | None = None, screen: Screen, answer: Callable[[Path], Any]
) -> Any:
    """A task beside a run, in a folder of its own, which stays if it fails; `answer` reads the result out of it.

    With a plan it runs in as many processes as that says.
    """
    folder = Path(tempfile.mkdtemp(prefix=f"pantheraml-{task}-"))
    with local.StopRequests().installed() as stops:
        request.write(folder)
        leg = _Leg(Follower(folder, screen.readers()))
        try:
            status = local.run_workers(
                local.command_for(task, folder, plan),
                folder,
                environment=local.worker_environment(plan),
                stops=stops,
                ask_to_stop=None,
                grace_seconds=0,
                on_tick=leg.poll,
            )
        finally:
            leg.close()
        if stops.count and status:
            shutil.rmtree(folder)
            raise InterruptedRunError("Stopped on request.", todo="Start it again when you like.")
        leg.raise_for(folder, status, log_from=0)
        result = answer(folder)
    shutil.rmtree(folder)
    return result


def told(folder: Path) -> list[str]:
    """What a task has said to people, for commands that draw no progress."""
    return [event["message"] for event in read_events(folder) if event["kind"] in ("notice", "warning")]


def _train(
    run: RunDir,
    plan: Plan,
    config: TrainConfig,
    stops: local.StopRequests,
    leg: _Leg,
    emit: EventWriter,
    replacement: Replacement,
) -> None:
    """To the end, starting the processes again where `Restarts` says so."""
    restarts, task = Restarts(run, config, plan), "start"
    while True:
        try:
            _run_task(task, run, plan, config, stops, leg, on_training=replacement.commit)
            return
        except PantheraError as err:
            following = None if stops.count else restarts.after(err)
            if following is None:
                raise
            emit(
                "run.restarted",
                message=following.told,
                step=run.last_checkpoint(),
                world_size=following.plan.world_size,
            )
            if following.plan != plan:
                plan = following.plan
                run.write_plan(plan)
                emit("plan.made", plan=plan.model_dump(mode="json"))
            leg.forgive()
            task = "train" if leg.training else task


def _run_task(
    task: str,
    run: RunDir,
    plan: Plan | None,
    config: TrainConfig,
    stops: local.StopRequests,
    leg: _Leg,
    *,
    on_training: Callable[[], None] = lambda: None,
) -> None:
    """Processes that this one starts: a single one, or, with a plan, one per device."""

    def ask_to_stop() -> None:
        leg.poll()  # training may have begun since the last look
        if not leg.training:  # there is nothing to save yet, nor anybody who would look at the file
            raise _stopped(run, leg, stops)
        run.stop_file.touch()

    def tick() -> None:
        if leg.training:
            on_training()

    _supervise(
        run,
        leg,
        stops,
        command=local.command_for(task, run.path, plan),
        environment=local.worker_environment(plan, grace_seconds=config.parallel.grace_seconds),
        ask_to_stop=ask_to_stop if plan is not None else None,
        config=config,
        on_tick=tick,
    )


def _run_rank(
    run: RunDir,
    plan: Plan,
    config: TrainConfig,
    place: env.ProcessRank,
    stops: local.StopRequests,
    leg: _Leg,
    replacement: Replacement,
) -> None:
    """This process's own rank; whoever started this process has started the others. The worker prepares first."""

    def commit_when_prepared() -> None:
        if run.data_file.exists():
            replacement.commit()

    _supervise(
        run,
        leg,
        stops,
        command=ranks.join_command(run.path, config),
        environment=ranks.rank_environment(plan, config, place),
        ask_to_stop=run.stop_file.touch,
        config=config,
        on_tick=commit_when_prepared,
    )


def _supervise(
    run: RunDir,
    leg: _Leg,
    stops: local.StopRequests,
    *,
    command: list[str],
    environment: dict[str, str],
    ask_to_stop: Callable[[], None] | None,
    config: TrainConfig,
    on_tick: Callable[[], None] = lambda: None,
) -> None:
    log = run.path / local.LOG_FILE
    log_from = log.stat().st_size if log.exists() else 0

    shutil.rmtree(run.stacks, ignore_errors=True)  # those of an earlier start
    hang = HangWatch(run.stacks, timeout_seconds=config.parallel.timeout_seconds)

    def tick() -> None:
        leg.poll()
        on_tick()
        if hang.is_over():
            leg.raise_reported()  # those who are left wait for one that failed
            raise _hang_error(run)

    status = local.run_workers(
        command,
        run.path,
        environment=environment,
        stops=stops,
        ask_to_stop=ask_to_stop,
        grace_seconds=config.parallel.grace_seconds,
        on_tick=tick,
    )
    leg.poll()
    if not run.path.is_dir():
        raise StorageError(
            "The run folder is gone, and with it what the run would have said.",
            where=str(run.path),
            todo="Bring it back (was a disk unmounted, or the folder moved?) and resume, or start the run again.",
        )
    if local.was_struck_down(status) and not stops.count:
        leg.forget_stop()  # nobody asked: the kernel sends SIGTERM to ranks whose agent is gone, and they save
    # whoever asked: the workers may have heard of it, or the agent between, and not this process
    if (stops.count or leg.stopped_by == "request") and status and not leg.foreseen:
        raise _stopped(run, leg, stops)
    leg.raise_for(run.path, status, log_from=log_from)


class _Leg:
    """One start of a run, or one task: follows its events and keeps what decides how it ended."""

    def __init__(self, follower: Follower) -> None:
        self._follower = follower
        self.errors: list[Event] = []
        self.stopped_by: str | None = None
        self.signal: str | None = None
        """The one that a worker was stopped by, if it told."""
        self.training = False
        """Data and model are there, and steps are taken."""

    @property
    def foreseen(self) -> list[Event]:
        """When one rank fails, its peers lose their connection and fail too: an error that somebody foresaw counts."""
        return [event for event in self.errors if event["error"] != WorkerError.__name__]

    def poll(self) -> None:
        for event in self._follower.poll():
            if event["kind"] == "error":
                self.errors.append(event)
            elif event["kind"] == "train.started":
                self.training = True
            elif event["kind"] == "train.stopped":
                self.signal = self.signal or event["signal"]
            elif event["kind"] == "train.finished":
                self.stopped_by = event["stopped_by"]

    def forget_stop(self) -> None:
        """The workers stopped, but not because somebody wanted them to."""
        self.stopped_by = self.signal = None

    def forgive(self) -> None:
        """What went wrong so far does not decide about the end any more."""
        self.poll()
        self.errors.clear()

    def close(self) -> None:
        self.poll()
        self._follower.close()

    def raise_reported(self) -> None:
        """Raise what the workers said themselves, if they did."""
        if self.errors:
            raise _rebuild((self.foreseen or self.errors)[0])

    def raise_for(self, folder: Path, status: int, *, log_from: int) -> None:
        """Raise what the workers reported, or what can be told about their end; nothing if all went well."""
        if self.foreseen:
            raise _rebuild(self.foreseen[0])
        death = local.explain_death(folder, status, log_from=log_from)
        if death is not None:
            tail = local.log_tail(folder, lines=8, begin=log_from)
            raise WorkerKilledError(death, where=str(folder / local.LOG_FILE), todo=f"The log ends with:\n{tail}")
        if status != 0 and explain_hang(RunDir(folder).stacks) is not None:
            raise _hang_error(RunDir(folder))
        self.raise_reported()
        if status != 0:
            tail = local.log_tail(folder, lines=8, begin=log_from)
            raise WorkerError(
                f"The worker processes ended with status {status}.",
                where=str(folder / local.LOG_FILE),
                todo=f"The log ends with:\n{tail}",
            )


def _hang_error(run: RunDir) -> HangError:
    step = run.last_checkpoint()
    again = (
        "There is no checkpoint yet (checkpoint.every_steps): start it again"
        if step is None
        else f"`pantheraml resume {shlex.quote(str(run.path))}` goes on from step {step}"
    )
    return HangError(
        explain_hang(run.stacks) or "The run does not get on.",
        where=str(run.stacks),
        todo=f"The stacks are there. {again}, with a larger parallel.timeout_seconds if a rank was only slow;"
        " parallel.restart_on=[killed,hung] has a run start again by itself.",
    )


def _rebuild(event: Event) -> PantheraError:
    """The worker's error, as an exception of this process."""
    kind = error_classes().get(event["error"], WorkerError)
    err = kind(event["what"], where=event["where"], todo=event["todo"])
    if event.get("traceback"):
        err.add_note(printable(event["traceback"]))
    return err
