"""What a process that will train can begin before torch is there.

To import torch and transformers takes seconds on one core, while GPU and disk have nothing to do. So threads make the
GPU's context and ask the kernel to read the weights meanwhile. Nothing is decided here, and nothing depends on it: what
cannot be done early is done, or fails and is told, where it is needed.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import psutil

from pantheraml.base import env
from pantheraml.devices.context import open_context
from pantheraml.specs.run_dir import RunDir
from pantheraml.specs.train import ModelConfig

PIECE = 64 << 20
"""Bytes asked for at a time: a process that ends waits for one piece at most."""
SHARE = 0.5
"""Of the memory that is available: larger weights would push out what was read first."""


def begin_early(folder: Path) -> None:
    """For the run in `folder`, as far as it is this rank's to do."""
    run, place = RunDir(folder), env.process_rank()
    if run.plan().device == "cuda":
        # Not a daemon: a process must not end while another thread is inside the driver.
        threading.Thread(target=open_context, args=(place.local_rank,), name="cuda-context").start()
    if place.local_rank == 0:
        files = weight_files(run.config().model)
        threading.Thread(target=ask_for, args=(files,), name="read-weights-early", daemon=True).start()


def weight_files(model: ModelConfig) -> list[Path]:
    """Of a local folder, those with the usual names; where a hub name leads to is found out later."""
    return sorted(Path(model.path).expanduser().glob("model*.safetensors")) if model.init == "pretrained" else []


def ask_for(files: Sequence[Path]) -> None:
    """Have the kernel read `files` into its cache, in order; not if they are too large for that."""
    with contextlib.ExitStack() as stack, contextlib.suppress(OSError):  # the loader tells what cannot be read
        opened = [stack.enter_context(open(file, "rb")).fileno() for file in files]
        sizes = [os.fstat(file).st_size for file in opened]
        if sum(sizes) > SHARE * psutil.virtual_memory().available:
            return
        for file, size in zip(opened, sizes, strict=True):
            for begin in range(0, size, PIECE):
                os.posix_fadvise(file, begin, PIECE, os.POSIX_FADV_WILLNEED)
