"""Run one task of a worker process for a request: the service itself imports no torch, and runs no template."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path

from pantheraml.base.errors import PantheraError, WorkerError
from pantheraml.base.event_stream import read_events
from pantheraml.base.events import ErrorRaised
from pantheraml.launch.script import python_module
from pantheraml.runs.supervised import Limits


async def run_task(task: str, folder: Path, limits: Limits, *, seconds: float) -> None:
    """Run it on a CPU, with the request that lies in `folder`. PantheraError as the worker told it."""
    worker = await asyncio.create_subprocess_exec(
        *python_module("pantheraml.worker"),
        task,
        str(folder),
        cwd=folder,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        env=limits.environment(folder, CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1"),
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(seconds):
            await worker.wait()
    except TimeoutError as err:
        raise WorkerError(f"It took more than {seconds:.0f} s.") from err
    finally:
        if worker.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)
            await worker.wait()
    if worker.returncode != 0:
        raise _reason(folder)


def _reason(folder: Path) -> PantheraError:
    told = [event for event in read_events(folder) if isinstance(event, ErrorRaised)]
    if not told:
        return WorkerError("The worker ended without a word.")
    return WorkerError(told[-1].what, fix=told[-1].fix)
