"""Supervision with real processes; what they run is a few lines of Python instead of a training."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from pantheraml.launch.local import StopRequests, explain_death, log_tail, run_workers, task_command

DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(100)"
NEST = """
import subprocess, sys, time
sleep = [sys.executable, "-c", "import time; time.sleep(100)"]
children = [subprocess.Popen(sleep, start_new_session=True) for _ in range(2)]
print("ready", flush=True)
time.sleep(100)
"""


def run(
    folder: Path,
    code: str,
    *,
    stop_after: float | None = None,
    signals: Sequence[signal.Signals] = (signal.SIGTERM,),
    ask: bool = True,
    grace: float = 5,
) -> tuple[int, float]:
    stops = StopRequests()
    begin = time.monotonic()

    def tick() -> None:
        if stop_after is not None and time.monotonic() - begin > stop_after and not stops.count:
            for number in signals:
                stops.receive(number)

    status = run_workers(
        [sys.executable, "-c", code],
        folder,
        environment={"PATH": "/usr/bin:/bin", "PYTHONUNBUFFERED": "1"},
        stops=stops,
        ask_to_stop=(folder / "stop").touch if ask else None,
        grace_seconds=grace,
        on_tick=tick,
    )
    return status, time.monotonic() - begin


def test_output_goes_to_the_log_and_the_status_comes_back(tmp_path: Path) -> None:
    status, _ = run(tmp_path, "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)")
    assert status == 3
    assert set(log_tail(tmp_path, lines=5).split()) == {"out", "err"}


def test_a_worker_that_is_asked_to_stop_may_finish(tmp_path: Path) -> None:
    code = "import os, time\nwhile not os.path.exists('stop'): time.sleep(0.05)\nopen('saved', 'w').close()"
    status, _ = run(tmp_path, f"import os; os.chdir({str(tmp_path)!r})\n{code}", stop_after=0.3)
    assert status == 0
    assert (tmp_path / "saved").exists()


def test_a_worker_that_does_not_listen_is_killed_after_its_grace(tmp_path: Path) -> None:
    status, seconds = run(tmp_path, DEAF, stop_after=0.5, grace=0.5)
    assert status == 137
    assert seconds < 20


def test_a_second_ctrl_c_waits_for_nobody(tmp_path: Path) -> None:
    status, seconds = run(tmp_path, DEAF, stop_after=0.5, signals=[signal.SIGINT, signal.SIGINT], grace=60)
    assert status == 137
    assert seconds < 8, "without a grace period, and without time to part"


@pytest.mark.parametrize(
    ("received", "interrupted", "urgent"),
    [
        ([], False, False),
        ([signal.SIGINT], True, False),
        ([signal.SIGTERM], False, False),
        ([signal.SIGTERM, signal.SIGTERM], False, False),
        ([signal.SIGTERM, signal.SIGINT], False, True),
        ([signal.SIGINT, signal.SIGINT], True, True),
    ],
)
def test_who_asks_to_stop_and_how(received: list[signal.Signals], interrupted: bool, urgent: bool) -> None:
    stops = StopRequests()
    for number in received:
        stops.receive(number)
    assert (stops.count, stops.interrupted, stops.urgent) == (len(received), interrupted, urgent)


def test_a_task_with_nothing_to_save_ends_at_once(tmp_path: Path) -> None:
    status, seconds = run(tmp_path, "import time; time.sleep(100)", stop_after=0.2, ask=False)
    assert status == 143
    assert seconds < 5


def test_grandchildren_in_sessions_of_their_own_end_too(tmp_path: Path) -> None:
    before = {p.pid for p in psutil.Process().children(recursive=True)}
    run(tmp_path, NEST, stop_after=1.0, ask=False)
    assert "ready" in log_tail(tmp_path, lines=1)
    assert {p.pid for p in psutil.Process().children(recursive=True)} <= before
    assert not [p for p in psutil.process_iter(["cmdline"]) if "time.sleep(100)" in " ".join(p.info["cmdline"] or [])]


def test_children_of_a_process_that_was_killed_end_too(tmp_path: Path) -> None:
    """As when the elastic agent dies: nothing leads to its workers any more but our memory."""
    status, _ = run(tmp_path, NEST.replace("time.sleep(100)\n", "time.sleep(2); import os; os.kill(os.getpid(), 9)\n"))
    assert status == -9
    assert not [p for p in psutil.process_iter(["cmdline"]) if "time.sleep(100)" in " ".join(p.info["cmdline"] or [])]


def test_deaths_by_signal_are_explained(tmp_path: Path) -> None:
    assert explain_death(tmp_path, 5) is None
    assert "SIGKILL (most often the kernel, out of memory)" in (explain_death(tmp_path, -9) or "")
    log = tmp_path / "worker.log"
    log.write_text("some text\nRank 3 was killed by SIGSEGV.\nmore\n")
    assert explain_death(tmp_path, 139) == "Rank 3 was killed by SIGSEGV."
    assert explain_death(tmp_path, 139, log_from=log.stat().st_size) is None, (
        "an earlier start's death is not this one's"
    )


def test_commands_use_this_interpreter(tmp_path: Path) -> None:
    assert task_command("prepare", tmp_path) == [sys.executable, "-m", "pantheraml.worker", "prepare", str(tmp_path)]
