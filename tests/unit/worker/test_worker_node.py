"""The agents of two nodes, with shells for ranks: restart after a kill, and stop on request."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

from pantheraml.launch.nodes import Assignment, NodeSpec
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
"""Ranks of one run: one is killed in the first attempt; later, a stop request to one stops all, as rank 0 reports."""


def start(folder: Path, number: int, processes: int, port: int) -> subprocess.Popen[str]:
    node = NodeSpec(2, number, "127.0.0.1", port)
    assignment = Assignment(node, processes, str(folder), 100, 3, ("killed",), 50)
    agent = [sys.executable, "-m", "pantheraml.worker.entry", "node", assignment.to_json()]
    return subprocess.Popen([*agent, "sh", "-c", SCRIPT, str(folder)], stderr=subprocess.PIPE, text=True)


def test_all_nodes_restart_and_end_together(tmp_path: Path) -> None:
    with reserved_port() as port:
        agents = [start(tmp_path, 0, 2, port), start(tmp_path, 1, 1, port)]
        try:
            messages = stop_after_restart(tmp_path, agents)
        finally:
            for agent in agents:
                agent.kill()
                agent.wait()
    assert [agent.returncode for agent in agents] == [143, 143]
    for message in messages:
        assert "Rank 2 was killed by SIGKILL" in message
        assert "Starting over (restart 1 of 3 without a new checkpoint)." in message
        assert "Traceback" not in message
    assert not token_file(tmp_path).exists()
    expected = ["0 of 3, 0 of 2", "1 of 3, 1 of 2", "2 of 3, 0 of 1"]
    for number in (0, 1):
        assert sorted((tmp_path / f"start-{number}").read_text().splitlines()) == expected


def test_an_agent_with_another_run_token_is_refused(tmp_path: Path) -> None:
    """It does not share the folder, so its token differs."""
    with reserved_port() as port:
        agents = [start(tmp_path / name, number, 1, port) for number, name in enumerate(("mine", "other"))]
        try:
            messages = [agent.communicate(timeout=100)[1] for agent in agents]
        finally:
            for agent in agents:
                agent.kill()
                agent.wait()
    assert [agent.returncode for agent in agents] == [6, 6]
    assert "Node 1 at 127.0.0.1" in messages[0]
    assert "has a different run token" in messages[0]
    assert "Traceback" not in messages[0] + messages[1]


def stop_after_restart(folder: Path, agents: list[subprocess.Popen[str]]) -> list[str]:
    """Stop node 1 once all ranks have restarted; return the agents' messages."""
    again = folder / "start-1"
    deadline = time.monotonic() + 100
    while not (again.exists() and len(again.read_text().splitlines()) == 3):
        assert time.monotonic() < deadline
        assert [agent.poll() for agent in agents] == [None, None]
        time.sleep(0.05)
    agents[1].send_signal(signal.SIGUSR1)
    return [agent.communicate(timeout=100)[1] for agent in agents]
