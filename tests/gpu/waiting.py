"""Detect host-device synchronization in tests."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def no_waiting() -> Iterator[None]:
    """Raise if the host synchronizes with the GPU."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch warns that the mode is a prototype
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
