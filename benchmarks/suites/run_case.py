"""Run one case in its own process, with a timeout, and return its result row. Imports nothing heavy.

A quarter of a case's time is spent in imports, while the GPU idles. So the process of the next case through TRL is
started while another case runs: it imports its packages, reads its data, and waits for its turn (`trl_run.py`). Cases
through our own command line are not started ahead: their start-up time is part of the measurement.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from pantheraml.base.errors import OutOfMemoryError, PantheraError
from pantheraml.base.event_stream import read_events
from pantheraml.base.events import HardwareSampled, MemoryMeasured, TrainStep, WarningIssued
from suites.case import Case
from suites.process import Process, last_line
from suites.workshop import ModelCreationError, SuiteFolder

HERE = Path(__file__).resolve().parent
SMALLER = "sequences at a time"
"""Words of a run's warnings that it goes on with smaller micro-batches, and so is not the case any more."""
PATIENCE = 3.0
"""Timeout of a case, as a multiple of its expected time."""


EXPERTS = {
    "method.target_modules": "q_proj,k_proj,v_proj,o_proj",
    "method.target_parameters": "mlp.experts.gate_up_proj,mlp.experts.down_proj",
}
"""As `trl_run.LORA_EXPERTS`."""


class CaseLauncher:
    """Starts cases, one of them ahead of its turn. On exit, a process that still waits is killed."""

    def __init__(self, suite_folder: SuiteFolder) -> None:
        self.suite_folder = suite_folder
        self._waiting: tuple[Case, Process] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._kill_waiting()

    def take(self, case: Case) -> Process:
        """Return the process of `case`: the waiting one, or a new one."""
        if self._waiting is not None and self._waiting[0] == case:
            process, self._waiting = self._waiting[1], None
            return process
        return self._start(case)

    def start_next(self, coming: Sequence[Case]) -> None:
        """Start the first of `coming` that can wait for its turn, unless it is started already."""
        following = next((case for case in coming if case.can_wait and not self.suite_folder.missing(case)), None)
        if self._waiting is not None and self._waiting[0] == following:
            return
        self._kill_waiting()
        if following is not None:
            with contextlib.suppress(OSError):  # its own turn tells; another case runs now
                self._waiting = following, self._start(following)

    def _kill_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting[1].end()
            self._waiting = None

    def _start(self, case: Case) -> Process:
        folder = self.suite_folder
        model, data, output = folder.model(case.model), folder.data(case), folder.output(case)
        shutil.rmtree(output, ignore_errors=True)
        output.mkdir(parents=True)
        if case.path == "cli":
            command = cli_command(case, model, data, output, folder.device)
        else:
            command = trl_command(case, model, data, output)
        return Process(command, folder.log(case.name), folder.environment(case), cwd=output)


def run_case(case: Case, commit: str | None, launcher: CaseLauncher, coming: Sequence[Case] = ()) -> dict[str, Any]:
    """Run the case and return its result row, also on failure; one of the `coming` cases is started meanwhile."""
    folder = launcher.suite_folder
    missing = folder.missing(case)
    if missing:
        return case.row(status="skipped", reason=f"not installed: {', '.join(missing)}")
    stamp: dict[str, Any] = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "commit": commit}
    try:
        folder.make_model(case.model)
        stamp["cache"] = folder.use_cache(case)
        process, turn = launcher.take(case), time.time()
    except (ModelCreationError, OSError) as err:
        return case.row(status="failed", reason=str(err), **stamp)
    status = process.run(PATIENCE * 60 * case.minutes, lambda: None if case.alone else launcher.start_next(coming))
    stamp["seconds"] = time.time() - turn
    log, output = folder.log(case.name), folder.output(case)
    remove_weights(output)
    if status is None:
        return case.row(status="timed out", reason=f"stopped after {stamp['seconds']:.0f} s", **stamp)
    if status == OutOfMemoryError.exit_code:
        return case.row(status="out of memory", reason=last_line(log), **stamp)
    if status != 0:
        return case.row(status="failed", reason=f"exit code {status}: {last_line(log)}", **stamp)
    try:
        measured = read_run(output / "run", process.began) if case.path == "cli" else read_result(output / "result")
        check_losses(measured)
    except (OSError, ValueError, LookupError, TypeError, PantheraError) as err:
        return case.row(status="failed", reason=f"no usable result: {type(err).__name__}: {err}"[:300], **stamp)
    return case.row(status="measured", **stamp, **measured)


def remove_weights(output: Path) -> None:
    """Remove what a case trained: a full fine-tune writes up to 30 GB, and the next ones need the disk."""
    for name in ("checkpoints", "model", "adapter"):
        shutil.rmtree(output / "run" / name, ignore_errors=True)


def check_losses(measured: Mapping[str, Any]) -> None:
    """Raise ValueError for a loss that is no number: what such a run computed is not what the case is about."""
    for name in ("loss_first", "loss_last"):
        if not math.isfinite(float(measured[name])):
            raise ValueError(f"{name} is {measured[name]}")


def cli_command(case: Case, model: Path, data: Path, output: Path, device: str | None) -> list[str]:
    settings = {
        "data.cache_dir": output / "tokens",
        "train.max_steps": case.steps,
        "train.schedule": "constant",
        "report.html": "false",
        **cli_settings(dataclasses.asdict(case)),
    }
    places = ["--model", str(model), "--data", str(data), "--output", str(output / "run"), "--method", case.method]
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    where = [] if device is None else ["--device", device]
    return [sys.executable, "-m", "pantheraml.cli.main", "train", "--json", *places, *where, *words]


def cli_settings(row: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a case, or of its recorded row, that decide what is computed; the method is among them."""
    return {
        "data.seq_len": row["seq"],
        "train.global_batch_size": row["batch"],
        "train.micro_batch_size": row["batch"],
        "train.activation_checkpointing": row["checkpointing"],
        "method.kind": row["method"],
        "method.rank": 16,
        "method.alpha": 16,
        "model.precision": row["precision"],
        **(EXPERTS if row.get("experts") else {}),
        **(row["settings"] or {}),
    }


def trl_command(case: Case, model: Path, data: Path, output: Path) -> list[str]:
    settings = {"settings": dict(case.settings), "environment": dict(case.environment)}
    job = {
        "case": {**dataclasses.asdict(case), **settings},
        "model": str(model),
        "data": str(data),
        "started": time.time(),
        "output": str(output / "trainer"),
        "result": str(output / "result"),
    }
    (output / "job.json").write_text(json.dumps(job), encoding="utf-8")
    return [sys.executable, str(HERE / "trl_run.py"), str(output / "job.json")]


def read_run(folder: Path, began: float) -> dict[str, Any]:
    """Read the measurements of our own run from `run.json` and the events."""
    summary = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    events = list(read_events(folder))
    for event in events:
        if isinstance(event, WarningIssued) and SMALLER in event.message:
            raise ValueError(event.message)
    first = min(event.time for event in events if isinstance(event, TrainStep))
    probes = [event for event in events if isinstance(event, MemoryMeasured)]
    used = [size for event in events if isinstance(event, HardwareSampled) for size in event.memory_bytes[:1]]
    used += [event.device_bytes for event in probes]  # a short run has few samples
    return {
        "tokens_per_second": summary["tokens_per_second"],
        "peak_gib": summary["peak_memory_bytes"] / 2**30,
        "reserved_gib": _gib(summary["reserved_memory_bytes"]),
        "device_gib": _gib(max((size for size in used if size is not None), default=None)),
        "probe_gib": _gib(max((event.allocated_bytes for event in probes), default=None)),
        "seconds_to_first_step": first - began,
        "loss_first": summary["first_loss"],
        "loss_last": summary["final_loss"],
    }


def _gib(size: int | None) -> float | None:
    return None if size is None else size / 2**30


def read_result(path: Path) -> dict[str, Any]:
    """Read the result of `trl_run.py`."""
    measured: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return measured
