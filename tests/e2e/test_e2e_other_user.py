"""A run, seen by another user of the machine: nothing to read or write, no lock to hold, no port that obeys."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tests.e2e.conftest import Playground, result_of, wait_until
from tests.event_log import raw_events

OTHER_USER = 65534

ATTEMPTS = """
import fcntl, json, os, socket, sys

roots, ports = json.loads(sys.argv[1])
found = {"entered": [], "locked": [], "written": [], "ports": []}
for root in roots:
    for top, folders, files in os.walk(root):
        if top != root or os.access(top, os.R_OK | os.X_OK):
            found["entered"].append(top)
        for name in files:
            try:
                with open(os.path.join(top, name), "rb") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    found["locked"].append(name)
            except OSError:
                pass
    for name in ("run.lock", "events.jsonl", ".partial-x"):
        try:
            os.symlink("/etc/passwd", os.path.join(root, name))
            found["written"].append(name)
        except OSError:
            pass
for port in ports:
    with socket.socket() as knocking:
        knocking.settimeout(5)
        if knocking.connect_ex(("127.0.0.1", port)) == 0:
            found["ports"].append(port)
            knocking.sendall(bytes(range(256)) * 16)
print(json.dumps(found))
"""


FORGER = """
import json, os, socket, sys, time
from datetime import timedelta

import torch.distributed as dist

port, folder = int(sys.argv[1]), sys.argv[2]
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
print("ready", flush=True)
while True:
    with socket.socket() as knocking:
        if knocking.connect_ex(("127.0.0.1", port)) == 0:
            break
    time.sleep(0.01)
store = dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=30), wait_for_workers=False)
print("forging", flush=True)
while True:
    store.set("pantheraml/0/1/run", "-" * 64 + json.dumps({"folder": folder}))
    time.sleep(0.005)
"""
"""Another user, who writes into the store of a run what rank 0 would: train in that folder."""


@pytest.fixture
def shared(playground: Playground) -> Iterator[Playground]:
    """A folder that everybody may enter, unlike a test's own, and the command line in it."""
    if os.geteuid() != 0:
        pytest.skip("to be another user needs root")
    root = Path(tempfile.mkdtemp(prefix="everybody-"))
    root.chmod(0o755)
    (root / "model").symlink_to(playground.model)
    shutil.copy(playground.data, root / "data.jsonl")
    yield replace(playground, root=root)
    shutil.rmtree(root)


def attempts(roots: list[Path], ports: list[int]) -> dict[str, list[Any]]:
    command = ["python3", "-c", ATTEMPTS, json.dumps([[str(root) for root in roots], ports])]
    system = {"PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        command, user=OTHER_USER, group=OTHER_USER, extra_groups=[], env=system, cwd="/", capture_output=True,
        text=True, check=True, timeout=60,
    )  # fmt: skip
    found: dict[str, list[Any]] = json.loads(done.stdout)
    return found


@pytest.mark.extended
@pytest.mark.skipif(shutil.which("python3", path="/usr/bin:/bin") is None, reason="no interpreter for other users")
def test_another_user_finds_no_way_in(shared: Playground) -> None:
    shared.environment["PANTHERAML_CACHE"], before = str(shared.root / "cache"), shared.environment["PANTHERAML_CACHE"]
    try:
        run = shared.start_training("run", "--nproc", "2", "--set", "train.max_steps=100000")
        shared.wait_for_steps("run")
        below = psutil.Process(run.pid).children(recursive=True)
        store = next(Path(one.environ()["PANTHERAML_STORE_FILE"]) for one in below if "RANK" in one.environ())
        listening = [place.laddr.port for one in below for place in one.net_connections() if place.status == "LISTEN"]
        found = attempts([shared.root / "run", shared.root / "cache", store.parent], listening)
        assert (found["entered"], found["locked"], found["written"]) == ([], [], [])
        assert found["ports"] == listening, "gloo's, on loopback: they can be reached, and what is sent is ignored"
        steps = len(raw_events(shared.root / "run"))
        wait_until(lambda: len(raw_events(shared.root / "run")) > steps + 20)
        run.send_signal(signal.SIGTERM)
        ended = result_of(run)
        assert ended.code == 143, ended
    finally:
        shared.environment["PANTHERAML_CACHE"] = before


def test_what_another_user_planted_is_not_used(shared: Playground) -> None:
    """A run folder that somebody else made, and links in one of our own."""
    foreign, victim = shared.root / "foreign", shared.root / "victim"
    foreign.mkdir()
    os.chown(foreign, OTHER_USER, OTHER_USER)
    ended = shared.train("foreign", "--set", "train.max_steps=1")
    assert ended.code == 9, ended
    assert "another user" in ended.err
    victim.write_text("precious")
    (shared.root / "own").mkdir()
    (shared.root / "own/run.lock").symlink_to(victim)
    ended = shared.train("own", "--set", "train.max_steps=1")
    assert ended.code != 0, ended
    assert "link" in ended.err
    assert victim.read_text() == "precious"


def evil_run(shared: Playground, ran: Path) -> Path:
    """A run folder of the other user whose model brings code, which tells that it ran."""
    folder, model = shared.root / "evil", shared.root / "evil-model"
    assert shared.train("evil", "--nproc", "2", "--set", "train.max_steps=1").code == 0
    shutil.copytree(Path(shared.model).resolve(), model)
    values = json.loads((model / "config.json").read_text())
    values |= {"model_type": "evil", "auto_map": {"AutoConfig": "evil.EvilConfig"}}
    (model / "config.json").write_text(json.dumps(values))
    (model / "evil.py").write_text(f"open({str(ran)!r}, 'w')\n")
    settings = yaml.safe_load((folder / "config.yaml").read_text())
    settings["model"] |= {"path": str(model), "trust_remote_code": True}
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    for path in (folder, *folder.rglob("*")):
        os.chown(path, OTHER_USER, OTHER_USER)
    return folder


@pytest.mark.extended
def test_another_user_cannot_send_ranks_to_a_folder(shared: Playground, port: str) -> None:
    """Ranks by hand meet at a port that every user of the node reaches. A forged value may end the run, no more."""
    ran = shared.root / "ran"
    command = [sys.executable, "-c", FORGER, port, str(evil_run(shared, ran))]
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    places = [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in (0, 1)]
    settings = ("--set", "train.max_steps=3", "--set", "parallel.timeout_seconds=20")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as forger:
        assert forger.stdout is not None
        try:
            assert forger.stdout.readline() == "ready\n"
            ranks = [
                replace(shared, environment=shared.environment | place).start_training("run", *settings)
                for place in places
            ]
            ended = [result_of(rank) for rank in ranks]
        finally:
            forger.kill()
        assert forger.stdout.read() == "forging\n"
    assert not ran.exists(), "code of another user ran"
    assert ended[1].code == 6, ended
    assert "not written by a process of this run" in ended[1].err
