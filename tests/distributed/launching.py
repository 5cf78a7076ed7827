"""Starting the processes of a distributed test."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from pantheraml.base.env import child_environment

REPOSITORY = Path(__file__).parents[2]


def run_ranks(script: str, processes: int, *arguments: object, timeout: float = 300) -> None:
    """Run `tests/distributed/SCRIPT.py` as that many ranks of one process group; fails with what they wrote."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    process = subprocess.Popen(
        [sys.executable, *torchrun, "-m", f"tests.distributed.{script}", *map(str, arguments)],
        env=child_environment(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1"),
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)  # the ranks, too: torchrun alone would leave them behind
        process.communicate()
        raise
    assert process.returncode == 0, out[-2000:] + err[-6000:]
