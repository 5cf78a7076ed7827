"""The agent of one node, with a shell for a rank: preemption signals are forwarded and set the exit code."""

from __future__ import annotations

import signal
import subprocess
import time

import psutil

from pantheraml.base.errors import PreemptedError
from pantheraml.launch.script import agent_command

RANK = 'trap "echo saved; exit 0" USR1; echo ready; while kill -0 $PPID; do sleep 0.02; done'
LOOKS = 10


def wait_until_it_watches(agent: psutil.Process) -> None:
    """torch forgets a rank if a signal comes while that is being started. Once it has, it looks at it, and sleeps, and
    looks at it again."""
    started, deadline = agent.num_ctx_switches().voluntary, time.monotonic() + 100
    while agent.num_ctx_switches().voluntary < started + LOOKS:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_notice_to_the_agent_reaches_its_ranks() -> None:
    command = agent_command(1, ["sh", "-c", RANK])
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as agent:
        assert agent.stdout is not None
        try:
            assert agent.stdout.readline() == "ready\n"
            wait_until_it_watches(psutil.Process(agent.pid))
            agent.send_signal(signal.SIGUSR1)
            assert agent.stdout.read() == "saved\n"
            assert agent.wait(100) == PreemptedError.exit_code
        finally:
            agent.kill()
