"""Runs one case in a process of its own, with a time limit, and says how it ended. Imports nothing heavy."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from inputs import write_full_sequences, write_uneven_documents

from pantheraml.base import env
from pantheraml.base.errors import OutOfMemoryError
from pantheraml.base.events import read_events
from suites.case import Case

HERE = Path(__file__).resolve().parent
PATIENCE = 3.0
"""A case that takes this many times as long as expected is ended."""
MODEL_SECONDS = 300


@dataclass(frozen=True)
class Workshop:
    """The folder in which cases run: models and data are made once, compiled kernels are kept per system."""

    folder: Path
    device: str | None
    """cpu, so that a test needs no GPU; None: whatever there is."""

    def model(self, shape: str) -> Path:
        """Made at the first call, on the GPU. A folder under its final name is whole."""
        place = self.folder / "models" / shape
        if not place.exists():
            aside = place.with_suffix(".unfinished")
            shutil.rmtree(aside, ignore_errors=True)
            command = [sys.executable, str(HERE.parent / "inputs.py"), shape, str(aside)]
            ended = run(command, self.log(f"model-{shape}"), self.environment("models"), MODEL_SECONDS)
            if ended != 0:
                raise ModelNotMade(f"the {shape} model could not be made: {last_line(self.log(f'model-{shape}'))}")
            aside.rename(place)
        return place

    def data(self, case: Case) -> Path:
        place = self.folder / "data" / f"{case.model}-{case.data}-{case.batch}x{case.seq}x{case.steps}.jsonl"
        if not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            aside = place.with_suffix(".unfinished")
            sequences = case.batch * (case.steps + 1)
            if case.data == "full":
                write_full_sequences(aside, shape=case.model, sequences=sequences, seq_len=case.seq)
            else:
                write_uneven_documents(aside, shape=case.model, tokens=sequences * case.seq, seq_len=case.seq)
            aside.rename(place)
        return place

    def log(self, name: str) -> Path:
        place = self.folder / "logs" / f"{name}.log"
        place.parent.mkdir(parents=True, exist_ok=True)
        return place

    def cache(self, system: str) -> Path:
        return self.folder / "caches" / system

    def environment(self, system: str) -> dict[str, str]:
        """No network, no telemetry, and every cache of compiled code where it can be kept or removed."""
        cache = self.cache(system)
        given = os.environ.get("PYTHONPATH", "")
        paths = [str(Path(entry).resolve()) for entry in given.split(os.pathsep) if entry]  # cases have other folders
        return env.child_environment(
            PYTHONPATH=os.pathsep.join(paths) or None,
            PYTHONUNBUFFERED="1",
            HF_HUB_OFFLINE="1",
            TRANSFORMERS_OFFLINE="1",
            WANDB_DISABLED="true",
            UNSLOTH_DISABLE_STATISTICS="1",
            TOKENIZERS_PARALLELISM="false",
            PANTHERAML_CACHE=str(cache / "pantheraml"),
            TRITON_CACHE_DIR=str(cache / "triton"),
            TORCHINDUCTOR_CACHE_DIR=str(cache / "inductor"),
            UNSLOTH_COMPILE_LOCATION=str(cache / "unsloth"),
        )


class ModelNotMade(RuntimeError):
    """A case's inputs are missing; its row says why."""


def run_case(case: Case, workshop: Workshop, commit: str | None) -> dict[str, Any]:
    """The case's result row, whatever happened."""
    missing = [name for name in case.packages if importlib.util.find_spec(name) is None]
    if missing:
        return case.row(status="skipped", reason=f"not installed: {', '.join(missing)}")
    stamp: dict[str, Any] = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "commit": commit}
    try:
        model, data = workshop.model(case.model), workshop.data(case)
    except ModelNotMade as err:
        return case.row(status="failed", reason=str(err), **stamp)
    output = workshop.folder / "runs" / case.name
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    if case.cache == "fresh":
        shutil.rmtree(workshop.cache(case.system), ignore_errors=True)
    cold = not workshop.cache(case.system).exists()
    began = time.time()
    if case.path == "cli":
        command = cli_command(case, model, data, output, workshop.device)
    else:
        command = trl_command(case, model, data, output, began)
    log = workshop.log(case.name)
    status = run(command, log, workshop.environment(case.system), PATIENCE * 60 * case.minutes, cwd=output)
    stamp |= {"seconds": time.time() - began, "cache": "cold" if cold else "warm"}
    if status is None:
        return case.row(status="timed out", reason=f"stopped after {stamp['seconds']:.0f} s", **stamp)
    if status == OutOfMemoryError.exit_code:
        return case.row(status="out of memory", reason=last_line(log), **stamp)
    if status != 0:
        return case.row(status="failed", reason=f"exit code {status}: {last_line(log)}", **stamp)
    measured = read_run(output / "run", began) if case.path == "cli" else json.loads((output / "result").read_text())
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


def trl_command(case: Case, model: Path, data: Path, output: Path, began: float) -> list[str]:
    job = {
        "case": {**dataclasses.asdict(case), "settings": dict(case.settings)},
        "model": str(model),
        "data": str(data),
        "started": began,
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


def run(
    command: list[str], log: Path, environment: dict[str, str], seconds: float, cwd: Path | None = None
) -> int | None:
    """The exit code, or None if it took too long; then it and all that it started are ended."""
    with open(log, "wb") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=environment, cwd=cwd, start_new_session=True
        )
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def tail(log: Path, lines: int | None = None) -> str:
    """The last `lines` lines that are not empty (None: all of them); nothing if there is no log."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    found = [line for line in text.splitlines() if line.strip()]
    return "\n".join(found if lines is None else found[-lines:])


def last_line(log: Path) -> str:
    """Where programs say what went wrong; a traceback ends with it."""
    lines = tail(log).splitlines()
    said = next((line for line in reversed(lines) if "Error:" in line or "Exception" in line), None)
    return (said or (lines[-1] if lines else "no output")).strip()[:300]
