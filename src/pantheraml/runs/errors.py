"""Errors that the supervisor raises on behalf of the workers it watches."""

from __future__ import annotations

import shlex
from typing import Literal

from pantheraml.base.errors import (
    HangError,
    InterruptedRunError,
    PantheraError,
    PreemptedError,
    WorkerError,
    error_classes,
)
from pantheraml.base.events import ErrorRaised
from pantheraml.base.text import printable
from pantheraml.launch.stacks import explain_hang
from pantheraml.specs.run_dir import RunDir

Ending = Literal["succeeded", "failed", "crashed", "stopped", "preempted"]
"""How a run ended: `status` of run.json."""


def status_of(err: PantheraError) -> Ending:
    """Return the status of a run that ended with this error."""
    if isinstance(err, PreemptedError):
        return "preempted"
    if isinstance(err, InterruptedRunError):
        return "stopped"
    return "crashed" if isinstance(err, WorkerError) else "failed"


def from_event(event: ErrorRaised) -> PantheraError:
    """Rebuild a worker's error from its event, with the worker's traceback as a note."""
    kind = error_classes().get(event.error, WorkerError)
    err = kind(event.what, where=event.where, fix=event.fix)
    if event.traceback:
        err.add_note(printable(event.traceback))
    return err


def stopped(run: RunDir, signal_name: str | None) -> InterruptedRunError:
    """The error of a run that stopped on request: Ctrl-C (SIGINT), or preempted by a scheduler's signal."""
    step = run.last_checkpoint()
    saved = "no checkpoint was saved" if step is None else f"the checkpoint of step {step} is saved"
    fix = (
        f"Continue with: pantheraml resume {shlex.quote(str(run.path))}"
        if step
        else "Nothing was saved; rerun to start over."
    )
    if signal_name == "SIGINT":
        return InterruptedRunError(f"Stopped on request; {saved}.", where=str(run.path), fix=fix)
    by = "a signal to one of its processes" if signal_name is None else f"{signal_name}, as schedulers send it"
    return PreemptedError(f"Stopped by {by}; {saved}.", where=str(run.path), fix=fix)


def hang(run: RunDir) -> HangError:
    """The error of a run in which no rank makes progress; the ranks' stacks say where."""
    step = run.last_checkpoint()
    again = (
        "There is no checkpoint yet (checkpoint.every_steps): rerun it"
        if step is None
        else f"`pantheraml resume {shlex.quote(str(run.path))}` continues from step {step}"
    )
    return HangError(
        explain_hang(run.stacks) or "No rank is making progress.",
        where=str(run.stacks),
        fix=f"The ranks' stacks are in that folder. {again}, with a larger parallel.timeout_seconds if a rank was only"
        " slow; parallel.restart_on=[killed,hung] restarts such runs automatically.",
    )
