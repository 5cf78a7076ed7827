"""Launch the processes of a benchmark; imports nothing heavy."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pantheraml.base.env import child_environment

BENCHMARKS = Path(__file__).resolve().parents[1]


def run_ranks(module: str, request: Mapping[str, Any], *, processes: int = 2) -> Any:
    """Run `module` of this folder in single-threaded processes, and return the answer that rank 0 wrote."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "request.json").write_text(json.dumps(request), encoding="utf-8")
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        subprocess.run(
            [sys.executable, *torchrun, "-m", f"ranks.{module}", str(folder)],
            cwd=BENCHMARKS,
            env=child_environment(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false"),
            check=True,
        )
        return json.loads((folder / "answer.json").read_text(encoding="utf-8"))
