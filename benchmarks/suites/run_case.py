"""Runs one case in a process of its own, with a time limit, and says how it ended. Imports nothing heavy.

A quarter of a case's time goes into imports, and a GPU waits meanwhile. So the process of the next case through TRL is
started while another case runs: it imports its packages, reads its data, and waits for its turn (`trl_run.py`). What
goes through our own command line is started in its turn: how long that takes is one of the things measured.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from pantheraml.base.errors import OutOfMemoryError
from pantheraml.base.events import read_events
from suites.case import Case
from suites.process import Process, last_line
from suites.workshop import ModelNotMade, Workshop

HERE = Path(__file__).resolve().parent
PATIENCE = 3.0
"""A case that takes this many times as long as expected is ended."""


class Starts:
    """Starts cases, one of them before its turn. As a context: whoever still waits at its end is ended."""

    def __init__(self, workshop: Workshop) -> None:
        self.workshop = workshop
        self._waiting: tuple[Case, Process] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._send_home()

    def take(self, case: Case) -> Process:
        """The process of `case`: the one that waits, if it is that, or a new one."""
        if self._waiting is not None and self._waiting[0] == case:
            process, self._waiting = self._waiting[1], None
            return process
        return self._start(case)

    def start_ahead(self, coming: Sequence[Case]) -> None:
        """The first of `coming` that can wait for its turn, if it is not there yet."""
        following = next((case for case in coming if case.can_wait and not self.workshop.missing(case)), None)
        if self._waiting is not None and self._waiting[0] == following:
            return
        self._send_home()
        if following is not None:
            self._waiting = following, self._start(following)

    def _send_home(self) -> None:
        if self._waiting is not None:
            self._waiting[1].end()
            self._waiting = None

    def _start(self, case: Case) -> Process:
        shop = self.workshop
        model, data, output = shop.model(case.model), shop.data(case), shop.output(case)
        shutil.rmtree(output, ignore_errors=True)
        output.mkdir(parents=True)
        if case.path == "cli":
            command = cli_command(case, model, data, output, shop.device)
        else:
            command = trl_command(case, model, data, output)
        return Process(command, shop.log(case.name), shop.environment(case), cwd=output)


def run_case(case: Case, commit: str | None, starts: Starts, coming: Sequence[Case] = ()) -> dict[str, Any]:
    """The case's result row, whatever happened; `coming` are those after it, of which one is started meanwhile."""
    shop = starts.workshop
    missing = shop.missing(case)
    if missing:
        return case.row(status="skipped", reason=f"not installed: {', '.join(missing)}")
    stamp: dict[str, Any] = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "commit": commit}
    try:
        shop.make_model(case.model)
    except ModelNotMade as err:
        return case.row(status="failed", reason=str(err), **stamp)
    stamp["cache"] = shop.use_cache(case)
    process, turn = starts.take(case), time.time()
    status = process.run(PATIENCE * 60 * case.minutes, lambda: None if case.alone else starts.start_ahead(coming))
    stamp["seconds"] = time.time() - turn
    log, output = shop.log(case.name), shop.output(case)
    if status is None:
        return case.row(status="timed out", reason=f"stopped after {stamp['seconds']:.0f} s", **stamp)
    if status == OutOfMemoryError.exit_code:
        return case.row(status="out of memory", reason=last_line(log), **stamp)
    if status != 0:
        return case.row(status="failed", reason=f"exit code {status}: {last_line(log)}", **stamp)
    measured = read_run(output / "run", process.began) if case.path == "cli" else read_result(output / "result")
    return case.row(status="measured", **stamp, **measured)


def cli_command(case: Case, model: Path, data: Path, output: Path, device: str | None) -> list[str]:
    settings = {
        "data.seq_len": case.seq,
        "data.cache_dir": output / "tokens",
        "train.global_batch_size": case.batch,
        "train.micro_batch_size": case.batch,
        "train.max_steps": case.steps,
        "train.schedule": "constant",
        "train.activation_checkpointing": case.checkpointing,
        "method.rank": 16,
        "method.alpha": 16,
        "report.html": "false",
        "model.precision": case.precision,
        **case.settings,
    }
    places = ["--model", str(model), "--data", str(data), "--output", str(output / "run"), "--method", case.method]
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    where = [] if device is None else ["--device", device]
    return [sys.executable, "-m", "pantheraml.cli.main", "train", "--json", *places, *where, *words]


def trl_command(case: Case, model: Path, data: Path, output: Path) -> list[str]:
    job = {
        "case": {**dataclasses.asdict(case), "settings": dict(case.settings)},
        "model": str(model),
        "data": str(data),
        "started": time.time(),
        "output": str(output / "trainer"),
        "result": str(output / "result"),
    }
    (output / "job.json").write_text(json.dumps(job), encoding="utf-8")
    return [sys.executable, str(HERE / "trl_run.py"), str(output / "job.json")]


def read_run(folder: Path, began: float) -> dict[str, Any]:
    """Of a run of ours, what `run.json` and the events say."""
    summary = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    first = next(event["time"] for event in read_events(folder) if event["kind"] == "train.step")
    return {
        "tokens_per_second": summary["tokens_per_second"],
        "peak_gib": summary["peak_memory_bytes"] / 2**30,
        "seconds_to_first_step": first - began,
        "loss_first": summary["first_loss"],
        "loss_last": summary["final_loss"],
    }


def read_result(path: Path) -> dict[str, Any]:
    """Of `trl_run.py`, which measures itself."""
    measured: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return measured
