"""Output of `pantheraml jobs`: jobs, plans, and live events."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pantheraml.base.text import printable

if TYPE_CHECKING:
    from pantheraml.client import Artifact, Job, JobEvent, JobPlan

UNKNOWN = "–"


def job_rows(jobs: Sequence[Job]) -> list[str]:
    """A table with a line per job."""
    if not jobs:
        return ["No jobs."]
    rows = [("JOB", "STATE", "MODEL", "CREATED", "NOTE")]
    rows += [(job.id, job.state, printable(job.model), _moment(job.created_at), printable(_note(job))) for job in jobs]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[4]]).rstrip()
        for row in rows
    ]


def _note(job: Job) -> str:
    if job.error is not None:
        return job.error.message
    if job.fine_tuned_model is not None:
        return job.fine_tuned_model
    place = "" if job.queue_position is None else f"{job.queue_position}. in the queue: "
    return place + (job.waiting_reason or "")


def _moment(seconds: int | None) -> str:
    return UNKNOWN if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def job_lines(job: Job, artifacts: Sequence[Artifact]) -> list[str]:
    from pantheraml.readers import number_format as figures

    is_gpu = job.device == "cuda"
    hours = f"{job.gpu_hours:.2f} GPU-hours" if is_gpu else f"{job.cpu_slot_hours:.2f} CPU slot hours"
    energy = "" if job.energy_joules is None else f", {job.energy_joules / 3.6e6:.3f} kWh"
    cost = "" if job.cost is None or not is_gpu else f", cost {job.cost:.2f}"
    values: list[tuple[str, Any]] = [
        ("job", job.id),
        ("state", job.state),
        ("why it waits", job.waiting_reason),
        ("position", job.queue_position),
        ("estimated start", None if job.estimated_start is None else _moment(job.estimated_start)),
        ("error", None if job.error is None else job.error.message),
        ("model", job.model),
        ("fine-tuned model", job.fine_tuned_model),
        ("user", job.organization_id),
        ("created", _moment(job.created_at)),
        ("estimated end", None if job.estimated_finish is None else _moment(job.estimated_finish)),
        ("finished", None if job.finished_at is None else _moment(job.finished_at)),
        ("training file", job.training_file),
        ("validation file", job.validation_file),
        ("settings", ", ".join(f"{name} {value}" for name, value in job.hyperparameters.items())),
        ("seed", job.seed),
        ("metadata", job.metadata and json.dumps(job.metadata)),
        ("devices", f"{job.processes} {'GPU' if is_gpu else 'CPU slot'}(s)"),
        ("starts", job.starts),
        ("used", f"{hours}{energy}{cost}"),
        ("trained tokens", None if job.trained_tokens is None else f"{job.trained_tokens:,}"),
    ]
    lines = [f"{name:<17} {printable(value)}" for name, value in values if value not in (None, "")]
    lines += [f"{'artifact':<17} {printable(each.name)} ({figures.size(each.bytes)})" for each in artifacts]
    return lines


def plan_lines(answer: JobPlan) -> list[str]:
    from pantheraml.readers import number_format as figures

    plan = answer.plan
    settings = ", ".join(f"{name} {value}" for name, value in answer.hyperparameters.items())
    lines = [
        f"settings  {printable(settings)}",
        f"devices   {plan.world_size} {plan.device} process(es)",
        f"memory    {figures.size(plan.predicted_memory_bytes)} per device",
        f"time      {figures.duration(plan.predicted_seconds)}",
    ]
    if answer.predicted_cost is not None:
        lines.append(f"cost      {answer.predicted_cost:.2f}")
    lines += [printable(f"{each.name} = {each.value}: {each.reason}") for each in plan.choices]
    return lines + [printable(f"warning: {text}") for text in plan.warnings]


@contextlib.contextmanager
def showing(on_terminal: bool) -> Iterator[Callable[[JobEvent], None]]:
    """Prints events as lines; on a terminal, steps move a progress bar instead."""
    if not on_terminal:
        yield lambda event: print(_line(event), flush=True)
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(), transient=True) as progress:
        task = progress.add_task("waiting", total=None)

        def show(event: JobEvent) -> None:
            if event.kind == "train.started":
                progress.update(task, description="training", total=event.data.get("total_steps"))
            if event.kind != "train.step":
                progress.console.print(escape(_line(event)), highlight=False)
                return
            loss = event.data.get("train_loss")
            text = "training" if loss is None else f"loss {loss:.4f}"
            progress.update(task, description=text, completed=event.data["step"])

        yield show


def _line(event: JobEvent) -> str:
    mark = "" if event.level == "info" else f"{event.level}: "
    return printable(f"{time.strftime('%H:%M:%S', time.localtime(event.created_at))}  {mark}{event.message}")
