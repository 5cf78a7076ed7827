"""A training run, supervised from outside: run folder, plan, attempts, readers, and result.

The command line runs a session in its own process; a service can do the same. Nothing here imports torch or writes to
the terminal: pass readers (a progress bar, say) to see the run's events.
"""

from __future__ import annotations

import contextlib
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pantheraml import __version__
from pantheraml.base import env
from pantheraml.base.errors import PantheraError, RunDirectoryError, StorageError
from pantheraml.base.event_stream import EventWriter
from pantheraml.base.events import ErrorRaised, Notice, PlanMade, RunFinished, RunRestarted, RunStarted, WarningIssued
from pantheraml.base.folders import write_text
from pantheraml.base.private import private_files
from pantheraml.launch import local, ranks
from pantheraml.readers.follow import Follower, Reader
from pantheraml.readers.report import write_report
from pantheraml.readers.sinks import open_sink
from pantheraml.readers.summary import write_run_json
from pantheraml.runs import errors
from pantheraml.runs.attempt import Attempt, WorkerCommand
from pantheraml.runs.plan_here import plan_here
from pantheraml.runs.restarts import Restarts
from pantheraml.runs.telemetry import RunTelemetry
from pantheraml.specs.faults import planned_faults
from pantheraml.specs.plan import Plan
from pantheraml.specs.resume import check_resumable, with_absolute_paths
from pantheraml.specs.run_dir import CONTENTS, Replacement, RunDir
from pantheraml.specs.train import TrainConfig


def run_training(
    config: TrainConfig,
    output: Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    readers: Sequence[Reader] = (),
    planned: Plan | None = None,
) -> dict[str, Any]:
    """Train, and return the contents of run.json. Raises the error that ended the run, after recording it.

    `planned`: the plan to replay, instead of making one.
    """
    planned_faults()  # an invalid one is an error before anything starts
    place = ranks.own_rank(config.parallel)
    if place is not None:
        config = ranks.with_world_size(config, place)
    plan = plan_here(config, place, planned, resumed=RunDir(output) if resume else None)
    config = with_absolute_paths(config)
    if place is not None and place.rank > 0:
        ranks.become_worker(output, config, plan, place)
    run = RunDir(output)
    if overwrite:
        _refuse_inputs_inside(run, config)
    with (
        run.claim(resume=resume, overwrite=overwrite) as replacement,
        private_files(),
        local.StopRequests().installed() as stops,
    ):
        RunSession(run, config, plan, stops, replacement, resume=resume, place=place).run(readers)
    return write_run_json(output)


class RunSession:
    """One run in a claimed folder, from its first event to run.json and the report."""

    def __init__(
        self,
        run: RunDir,
        config: TrainConfig,
        plan: Plan,
        stops: local.StopRequests,
        replacement: Replacement,
        *,
        resume: bool = False,
        place: env.ProcessRank | None = None,
    ) -> None:
        """`place`: this process is a rank that torchrun, accelerate or srun started; None: it starts all ranks."""
        self.run_dir, self.config, self.plan = run, config, plan
        self._stops, self._replacement, self._place = stops, replacement, place
        self._allowed_changes = check_resumable(run.config(), config) if resume and run.holds_work() else []
        files = (run.config_file, run.plan_file)
        self._previous = {file: file.read_text() for file in files if resume and file.is_file()}

    def run(self, readers: Sequence[Reader]) -> None:
        """Train to the end, restarting where the configuration allows it."""
        output = self.run_dir.path
        self.run_dir.write_config(self.config)
        self.run_dir.write_plan(self.plan)
        report = self.config.report
        sinks = [open_sink(name, run_dir=output, project=report.project) for name in report.sinks]
        with EventWriter(output) as self._emit:
            self._attempt = Attempt(Follower(output, [*readers, *sinks], from_end=True))
            self._announce([notice for sink in sinks for notice in sink.notices])
            self._telemetry = RunTelemetry(self.plan.device_ids if self.plan.device == "cuda" else (), self._emit)
            with self._written_down(), self._restoring(self._previous), self._telemetry:
                if self._place is None:
                    self._run_attempts()
                else:
                    self._run_own_rank(self._place)
                if self._attempt.stopped_by == "request":
                    raise errors.stopped(self.run_dir, self._attempt.stop_signal(self._stops))

    def _announce(self, notices: Sequence[str]) -> None:
        emit, plan, output = self._emit, self.plan, str(self.run_dir.path)
        emit(RunStarted(command=shlex.join(sys.argv), pantheraml=__version__, output=output))
        if (reason := env.restarted_because()) is not None:
            emit(RunRestarted(message=reason, step=self.run_dir.last_checkpoint(), world_size=plan.world_size))
        emit(PlanMade(plan=plan.model_dump(mode="json")))
        for message in plan.warnings:
            emit(WarningIssued(message=message))
        for message in notices:
            emit(Notice(message=message))
        for change in self._allowed_changes:
            emit(WarningIssued(message=f"resuming although {change}, as --allow-change permits"))

    def _run_attempts(self) -> None:
        """Start all ranks, and restart them as `Restarts` decides."""
        restarts, task = Restarts(self.run_dir, self.config, self.plan), "prepare_and_train"
        while True:
            try:
                self._attempt.supervise(self.run_dir, self.config, self._workers(task), self._stops)
                return
            except PantheraError as err:
                following = None if self._stops.count else restarts.after(err)
                if following is None:
                    raise
                step, world_size = self.run_dir.last_checkpoint(), following.plan.world_size
                self._emit(RunRestarted(message=following.message, step=step, world_size=world_size))
                if following.plan != self.plan:
                    self.plan = following.plan
                    self.run_dir.write_plan(self.plan)
                    self._emit(PlanMade(plan=self.plan.model_dump(mode="json")))
                self._attempt = self._attempt.next()
                task = "train" if self._attempt.training else task

    def _workers(self, task: str) -> WorkerCommand:
        def ask_to_stop() -> None:
            self._attempt.poll()  # training may have begun since the last tick
            if not self._attempt.training:  # nothing to save yet, and no rank that would look for the file
                raise errors.stopped(self.run_dir, self._attempt.stop_signal(self._stops))
            self.run_dir.stop_file.touch()

        def tick() -> None:
            self._telemetry.tick()
            if self._attempt.training:
                self._replacement.commit()

        return WorkerCommand(
            local.command_for(task, self.run_dir.path, self.plan),
            local.worker_environment(self.plan, grace_seconds=self.config.parallel.grace_seconds),
            ask_to_stop,
            tick,
        )

    def _run_own_rank(self, place: env.ProcessRank) -> None:
        """Run this process's rank as a worker; its launcher has started the others. The worker prepares the data."""

        def tick() -> None:
            self._telemetry.tick()
            if self.run_dir.data_file.exists():
                self._replacement.commit()

        workers = WorkerCommand(
            ranks.join_command(self.run_dir.path, self.config),
            ranks.rank_environment(self.plan, self.config, place),
            self.run_dir.stop_file.touch,
            tick,
        )
        self._attempt.supervise(self.run_dir, self.config, workers, self._stops)

    @contextlib.contextmanager
    def _written_down(self) -> Iterator[None]:
        """Record how the block ends in the event stream, run.json and the report."""
        begin, status = time.monotonic(), "failed"
        try:
            yield
            status = "succeeded"
        except PantheraError as err:
            status = errors.status_of(err)
            if status in ("crashed", "failed") and all(event.what != err.what for event in self._attempt.errors):
                self._emit(ErrorRaised.of(err))
            raise
        finally:
            self.run_dir.stop_file.unlink(missing_ok=True)
            with _keeping_first_error():
                self._emit(RunFinished(status=status, seconds=time.monotonic() - begin))
                self._attempt.close()
                write_run_json(self.run_dir.path)
                if self.config.report.html:
                    write_report(self.run_dir.path)

    @contextlib.contextmanager
    def _restoring(self, files: Mapping[Path, str]) -> Iterator[None]:
        """Put the old config and plan back if a resume with new settings fails before training."""
        try:
            yield
        except PantheraError:
            if not self._attempt.training:
                for file, text in files.items():
                    write_text(file, text)
            raise


@contextlib.contextmanager
def _keeping_first_error() -> Iterator[None]:
    """A full disk fails twice: first the checkpoint, then the report about it. The first error is the one to show."""
    cause = sys.exception()
    try:
        yield
    except StorageError:
        if cause is None:
            raise


def _refuse_inputs_inside(run: RunDir, config: TrainConfig) -> None:
    """A run cannot read its inputs from the run that it overwrites."""
    own = [(run.path / name).resolve() for name in CONTENTS]
    for path in (config.model.path, config.model.tokenizer, config.data.path, config.data.eval_path):
        place = None if path is None else Path(path).resolve()
        if place is not None and any(place == name or name in place.parents for name in own):
            raise RunDirectoryError(
                f"{path} belongs to the run that --overwrite replaces.", fix="Choose another --output."
            )
