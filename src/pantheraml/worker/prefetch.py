"""Create the CUDA context and prefetch weight files while torch is being imported.

Importing torch and transformers takes seconds on one core while GPU and disk are idle. So threads create the CUDA
context and have the kernel read the weights meanwhile. This is only an optimization: whatever fails here is done again,
or reported, where it is needed.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import psutil

from pantheraml.base import env
from pantheraml.devices.cuda_context import open_context
from pantheraml.specs.run_dir import RunDir
from pantheraml.specs.train import ModelConfig

CHUNK_BYTES = 64 << 20
"""Bytes per read-ahead call: an exiting process waits for at most one."""
MAX_MEMORY_SHARE = 0.5
"""Share of available memory: larger weights would evict what was read first."""


def prefetch_for(folder: Path) -> None:
    """Start this rank's share of the prefetch for the run in `folder`."""
    run, process = RunDir(folder), env.process_rank()
    if run.plan().device == "cuda":
        # Not a daemon: the process must not exit while a thread is inside the driver.
        threading.Thread(target=open_context, args=(process.local_rank,), name="cuda-context").start()
    if process.local_rank == 0:
        files = weight_files(run.config().model)
        threading.Thread(target=prefetch_files, args=(files,), name="prefetch-weights", daemon=True).start()


def weight_files(model: ModelConfig) -> list[Path]:
    """Weight files with the usual names in a local folder; models on the hub are resolved later."""
    return sorted(Path(model.path).expanduser().glob("model*.safetensors")) if model.init == "pretrained" else []


def prefetch_files(files: Sequence[Path]) -> None:
    """Have the kernel read `files` into the page cache, in order, unless they are too large for it."""
    with contextlib.ExitStack() as stack, contextlib.suppress(OSError):  # the loader reports unreadable files
        opened = [stack.enter_context(open(file, "rb")).fileno() for file in files]
        sizes = [os.fstat(file).st_size for file in opened]
        if sum(sizes) > MAX_MEMORY_SHARE * psutil.virtual_memory().available:
            return
        for file, size in zip(opened, sizes, strict=True):
            for begin in range(0, size, CHUNK_BYTES):
                os.posix_fadvise(file, begin, CHUNK_BYTES, os.POSIX_FADV_WILLNEED)
