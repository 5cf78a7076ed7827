"""The agents of two machines, with shells for ranks: a start after a kill, and an end on request."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from pantheraml.launch.machines import Assignment, Machine

SCRIPT = """
say() { echo "$RANK of $WORLD_SIZE, $LOCAL_RANK of $LOCAL_WORLD_SIZE" >> "$0/start-$TORCHELASTIC_RESTART_COUNT"; }
if [ $TORCHELASTIC_RESTART_COUNT = 0 ]; then
    say
    [ $RANK = 2 ] && kill -9 $$
    sleep 0.5
    exit 70
fi
trap 'touch "$0/stop"; exit 0' TERM
say
until [ -e "$0/stop" ]; do sleep 0.05; done
[ $RANK = 0 ] && exit 143
exit 0
"""
"""Ranks of one run: one is killed at first; later, where one is told to stop, all do, and rank 0 says so."""


def start(folder: Path, number: int, processes: int, port: int) -> subprocess.Popen[str]:
    machine = Machine(2, number, "127.0.0.1", port)
    assignment = Assignment(machine, processes, str(folder), 60, 3, ("killed",), 5)
    agent = [sys.executable, "-m", "pantheraml.worker.machine", assignment.to_json()]
    return subprocess.Popen([*agent, "sh", "-c", SCRIPT, str(folder)], stderr=subprocess.PIPE, text=True)


def test_all_start_again_and_end_together(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    agents = [start(tmp_path, 0, 2, port), start(tmp_path, 1, 1, port)]
    again = tmp_path / "start-1"
    deadline = time.monotonic() + 100
    while not (again.exists() and len(again.read_text().splitlines()) == 3):
        assert time.monotonic() < deadline
        assert [agent.poll() for agent in agents] == [None, None]
        time.sleep(0.05)
    agents[1].send_signal(signal.SIGTERM)
    told = [agent.communicate(timeout=60)[1] for agent in agents]
    assert [agent.returncode for agent in agents] == [143, 143]
    for said in told:
        assert "Rank 2 was killed by SIGKILL" in said
        assert "The run begins again (start 1 of 3 without a new checkpoint)." in said
        assert "Traceback" not in said
    places = ["0 of 3, 0 of 2", "1 of 3, 1 of 2", "2 of 3, 0 of 1"]
    assert sorted((tmp_path / "start-0").read_text().splitlines()) == places
    assert sorted(again.read_text().splitlines()) == places
