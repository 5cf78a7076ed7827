"""A run of several processes on one node, seen from another host and by other users: there is no port to knock at."""

from __future__ import annotations

import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.e2e.conftest import Playground, result_of, wait_until
from tests.e2e.namespaces import ADDRESSES, two_hosts, within

LISTEN = "0A"
"""As the kernel writes that state."""

SCAN = """
import socket, sys
found = []
for port in range(1, 65536):
    with socket.socket() as knocking:
        knocking.settimeout(5)
        if knocking.connect_ex((sys.argv[1], port)) == 0:
            found.append(port)
print(found)
"""

SCRIPT = """
import os, time
import torch
import torch.distributed as dist
from pantheraml import enable_multi_gpu

enable_multi_gpu(2)
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
open(f"met-{os.environ['RANK']}-{int(total)}", "w").close()
time.sleep(1000)
"""


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[str]]:
    with two_hosts("door") as names:
        yield names


def start(playground: Playground, host: str, command: list[str]) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [*within(host), sys.executable, *command],
        cwd=playground.root,
        env={**playground.environment, "AWS_SECRET_ACCESS_KEY": "for the parent alone"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    playground.started.append(process)
    return process


def listening(process: psutil.Process) -> list[str]:
    """Addresses at which anybody on the host of a process listens, as the kernel writes them, with their ports."""
    found = []
    for family in ("tcp", "tcp6"):
        for line in Path(f"/proc/{process.pid}/net/{family}").read_text().splitlines()[1:]:
            address, state = line.split()[1], line.split()[3]
            if state == LISTEN:
                found.append(address)
    return found


def is_loopback(address: str) -> bool:
    """127.0.0.1 and ::1, also written as ::ffff:127.0.0.1."""
    words = address.partition(":")[0]
    return words.endswith("0100007F") or words == "00000000000000000000000001000000"


def open_ports(hosts: list[str]) -> str:
    """What the second host finds on the first."""
    scan = [*within(hosts[1]), sys.executable, "-c", SCAN, ADDRESSES[0]]
    return subprocess.run(scan, capture_output=True, text=True, check=True, timeout=200).stdout.strip()


def test_another_host_finds_no_port_of_a_run(playground: Playground, hosts: list[str]) -> None:
    long = ["data.seq_len=64", "train.global_batch_size=4", "train.max_steps=100000"]
    training = ["train", "--model", playground.model, "--data", playground.data, "--device", "cpu", "--nproc", "2"]
    words = [*training, "--output", "runs/door", *(word for value in long for word in ("--set", value))]
    run = start(playground, hosts[0], ["-m", "pantheraml", *words])
    playground.wait_for_steps("runs/door")
    listens = listening(psutil.Process(run.pid))
    assert listens, "gloo's own sockets are there: the ranks have met"
    assert all(map(is_loopback, listens)), listens
    assert open_ports(hosts) == "[]"
    stores = {process.environ()["PANTHERAML_STORE_FILE"] for process in ranks(run.pid)}
    (store,) = map(Path, stores)
    assert all("AWS_SECRET_ACCESS_KEY" not in process.environ() for process in ranks(run.pid))
    assert stat.S_IMODE(store.parent.stat().st_mode) == 0o700, "other users cannot enter"
    run.send_signal(signal.SIGTERM)
    assert result_of(run).code == 143
    assert not store.parent.exists()


def ranks(pid: int) -> list[psutil.Process]:
    below = psutil.Process(pid).children(recursive=True)
    return [process for process in below if "RANK" in process.environ()]


@pytest.mark.extended
def test_another_host_finds_no_port_of_a_script(playground: Playground, hosts: list[str]) -> None:
    script = playground.root / "two_ranks.py"
    script.write_text(SCRIPT)
    run = start(playground, hosts[0], [str(script)])
    wait_until(lambda: all((playground.root / f"met-{rank}-2").exists() for rank in (0, 1)))
    listens = listening(psutil.Process(run.pid))
    assert len(listens) == 3, "a store and two ranks"
    assert all(map(is_loopback, listens)), listens
    assert open_ports(hosts) == "[]"
    tokens = {process.environ()["PANTHERAML_RUN_TOKEN"] for process in ranks(run.pid)}
    assert list(map(len, tokens)) == [64], "other users reach loopback, but not what the ranks seal with it"
    run.send_signal(signal.SIGINT)
    assert result_of(run).code == 130
