"""`python -m tests.distributed.rank_server`: fork server that imports the rank scripts once and forks their ranks.

Importing torch, transformers and peft takes five seconds of CPU time, and a test has up to eight ranks. A request is a
line of JSON on stdin; the response on stdout is the exit code. Ranks stay in this process's session, so that one signal
to its process group ends them all.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import sys
from collections.abc import Callable
from functools import partial

import torch.distributed as dist

from pantheraml.base.env import set_for_this_process
from pantheraml.launch.local import die_with_parent


def main() -> None:
    die_with_parent()
    for line in sys.stdin:
        request = json.loads(line)
        log = os.open(request["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.dup2(log, sys.stderr.fileno())
        os.close(log)
        print(run_ranks(request["script"], request["processes"], request["arguments"]), flush=True)


def run_ranks(script: str, processes: int, arguments: list[str]) -> int:
    """Return 0, or the exit code of the first rank to fail, after killing the others."""
    module = importlib.import_module(f"tests.distributed.{script}")
    gc.collect()
    gc.freeze()  # imported modules are never garbage, so ranks need not scan them
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"{script} starts {threads - 1} threads when it is imported, which a fork would lose"
    store, port = host_store()
    ranks = {forked(partial(be_rank, rank, processes, port, module.main, arguments)) for rank in range(processes)}
    code = first_failure(ranks)
    os.kill(store, signal.SIGKILL)
    os.waitpid(store, 0)
    return code


def forked(work: Callable[[], None]) -> int:
    """Fork a child that runs `work` and exits like a program, with output to the log; return its process id."""
    pid = os.fork()
    if pid == 0:
        die_with_parent()
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        os.dup2(os.open(os.devnull, os.O_RDONLY), sys.stdin.fileno())
        work()
        sys.exit()
    return pid


def host_store() -> tuple[int, int]:
    """Fork a process for the rendezvous store and return its port: a store has threads, which forks would lose."""
    reading, writing = os.pipe()

    def serve() -> None:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(writing, str(store.port).encode())
        signal.pause()

    pid = forked(serve)
    os.close(writing)
    port = int(os.read(reading, 16))
    os.close(reading)
    return pid, port


def be_rank(rank: int, processes: int, port: int, script_main: Callable[[], None], arguments: list[str]) -> None:
    """Set the environment variables of torchrun and run the script."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in {**place, **meeting, "TORCHELASTIC_RESTART_COUNT": 0}.items():
        set_for_this_process(name, str(value))
    sys.argv[1:] = arguments
    script_main()


def first_failure(ranks: set[int]) -> int:
    while ranks:
        pid, status = os.wait()
        ranks.discard(pid)
        code = os.waitstatus_to_exitcode(status)
        if code != 0:
            for other in ranks:
                os.kill(other, signal.SIGKILL)
                os.waitpid(other, 0)
            return code
    return 0


if __name__ == "__main__":
    main()
