"""The process above the ranks of one node, with a shell for a rank: signals go on to it and set the exit code."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from pantheraml.base.env import child_environment
from pantheraml.base.errors import InterruptedRunError, PreemptedError
from pantheraml.launch.script import ranks_command

RANK = 'trap "echo saved; exit 0" {signal}; echo ready; while kill -0 $PPID; do sleep 0.02; done'


def started(processes: int, script: str, **environment: str) -> subprocess.Popen[str]:
    command = ranks_command(processes, ["sh", "-c", script])
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, **pipes, text=True, env=child_environment(**environment))


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGUSR1, PreemptedError.exit_code),
        (signal.SIGTERM, PreemptedError.exit_code),
        (signal.SIGINT, InterruptedRunError.exit_code),
    ],
)
def test_a_signal_reaches_the_ranks(number: signal.Signals, code: int) -> None:
    with started(2, RANK.format(signal=number.name.removeprefix("SIG"))) as agent:
        assert agent.stdout is not None
        try:
            assert [agent.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
            agent.send_signal(number)
            assert agent.communicate(timeout=100) == ("saved\n" * 2, "")
            assert agent.returncode == code
        finally:
            agent.kill()


def test_ranks_have_the_environment_of_torchrun() -> None:
    names = "$RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE ${PANTHERAML_RUN_TOKEN:+token}"
    with started(2, f"echo {names} $(dirname $PANTHERAML_STORE_FILE | xargs stat -c %a)") as agent:
        out, err = agent.communicate(timeout=100)
    assert (sorted(out.splitlines()), err, agent.returncode) == (["0 0 2 2 token 700", "1 1 2 2 token 700"], "", 0)


@pytest.mark.parametrize(
    ("fails", "code", "told"),
    [
        ("exit 7", 7, "Rank 1 exited with code 7.\n"),
        ("kill -9 $$", 71, "Rank 1 was killed by SIGKILL (most often the kernel, out of memory).\n"),
    ],
)
def test_a_rank_that_fails_ends_the_others(fails: str, code: int, told: str) -> None:
    begin = time.monotonic()
    with started(3, f"if [ $RANK = 1 ]; then {fails}; fi; exec sleep 100") as agent:
        _, err = agent.communicate(timeout=90)
    assert (agent.returncode, err) == (code, told)
    assert time.monotonic() - begin < 60


def test_who_does_not_save_in_time_is_killed() -> None:
    with started(1, "trap '' TERM; echo ready; sleep 100 & wait; wait", TORCH_ELASTIC_SHUTDOWN_TIMEOUT="0.2") as agent:
        assert agent.stdout is not None
        assert agent.stdout.readline() == "ready\n"
        agent.terminate()
        agent.stdout.close()
        assert agent.wait(60) == PreemptedError.exit_code


def test_it_starts_without_torch() -> None:
    code = "import sys, pantheraml.worker.entry.ranks; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
