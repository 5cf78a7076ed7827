"""A rank with an unusable device: all ranks agree on a fallback, report it, and nothing hangs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pantheraml.base.errors import DeviceError
from tests.e2e.conftest import Ended, Playground, result_of
from tests.event_log import raw_events
from tests.harness import values

pytestmark = pytest.mark.extended

BROKEN_DEVICE = """
import os, sys
if os.environ.get("RANK") == "1" and "pantheraml.worker" in sys.orig_argv:
    from pantheraml.parallel import process_group
    process_group.device_problem = lambda device: "it fell off the bus"
"""


SHORT = ["--set", "train.max_steps=3"]


@pytest.fixture
def broken(playground: Playground, tmp_path: Path) -> Playground:
    """The command line on a machine where rank 1 cannot use its device."""
    (tmp_path / "sitecustomize.py").write_text(BROKEN_DEVICE)
    paths = [str(tmp_path), *filter(None, [playground.environment.get("PYTHONPATH")])]
    return replace(playground, environment={**playground.environment, "PYTHONPATH": os.pathsep.join(paths)})


@pytest.mark.seed("S0-104", "C14")
def test_rank_0_continues_alone_and_reports_it(broken: Playground, playground: Playground) -> None:
    """Also with parallel.batch_shares: the remaining rank gets the whole batch."""
    ended = broken.train("fallback-two", *SHORT, "--nproc", "2", "--set", "parallel.batch_shares=[1,3]")
    assert ended.code == 0, ended.err
    reason = "rank 1 cannot use its device: it fell off the bus"
    assert f"training continues in one process instead of 2: {reason}" in ended.err
    root: Path = playground.root
    events = raw_events(root / "fallback-two")
    assert values(events, "run.fallback", "reason") == [reason]
    assert values(events, "run.fallback", "planned_world_size") == [2]
    written = json.loads((root / "fallback-two/run.json").read_text())
    assert (written["fallback_reason"], written["world_size"]) == (reason, 1)
    assert playground.train("fallback-one", *SHORT).code == 0
    losses, expected = (
        values(raw_events(root / name), "train.step", "loss") for name in ("fallback-two", "fallback-one")
    )
    assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.seed("C14")
def test_a_strict_run_stops(broken: Playground) -> None:
    ended = broken.train("strict", *SHORT, "--nproc", "2", "--set", "parallel.strict=true")
    assert ended.code == DeviceError.exit_code
    assert "rank 1 cannot use its device: it fell off the bus" in ended.err
    assert "Traceback" not in ended.err


TWO_GPUS = """
import os, sys
def pretend():
    from pantheraml import multigpu
    from pantheraml.rendezvous import device_vote
    from pantheraml.specs.plan import GPU, DeviceSpec

    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or "0,1"
    gpus = tuple(
        GPU(index=int(index), name="GPU", total_bytes=1, free_bytes=1, compute_capability=(9, 0))
        for index in visible.split(",")
    )
    multigpu.probe = lambda: DeviceSpec(gpus=gpus, cpu_count=1, ram_bytes=1, driver="1")
    lost = os.environ.get("LOST") == os.environ.get("RANK", "none")
    device_vote.device_problem = lambda device: "it fell off the bus" if lost else None
"""
SCRIPT = """
import json, os, sys
from pathlib import Path
import sitecustomize
sitecustomize.pretend()
import pantheraml
pantheraml.enable_multi_gpu(batch_size_per_gpu=4)
found = pantheraml.get_multi_gpu_config()
import torch
from torch import nn
from transformers import TrainingArguments
from pantheraml.performance import create_performance_optimizer
optimizer = create_performance_optimizer()
assert optimizer.wrap_model_for_multi_gpu(model := nn.Linear(1, 1)) is model
status = optimizer.get_multi_gpu_status()
seen = {name: value for name, value in os.environ.items() if name in ("RANK", "WORLD_SIZE", "CUDA_VISIBLE_DEVICES")}
Path(sys.argv[1]).write_text(json.dumps([found, status, seen]))
"""
REASON = "rank 1 cannot use its device: it fell off the bus"


def run_script(playground: Playground, folder: Path, lost: str, **environment: str) -> Ended:
    """Run a script on a host that seems to have two GPUs, one of which fails."""
    (folder / "sitecustomize.py").write_text(TWO_GPUS)
    (folder / "script.py").write_text(SCRIPT)
    process = subprocess.Popen(
        [sys.executable, "script.py", "found.json"],
        cwd=folder,
        env={**playground.environment, "PYTHONPATH": str(folder), "LOST": lost, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    playground.started.append(process)
    return result_of(process)


@pytest.mark.seed("S0-104", "C14")
def test_a_script_continues_alone_and_reports_it(playground: Playground, tmp_path: Path) -> None:
    """Rank 0 starts again as a single process that sees its own GPU; the other ranks end with success."""
    ended = run_script(playground, tmp_path, "1")
    assert ended.code == 0, ended
    said = f"the script continues in one process instead of 2: {REASON}; the global batch is that of one process"
    assert said in ended.err
    found, status, seen = json.loads((tmp_path / "found.json").read_text())
    assert found["fallback_reason"] == status["fallback_reason"] == REASON
    assert (found["world_size"], found["num_gpus"], found["launched"], found["batch_size_per_gpu"]) == (1, 1, False, 4)
    assert seen == {"CUDA_VISIBLE_DEVICES": "0"}


@pytest.mark.seed("C14")
def test_a_strict_script_stops(playground: Playground, tmp_path: Path) -> None:
    ended = run_script(playground, tmp_path, "1", PANTHERAML_STRICT="1")
    assert ended.code != 0
    assert "DeviceError" in ended.err
    assert f"1 of 2 ranks have no usable device: {REASON}" in ended.err  # both say so, at the same time
    assert not (tmp_path / "found.json").exists()
