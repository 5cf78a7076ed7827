"""`python -m pantheraml.worker.entry join FOLDER ...`: one rank of a run that torchrun, accelerate or srun started.

The rendezvous comes first, so that a missing rank is reported after the timeout and not after an hour of tokenizing.
Then rank 0 prepares the data while the others wait for its signal in the store.

Other users of the node may be able to reach the store. So its values are sealed with the run token, and none of them
decides what to run: each rank trains in the folder of its own command line, if this user owns it and it holds the
config this rank was started with.
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
from pantheraml.base.event_stream import EventWriter
from pantheraml.base.private import open_private, require_own_folder
from pantheraml.launch.local import LOG_FILE, die_with_parent
from pantheraml.launch.ranks import config_fingerprint
from pantheraml.launch.run_token import shared_token
from pantheraml.parallel.process_group import LONG_TIMEOUT
from pantheraml.rendezvous.join_store import join_store
from pantheraml.rendezvous.sealed_store import SealedStore
from pantheraml.specs.run_dir import RunDir
from pantheraml.worker.prepare import prepare_task
from pantheraml.worker.process import run_reporting
from pantheraml.worker.train import train_task

READ_TIMEOUT = datetime.timedelta(seconds=30)
"""How long a failed rank 0 waits for the others to read why, since the store ends with it."""


def lead(args: argparse.Namespace, events: EventWriter) -> None:
    """Rank 0: prepare the data, signal the others, train."""
    store = _join(args)
    try:
        folder = run_folder(args)
        prepare_task(folder, events)
    except BaseException as err:
        code = err.exit_code if isinstance(err, PantheraError) else WorkerError.exit_code
        store.set("run", json.dumps({"exit_code": code}))
        _wait_for_readers(store, "run")
        raise
    store.set("run", json.dumps({}))
    train_task(folder, events)


def follow(args: argparse.Namespace) -> int:
    """Other ranks: wait until rank 0 has prepared the data, then train; return the exit code."""
    try:
        store = _join(args)
        store.wait(["run"], LONG_TIMEOUT)
        message = json.loads(store.get("run"))
        store.set(f"read/run/{env.process_rank().rank}", "")
    except (dist.DistStoreError, dist.DistNetworkError) as err:
        raise LaunchError("Rank 0 ended before the run began.", fix="See the error message of rank 0.") from err
    if "exit_code" in message:
        return int(message["exit_code"])
    folder = run_folder(args)
    _redirect_output(folder / LOG_FILE)
    return run_reporting("train", folder, lambda events: train_task(folder, events))


def run_folder(args: argparse.Namespace) -> Path:
    """Return the run folder of this rank's command line, with links resolved, after checking owner and config."""
    folder: Path = args.folder.resolve()
    if not folder.is_dir():
        raise LaunchError(
            "The run folder of rank 0 does not exist on this node.",
            where=str(folder),
            fix="Put --output on a file system shared by all nodes; if ranks have different working directories, use an"
            " absolute path.",
        )
    try:
        require_own_folder(args.folder)
        require_own_folder(folder)
    except OSError as err:
        raise LaunchError(
            f"The run folder cannot be used: {err.strerror or err}.", where=str(folder), fix="Choose another --output."
        ) from err
    if config_fingerprint(RunDir(folder).config()) != args.config_fingerprint:
        raise ConfigError(
            "The run folder holds a different config than this rank was started with.",
            where=str(folder),
            fix="Start every process with the same config file, flags and --output, and give this run its own folder.",
        )
    return folder


def _wait_for_readers(store: SealedStore, key: str) -> None:
    """Keep the store, which ends with rank 0, until the other ranks have read `key`."""
    others = [f"read/{key}/{rank}" for rank in range(1, env.process_rank().world_size)]
    with contextlib.suppress(dist.DistStoreError, dist.DistNetworkError):  # they have exited
        store.wait(others, READ_TIMEOUT)


def _join(args: argparse.Namespace) -> SealedStore:
    process = env.process_rank()
    with shared_token(args.folder, remove=process.rank == 0) as token:  # every rank has it once all have joined
        store = join_store(
            process, env.store_address(), timeout_seconds=args.timeout_seconds, max_retries=args.max_retries
        )
    env.set_for_this_process("PANTHERAML_RUN_TOKEN", token)  # for the process group
    store.set(f"config/{process.rank}", f"{args.config_fingerprint} {args.folder.resolve().name}")
    configs = [store.get(f"config/{rank}").decode() for rank in range(process.world_size)]
    others = [str(rank) for rank, config in enumerate(configs) if config != configs[0]]
    store.set(f"read/config/{process.rank}", "")
    if others:
        if process.rank == 0:
            _wait_for_readers(store, "config")
        raise ConfigError(
            f"Rank {', '.join(others)} was started with a different config or --output than rank 0.",
            fix="Start every process with the same config file and flags.",
        )
    return store


def _redirect_output(path: Path) -> None:
    """Send stdout and stderr to the log of rank 0, which alone writes to the terminal."""
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
    args = parser.parse_args()
    if env.started_by_agent():
        die_with_parent()
    log.start(debug=env.debug_requested())
    disable_progress_bar()
    process = env.process_rank()
    if process.rank == 0:
        return run_reporting("train", args.folder, lambda events: lead(args, events))
    try:
        return follow(args)
    except PantheraError as err:
        print(f"rank {process.rank}: {type(err).__name__}: {err}", file=sys.stderr, flush=True)
        return err.exit_code
