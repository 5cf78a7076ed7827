"""Start the process that answers chat requests (`worker.entry.chat`), and talk to it over its pipes.

It runs in a session of its own, and exits when its input is closed, as when this process ends. It opens no port, and
leaves nothing on disk but its log.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel

from pantheraml.base.errors import LaunchError
from pantheraml.base.private import open_private, private_folder
from pantheraml.launch.script import python_module
from pantheraml.runs.supervised import Limits
from pantheraml.specs.chat import CHAT_REPLY, ChatReply

MARK = "PANTHERAML_CHAT"
"""Environment variable of the worker: its working folder."""
_LONGEST_LINE = 16 << 20


@dataclass(frozen=True)
class ChatDevice:
    gpu: int | None
    """Index of the GPU; None: a CPU."""
    precision: str
    threads: int
    """Of the CPU."""
    memory_fraction: float | None = None
    """Share of the GPU's memory that it may use; None: all."""


class ChatWorkerProcess:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, folder: Path, device: ChatDevice, limits: Limits) -> ChatWorkerProcess:
        private_folder(folder)
        environment = limits.environment(
            folder,
            **{MARK: str(folder)},
            CUDA_DEVICE_ORDER="PCI_BUS_ID",  # the numbering of NVML
            CUDA_VISIBLE_DEVICES="" if device.gpu is None else str(device.gpu),
            OMP_NUM_THREADS=str(device.threads),
            PYTHONUNBUFFERED="1",
            TORCHINDUCTOR_CACHE_DIR=str(limits.cache / "inductor"),
        )
        kind = "cpu" if device.gpu is None else "cuda"
        with open(open_private(folder / "worker.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as log:
            try:
                process = await asyncio.create_subprocess_exec(
                    *python_module("pantheraml.worker.entry"),
                    "chat",
                    kind,
                    device.precision,
                    *([] if device.memory_fraction is None else [str(device.memory_fraction)]),
                    cwd=folder,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=log,
                    env=environment,
                    start_new_session=True,
                    limit=_LONGEST_LINE,
                )
            except OSError as err:
                raise LaunchError(
                    f"The chat worker could not be started: {err}.",
                    fix="Check the limits of processes and memory (`ulimit -a`).",
                ) from err
        return cls(process)

    @property
    def is_running(self) -> bool:
        return self._process.returncode is None

    async def send(self, message: BaseModel) -> None:
        """Ignored if the worker has exited; `replies` then ends."""
        assert self._process.stdin is not None
        with contextlib.suppress(ConnectionError):
            self._process.stdin.write(message.model_dump_json().encode() + b"\n")
            await self._process.stdin.drain()

    async def replies(self) -> AsyncIterator[ChatReply]:
        """Yield its replies from now on, until it exits."""
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            if line.endswith(b"\n"):  # otherwise it was killed while writing
                yield CHAT_REPLY.validate_json(line)

    async def kill(self) -> None:
        """Kill it and its child processes, and wait for them."""
        if self.is_running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()
