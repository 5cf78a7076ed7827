"""The package unsloth itself on a GPU: `enable_multi_gpu` in its script, two ranks on one GPU against one rank.

Unsloth is looked for in the folder that UNSLOTH_PACKAGES names, so that other tests do not import what it brings. NCCL
refuses two ranks on one GPU, so they meet through gloo, each as the only rank of a node.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pantheraml.base.env import child_environment
from tests import toy

ROOT = Path(__file__).parents[2]
PACKAGES = os.environ.get("UNSLOTH_PACKAGES", "")
BATCH, SAME, ROUNDING = 4, 1e-5, 2e-3
"""Batch of a step; relative differences of a loss where each pass has the same rows, and where it has others, for which
bf16, in which Unsloth computes here, rounds otherwise: 5e-4 was seen."""

pytestmark = pytest.mark.skipif(not Path(PACKAGES, "unsloth").is_dir(), reason="UNSLOTH_PACKAGES names no Unsloth")


def run(folder: Path, ranks: int, passes: int) -> list[dict[str, Any]]:
    """Run the script on `ranks` ranks that accumulate `passes`, and return what each found."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    output = folder / f"ranks-{ranks}-passes-{passes}"
    output.mkdir()
    command = [sys.executable, str(ROOT / "tests/e2e/unsloth_script.py"), "unsloth", str(folder / "model")]
    processes, logs = [], []
    for rank in range(ranks):
        place = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": port}
        cwd = output / f"cwd-{rank}"  # Unsloth writes the code that it compiles there
        cwd.mkdir()
        logs.append(output / f"{rank}.log")
        with open(logs[-1], "wb") as log:
            processes.append(
                subprocess.Popen(
                    [*command, str(BATCH), str(passes), "mean", str(output)],
                    cwd=cwd,
                    env=child_environment(
                        **({name: str(value) for name, value in place.items()} if ranks > 1 else {}),
                        MASTER_ADDR="127.0.0.1",
                        DDP_BACKEND="gloo",
                        PYTHONPATH=os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", ""), PACKAGES]),
                        PANTHERAML_LOG="info",
                        UNSLOTH_DISABLE_STATISTICS="1",
                        HF_HUB_OFFLINE="1",
                        HF_HOME=str(folder / "hub"),
                    ),
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            )
    try:
        codes = [process.wait(250) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert codes == [0] * ranks, "\n".join(log.read_text()[-4000:] for log in logs)
    return [json.loads((output / f"{rank}.json").read_text()) for rank in range(ranks)]


@pytest.mark.timeout(550)
def test_two_ranks_equal_one_rank(tmp_path: Path) -> None:
    toy.write_llama(tmp_path / "model", initializer_range=0.2)
    with ThreadPoolExecutor() as pool:  # compiling takes each of them a minute
        started = [pool.submit(run, tmp_path, *shape) for shape in ((1, 1), (1, 2), (2, 1))]
        (one,), (accumulated,), two = (run.result() for run in started)
    for found in (one, accumulated, *two):
        print({name: value for name, value in found.items() if name != "weights"})
    assert one["attention_calls"] == 2 * one["forwards"] > 0, "activations are recomputed in backward"
    assert len(set(one["loss"])) == 4, "a model that does not train would pass the checks below"
    for rank in two:
        assert (rank["samples"], rank["wrapped"], rank["reverted"]) == (BATCH // 2, "DistributedDataParallel", True)
        assert rank["weights"] == pytest.approx(two[0]["weights"], abs=0)
        assert rank["loss"] == pytest.approx(accumulated["loss"], rel=SAME)
        assert rank["weights"] == pytest.approx(accumulated["weights"], rel=1e-3, abs=SAME)
        assert rank["loss"] == pytest.approx(one["loss"], rel=ROUNDING)
