"""Checks that need a trial: import torch, all-reduce between processes, and train as `pantheraml train` does.

They use a few MiB of temporary files, which are removed, and do not touch the current folder.
"""

from __future__ import annotations

import shlex
import subprocess
import tempfile
import time
from pathlib import Path

from pantheraml.base.errors import DeviceError, InstallationError, InterruptedRunError, PantheraError, TrainingError
from pantheraml.base.folders import working_folder
from pantheraml.data.tiny_inputs import write_tiny_inputs
from pantheraml.devices.probe import probe
from pantheraml.launch.local import worker_environment
from pantheraml.launch.script import python_module
from pantheraml.planner.choose import choose
from pantheraml.readers.number_format import duration, size
from pantheraml.runs.session import run_training
from pantheraml.runs.tasks import run_request
from pantheraml.specs.config_file import validate
from pantheraml.specs.diagnosis import Check, failed, ok
from pantheraml.specs.parallel import ParallelDims
from pantheraml.specs.plan import Plan
from pantheraml.specs.run_dir import RunDir
from pantheraml.specs.tasks import CollectiveRequest, CollectiveResult, TorchFacts
from pantheraml.specs.train import TrainConfig

TIMEOUT_SECONDS = 60.0
IMPORT_SECONDS = 300.0
"""Importing torch from a network disk takes minutes."""
STEPS = 2


def check_torch(gpus: int) -> Check:
    """Import torch in a process of its own; `gpus`: as many as the driver shows, and torch should see."""
    name, command = "import torch", python_module("pantheraml.worker.torch_facts")
    try:
        done = subprocess.run(
            command, env=worker_environment(None), capture_output=True, text=True, timeout=IMPORT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        fix = "Copy the Python environment to a local disk, or wait until this one answers faster."
        return failed(name, InstallationError(f"not imported after {IMPORT_SECONDS:.0f} s", fix=fix))
    if done.returncode:
        what = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        fix = f"Reinstall torch, with what it depends on. To see it: {shlex.join(command)}"
        return failed(name, InstallationError(what, fix=fix))
    facts = TorchFacts.model_validate_json(done.stdout)
    values = facts.model_dump()
    if facts.problem is not None or facts.gpus < gpus:
        what = f"it sees {facts.gpus} of {gpus} GPU(s): {facts.problem or 'no reason given'}"
        fix = f"Compare with `nvidia-smi`: torch {facts.version} needs a driver for CUDA {facts.cuda} and its GPUs."
        return failed(name, DeviceError(what, fix=fix), **values)
    nccl = f", NCCL {facts.nccl}" if facts.nccl is not None else ""
    return ok(name, f"sees {facts.gpus or 'no'} GPU{'' if facts.gpus == 1 else 's'}{nccl}", **values)


def check_ranks() -> Check:
    """All-reduce with one process per GPU, at least two."""
    try:
        with tempfile.TemporaryDirectory(prefix="pantheraml-doctor-") as folder:
            result = _all_reduce(Path(folder))
    except InterruptedRunError:
        raise
    except PantheraError as err:
        return failed("collective", err)
    found = (
        f"{result.processes} processes over {result.backend}: {size(result.bytes)} all-reduced in"
        f" {1000 * result.seconds:.3g} ms"
    )
    return ok("collective", found, **result.model_dump())


def _all_reduce(folder: Path) -> CollectiveResult:
    run = RunDir(folder / "run")
    run.path.mkdir()
    run.mark()
    run.write_plan(plan := _plan_for_ranks(_tiny_run(folder)))
    request = CollectiveRequest(run_dir=run.path, timeout_seconds=TIMEOUT_SECONDS)
    result: CollectiveResult = run_request(
        "collective",
        request,
        plan=plan,
        answer=lambda answers: CollectiveResult.model_validate_json((answers / "collective.json").read_text()),
    )
    return result


def _plan_for_ranks(config: TrainConfig) -> Plan:
    """Plan one rank per GPU. With fewer than two GPUs, two ranks share one, if any, and use gloo, since NCCL refuses
    that."""
    devices = probe()
    gpus, count = len(devices.gpus), max(2, len(devices.gpus))
    return choose(config, devices).model_copy(
        update={
            "world_size": count,
            "dims": ParallelDims(replicate=count),
            "backend": "nccl" if gpus == count else "gloo",
            "threads_per_process": max(1, devices.cpu_count // count),
        }
    )


def check_training() -> Check:
    """Prepare data, train an adapter of a tiny model on every device, and save it."""
    begin = time.perf_counter()
    try:
        with working_folder("doctor") as folder:
            run = folder / "run"
            summary = run_training(_tiny_run(folder), run)
            plan = RunDir(run).plan()
    except InterruptedRunError:
        raise
    except PantheraError as err:
        return failed("training", err)
    if summary["steps"] != STEPS:
        early = TrainingError(f"{summary['steps']} of {STEPS} steps were taken.", fix="Please report this.")
        return failed("training", early)
    where = f"{plan.world_size} process{'es' if plan.world_size > 1 else ''} on {plan.device}"
    found = f"{STEPS} steps in {plan.precision} by {where}, {duration(time.perf_counter() - begin)} from start to end"
    values = {"steps": STEPS, "device": plan.device, "precision": plan.precision, "world_size": plan.world_size}
    return ok("training", found, **values, final_loss=summary["final_loss"])


def _tiny_run(folder: Path) -> TrainConfig:
    model, data = write_tiny_inputs(folder / "tiny")
    return validate(
        {
            "model": {"path": str(model)},
            "data": {"path": str(data), "seq_len": 128, "cache_dir": str(folder / "cache")},
            "train": {"global_batch_size": 2 * max(4, len(probe().gpus)), "max_steps": STEPS, "warmup_steps": 0},
            "parallel": {"timeout_seconds": int(TIMEOUT_SECONDS), "max_retries": 0},
            "report": {"html": False},
        }
    )
