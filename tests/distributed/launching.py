"""Launch the ranks of a distributed test."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from pantheraml.base.env import child_environment

REPOSITORY = Path(__file__).parents[2]
LIMIT_SECONDS = 400.0
"""Timeout of one launch: the longest takes less than a minute on an idle machine."""


class RankServer:
    """Fork server for ranks."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def run(self, script: str, processes: int, *arguments: object, timeout: float = LIMIT_SECONDS) -> None:
        """Run `main` of `tests/distributed/SCRIPT.py` as ranks of one process group; on failure, show their output."""
        with tempfile.NamedTemporaryFile("r", prefix="ranks-", encoding="utf-8", errors="replace") as log:
            request = {"script": script, "processes": processes, "arguments": [*map(str, arguments)], "log": log.name}
            code = self._ask(request, timeout)
            assert code == 0, f"exit code {code}\n{log.read()[-8000:]}"

    def _ask(self, request: dict[str, object], timeout: float) -> int:
        """Return the exit code of the ranks, or raise TimeoutError. No process is left running in either case."""
        process = self.start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            print(json.dumps(request), file=process.stdin, flush=True)
            if not select.select([process.stdout], [], [], timeout)[0]:
                raise TimeoutError(f"{request['script']} did not end within {timeout:g} s")
            answer = process.stdout.readline()
        except BaseException:
            self.end()
            raise
        if not answer:
            self.end()
            return 1
        return int(answer)

    def end(self) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.communicate()
            self._process = None

    def start(self) -> subprocess.Popen[str]:
        """Start the server, unless it is running."""
        self._process = self._process or self._started()
        return self._process

    def _started(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.distributed.rank_server"],
            env=child_environment(
                OMP_NUM_THREADS="1",
                TOKENIZERS_PARALLELISM="false",
                HF_HUB_OFFLINE="1",
                JE_ARROW_MALLOC_CONF="background_thread:false",  # pyarrow's; a fork would lose the thread
                PYTORCH_NVML_BASED_CUDA_CHECK="1",  # the default check initializes CUDA, which breaks forked processes
            ),
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )


SERVER = RankServer()
run_ranks = SERVER.run
