"""The agents of two machines, with shells for ranks: a start after a kill, and an end on request."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

from pantheraml.launch.machines import Assignment, Machine
from pantheraml.launch.run_token import token_file
from tests.ports import reserved_port

SCRIPT = """
say() { echo "$RANK of $WORLD_SIZE, $LOCAL_RANK of $LOCAL_WORLD_SIZE" >> "$0/start-$TORCHELASTIC_RESTART_COUNT"; }
if [ $TORCHELASTIC_RESTART_COUNT = 0 ]; then
    say
    [ $RANK = 2 ] && kill -9 $$
    sleep 0.5
    exit 70
fi
trap 'touch "$0/stop"; exit 0' USR1
say
until [ -e "$0/stop" ]; do sleep 0.05; done
[ $RANK = 0 ] && exit 143
exit 0
"""
"""Ranks of one run: one is killed at first; later, where one is told to stop, all do, and rank 0 says so."""


def start(folder: Path, number: int, processes: int, port: int) -> subprocess.Popen[str]:
    machine = Machine(2, number, "127.0.0.1", port)
    assignment = Assignment(machine, processes, str(folder), 100, 3, ("killed",), 50)
    agent = [sys.executable, "-m", "pantheraml.worker.machine", assignment.to_json()]
    return subprocess.Popen([*agent, "sh", "-c", SCRIPT, str(folder)], stderr=subprocess.PIPE, text=True)


def test_all_start_again_and_end_together(tmp_path: Path) -> None:
    with reserved_port() as port:
        agents = [start(tmp_path, 0, 2, port), start(tmp_path, 1, 1, port)]
        try:
            told = ended_on_request(tmp_path, agents)
        finally:
            for agent in agents:
                agent.kill()
                agent.wait()
    assert [agent.returncode for agent in agents] == [143, 143]
    for said in told:
        assert "Rank 2 was killed by SIGKILL" in said
        assert "The run begins again (start 1 of 3 without a new checkpoint)." in said
        assert "Traceback" not in said
    assert not token_file(tmp_path).exists()
    places = ["0 of 3, 0 of 2", "1 of 3, 1 of 2", "2 of 3, 0 of 1"]
    for number in (0, 1):
        assert sorted((tmp_path / f"start-{number}").read_text().splitlines()) == places


def test_an_agent_that_does_not_share_the_folder_is_not_heard(tmp_path: Path) -> None:
    """Its run token is another one; as is that of a stranger, who has none."""
    with reserved_port() as port:
        agents = [start(tmp_path / name, number, 1, port) for number, name in enumerate(("mine", "other"))]
        try:
            told = [agent.communicate(timeout=100)[1] for agent in agents]
        finally:
            for agent in agents:
                agent.kill()
                agent.wait()
    assert [agent.returncode for agent in agents] == [6, 6]
    assert "Machine 1 at 127.0.0.1" in told[0]
    assert "has another run token" in told[0]
    assert "Traceback" not in told[0] + told[1]


def ended_on_request(folder: Path, agents: list[subprocess.Popen[str]]) -> list[str]:
    """What the agents said whose ranks were told to stop on machine 1, once all had started again."""
    again = folder / "start-1"
    deadline = time.monotonic() + 100
    while not (again.exists() and len(again.read_text().splitlines()) == 3):
        assert time.monotonic() < deadline
        assert [agent.poll() for agent in agents] == [None, None]
        time.sleep(0.05)
    agents[1].send_signal(signal.SIGUSR1)
    return [agent.communicate(timeout=100)[1] for agent in agents]
