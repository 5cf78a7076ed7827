"""Supervision of real processes, which run a few lines of Python instead of training."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest

from pantheraml.launch import local
from pantheraml.launch.local import StopRequests, explain_death, log_tail, run_workers, task_command

IGNORES_SIGTERM = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(100)"
)
NEST = """
import os, subprocess, sys, time
sleep = [sys.executable, "-c", "import time; time.sleep(100)", sys.argv[1]]
children = [subprocess.Popen(sleep, start_new_session=True) for _ in range(2)]
print("up", flush=True)
"""
DIES = """
while not os.path.exists(sys.argv[1] + "/seen"): time.sleep(0.02)
os.kill(os.getpid(), 9)
"""
PATIENCE = 100.0
"""Timeout in seconds for things that are expected to happen."""


def run(
    folder: Path,
    code: str,
    *,
    stop: Sequence[signal.Signals] = (),
    on_tick: Callable[[], object] = lambda: None,
    ask: bool = True,
    grace: float = PATIENCE,
) -> tuple[int, float]:
    """Signals are sent once the worker prints that it is up."""
    stops = StopRequests()
    begin = time.monotonic()

    def tick() -> None:
        if not stops.count and "up" in log_tail(folder, lines=1):
            for number in stop:
                stops.receive(number)
        on_tick()

    status = run_workers(
        [sys.executable, "-c", code, str(folder)],
        folder,
        environment={"PATH": "/usr/bin:/bin", "PYTHONUNBUFFERED": "1"},
        stops=stops,
        ask_to_stop=(folder / "stop").touch if ask else None,
        grace_seconds=grace,
        on_tick=tick,
    )
    return status, time.monotonic() - begin


def left(folder: Path) -> list[psutil.Process]:
    """Running processes of this test, which have its folder on their command line."""
    return [process for process in psutil.process_iter(["cmdline"]) if str(folder) in (process.info["cmdline"] or [])]


def test_output_goes_to_the_log_and_the_status_comes_back(tmp_path: Path) -> None:
    status, _ = run(tmp_path, "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)")
    assert status == 3
    assert set(log_tail(tmp_path, lines=5).split()) == {"out", "err"}


def test_a_worker_can_save_when_asked_to_stop(tmp_path: Path) -> None:
    code = (
        "import os, sys, time; os.chdir(sys.argv[1]); print('up', flush=True)\n"
        "while not os.path.exists('stop'): time.sleep(0.05)\nopen('saved', 'w').close()"
    )
    status, _ = run(tmp_path, code, stop=[signal.SIGTERM])
    assert status == 0
    assert (tmp_path / "saved").exists()


def test_a_worker_that_ignores_the_stop_is_killed_after_the_grace_period(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "KILL_AFTER_SECONDS", 2.0)
    status, seconds = run(tmp_path, IGNORES_SIGTERM, stop=[signal.SIGTERM], grace=0.5)
    assert status == 137
    assert 2.5 < seconds < 50
    assert not left(tmp_path)


def test_a_second_ctrl_c_kills_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "KILL_AFTER_SECONDS", PATIENCE)
    status, seconds = run(tmp_path, IGNORES_SIGTERM, stop=[signal.SIGINT, signal.SIGINT])
    assert status == 137
    assert seconds < 50, "no grace period, and no time to terminate"


@pytest.mark.parametrize(
    ("received", "urgent"),
    [
        ([], False),
        ([signal.SIGINT], False),
        ([signal.SIGTERM], False),
        ([signal.SIGTERM, signal.SIGTERM], False),
        ([signal.SIGUSR1, signal.SIGTERM], False),
        ([signal.SIGTERM, signal.SIGINT], True),
        ([signal.SIGINT, signal.SIGINT], True),
    ],
)
def test_stop_requests_count_signals(received: list[signal.Signals], urgent: bool) -> None:
    with StopRequests().installed() as stops:
        for number in received:
            signal.raise_signal(number)
    assert (stops.count, stops.urgent) == (len(received), urgent)
    assert stops.first == (received[0] if received else None)


def test_a_task_with_nothing_to_save_ends_at_once(tmp_path: Path) -> None:
    sleep = "import time; print('up', flush=True); time.sleep(100)"
    status, seconds = run(tmp_path, sleep, stop=[signal.SIGTERM], ask=False)
    assert status == 143
    assert seconds < 50


@pytest.mark.seed("S4-020", "S4-114", "S4-118")
def test_grandchildren_in_sessions_of_their_own_end_too(tmp_path: Path) -> None:
    status, _ = run(tmp_path, f"{NEST}time.sleep(100)", stop=[signal.SIGTERM], ask=False)
    assert status == 143
    assert not left(tmp_path)


def test_children_of_a_process_that_was_killed_end_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the process above the workers dies: they can be found only in our records."""
    monkeypatch.setattr(local.ProcessTree, "REFRESH_SECONDS", 0.0)
    counts: list[int] = []

    def let_it_die() -> None:
        """After a refresh that has seen the children."""
        if counts[-1:] == [3]:
            (tmp_path / "seen").touch()
        counts.append(len(left(tmp_path)))

    status, _ = run(tmp_path, NEST + DIES, on_tick=let_it_die)
    assert status == -9
    assert not left(tmp_path)


def test_deaths_by_signal_are_explained(tmp_path: Path) -> None:
    assert explain_death(tmp_path, 5) is None
    assert "SIGKILL (most often the kernel, out of memory)" in (explain_death(tmp_path, -9) or "")
    log = tmp_path / "worker.log"
    log.write_text("some text\nRank 3 was killed by SIGSEGV.\nmore\n")
    assert explain_death(tmp_path, 139) == "Rank 3 was killed by SIGSEGV."
    assert explain_death(tmp_path, 139, log_from=log.stat().st_size) is None, (
        "deaths of an earlier attempt do not count"
    )


def test_commands_use_this_interpreter(tmp_path: Path) -> None:
    assert task_command("prepare", tmp_path) == [
        sys.executable,
        "-P",
        "-m",
        "pantheraml.worker",
        "prepare",
        str(tmp_path),
    ]
