"""The only place that reads or builds process environments.

Everything else asks here, so that one listing shows every variable that can change what PantheraML does.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ProcessRank:
    """Where this process stands among its peers, as torchrun tells it; a lone process is rank 0 of 1."""

    rank: int
    local_rank: int
    world_size: int


def process_rank() -> ProcessRank:
    get = os.environ.get
    return ProcessRank(
        rank=int(get("RANK", "0")),
        local_rank=int(get("LOCAL_RANK", "0")),
        world_size=int(get("WORLD_SIZE", "1")),
    )


def cache_root() -> Path:
    """Where tokenised data and compiled kernels are kept between runs (`PANTHERAML_CACHE`, else the XDG cache)."""
    own = os.environ.get("PANTHERAML_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pantheraml"


def debug_requested() -> bool:
    """`PANTHERAML_DEBUG=1` is the same as `--debug` on every command."""
    return os.environ.get("PANTHERAML_DEBUG", "") not in ("", "0")


def visible_cuda_devices() -> str | None:
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def child_environment(**changes: str | None) -> dict[str, str]:
    """This process's environment with `changes` applied (None removes a name), for a child process."""
    env = dict(os.environ)
    for name, value in changes.items():
        if value is None:
            env.pop(name, None)
        else:
            env[name] = value
    return env


def set_for_this_process(name: str, value: str) -> None:
    """For libraries that can only be told through the environment; called before they are imported."""
    os.environ[name] = value


@contextlib.contextmanager
def changed(name: str, value: str) -> Iterator[None]:
    """`set_for_this_process` for the length of a `with` block, also for the processes started in it."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
