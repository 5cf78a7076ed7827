"""`python -m pantheraml.worker.join FOLDER ...`: one rank of a run that torchrun, accelerate or srun started.

All ranks meet before anything else, so that one that never comes is told after the timeout and not after an hour of
tokenising. Then rank 0 prepares the data while the others wait, and tells them when it is done.

Other users of the node may reach the store where ranks meet. So values in it are sealed with a run token, and none of
them says what to run: each rank trains in the folder that its own command names, if that is this user's and holds the
configuration that this rank was started with.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import sys
from pathlib import Path

import torch.distributed as dist
from transformers.utils.logging import disable_progress_bar

from pantheraml.base import env, log
from pantheraml.base.errors import ConfigError, LaunchError, PantheraError, WorkerError
from pantheraml.base.events import EventWriter
from pantheraml.base.private import open_private, require_own_folder
from pantheraml.launch.local import LOG_FILE, die_with_parent
from pantheraml.launch.ranks import config_fingerprint
from pantheraml.launch.run_token import shared_token
from pantheraml.parallel.process_group import PATIENCE
from pantheraml.parallel.rendezvous import meet
from pantheraml.parallel.sealed import SealedStore
from pantheraml.specs.run_dir import RunDir
from pantheraml.worker.prepare import prepare_task
from pantheraml.worker.process import run_reporting
from pantheraml.worker.train import train_task

FAREWELL = datetime.timedelta(seconds=30)
"""How long rank 0 stays for the others after it failed."""


def lead(asked: argparse.Namespace, events: EventWriter) -> None:
    """Rank 0: prepare, tell the others, train."""
    store = _meet(asked)
    try:
        folder = run_folder(asked)
        prepare_task(folder, events)
    except BaseException as err:
        code = err.exit_code if isinstance(err, PantheraError) else WorkerError.exit_code
        store.set("run", json.dumps({"exit_code": code}))
        _wait_for_readers(store, "run")
        raise
    store.set("run", json.dumps({}))
    train_task(folder, events)


def follow(asked: argparse.Namespace) -> int:
    """The other ranks: wait until it is prepared, then train as rank 0 does; the exit code."""
    try:
        store = _meet(asked)
        store.wait(["run"], PATIENCE)
        told = json.loads(store.get("run"))
        store.set(f"read/run/{env.process_rank().rank}", "")
    except (dist.DistStoreError, dist.DistNetworkError) as err:
        raise LaunchError("Rank 0 ended before the run began.", todo="Its own message says why.") from err
    if "exit_code" in told:
        return int(told["exit_code"])
    folder = run_folder(asked)
    _write_to(folder / LOG_FILE)
    return run_reporting("train", folder, lambda events: train_task(folder, events))


def run_folder(asked: argparse.Namespace) -> Path:
    """The folder that this rank's own command names, with links followed, as rank 0 has claimed it."""
    folder: Path = asked.folder.resolve()
    if not folder.is_dir():
        raise LaunchError(
            "The run folder of rank 0 is not there on this machine.",
            where=str(folder),
            todo="Put --output on a file system that all machines share; if ranks have different current folders, give"
            " it as an absolute path.",
        )
    try:
        require_own_folder(asked.folder)
        require_own_folder(folder)
    except OSError as err:
        raise LaunchError(
            f"The run folder cannot be used: {err.strerror or err}.", where=str(folder), todo="Choose another --output."
        ) from err
    if config_fingerprint(RunDir(folder).config()) != asked.config_fingerprint:
        raise ConfigError(
            "The run folder holds another configuration than this rank was started with.",
            where=str(folder),
            todo="Give every process the same config file, flags and --output, and this run a folder of its own.",
        )
    return folder


def _wait_for_readers(store: SealedStore, what: str) -> None:
    """The store ends with rank 0, which therefore stays until the others have read what it is about to fail with."""
    others = [f"read/{what}/{rank}" for rank in range(1, env.process_rank().world_size)]
    with contextlib.suppress(dist.DistStoreError, dist.DistNetworkError):  # they are gone, and need not know
        store.wait(others, FAREWELL)


def _meet(asked: argparse.Namespace) -> SealedStore:
    place = env.process_rank()
    with shared_token(asked.folder, remove=place.rank == 0) as token:  # who has come, has it
        store = meet(place, env.store_address(), timeout_seconds=asked.timeout_seconds, max_retries=asked.max_retries)
    env.set_for_this_process("PANTHERAML_RUN_TOKEN", token)  # they meet again to train
    store.set(f"config/{place.rank}", f"{asked.config_fingerprint} {asked.folder.resolve().name}")
    configs = [store.get(f"config/{rank}").decode() for rank in range(place.world_size)]
    others = [str(rank) for rank, config in enumerate(configs) if config != configs[0]]
    store.set(f"read/config/{place.rank}", "")
    if others:
        if place.rank == 0:
            _wait_for_readers(store, "config")
        raise ConfigError(
            f"Rank {', '.join(others)} was started with another configuration, or another --output, than rank 0.",
            todo="Give every process the same config file and flags.",
        )
    return store


def _write_to(path: Path) -> None:
    """From here on this process's output goes where rank 0's goes; the terminal is rank 0's alone."""
    file = open_private(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.close(file)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--timeout-seconds", type=int, required=True)
    parser.add_argument("--max-retries", type=int, required=True)
    parser.add_argument("--config-fingerprint", required=True)
    asked = parser.parse_args()
    if env.started_by_agent():
        die_with_parent()
    log.start(debug=env.debug_requested())
    disable_progress_bar()
    place = env.process_rank()
    if place.rank == 0:
        return run_reporting("train", asked.folder, lambda events: lead(asked, events))
    try:
        return follow(asked)
    except PantheraError as err:
        print(f"rank {place.rank}: {type(err).__name__}: {err}", file=sys.stderr, flush=True)
        return err.exit_code


if __name__ == "__main__":
    sys.exit(main())
