"""`watch`, `report` and `compare` in processes of their own: live runs, terminals, resizing, exit codes, bad input."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pantheraml.base.env import child_environment
from pantheraml.base.errors import NonFiniteError
from pantheraml.base.event_stream import FILE_NAME, EventWriter
from pantheraml.base.events import ErrorRaised, RunFinished, RunStarted, TrainStarted, TrainStep, WarningIssued
from pantheraml.specs.run_dir import LOCK

PATIENCE = 60.0


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pantheraml", *arguments]


def pantheraml(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments), env=child_environment(), capture_output=True, text=True, timeout=PATIENCE, check=False
    )


def step(number: int) -> TrainStep:
    return TrainStep(
        step=number, epoch=number / 10, loss=3.0 / number, learning_rate=1e-4, grad_norm=1.0, tokens=100,
        target_tokens=80, seconds=0.1, tokens_per_second=1000.0 + number, memory_bytes=2**30,
    )  # fmt: skip


@pytest.fixture
def live(tmp_path: Path) -> Iterator[tuple[Path, EventWriter]]:
    """A run at work: its lock is held, as by its supervisor."""
    folder = tmp_path / "live"
    folder.mkdir()
    with open(folder / LOCK, "w") as lock, EventWriter(folder) as emit:
        fcntl.flock(lock, fcntl.LOCK_EX)
        emit(RunStarted(command="train", pantheraml="0.1.0", output=str(folder)))
        emit(TrainStarted(first_step=1, total_steps=20, world_size=1, device="cpu", global_batch_size=4))
        emit(step(1))
        yield folder, emit


@pytest.fixture
def started() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    processes: list[subprocess.Popen[str]] = []

    # A terminal has its own size; COLUMNS of the environment would win over it.
    environment = {key: value for key, value in child_environment().items() if key not in ("COLUMNS", "LINES")}

    def start(*arguments: str, **options: Any) -> subprocess.Popen[str]:
        processes.append(subprocess.Popen(command(*arguments), env=environment, text=True, **options))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.communicate(timeout=PATIENCE)


def test_watch_follows_a_run_to_its_end(live: tuple[Path, EventWriter], started: Callable[..., Any]) -> None:
    folder, emit = live
    process = started("watch", str(folder), "--json", stdout=subprocess.PIPE)
    for _ in range(3):
        last = json.loads(process.stdout.readline())
    assert (last["kind"], last["step"]) == ("train.step", 1)
    emit(step(2))
    assert json.loads(process.stdout.readline())["step"] == 2, "while it runs"
    emit(RunFinished(status="succeeded", seconds=1.0))
    assert json.loads(process.stdout.readline())["kind"] == "run.finished"
    assert process.wait(PATIENCE) == 0


def test_watch_ends_with_the_code_of_the_run(live: tuple[Path, EventWriter]) -> None:
    folder, emit = live
    emit(WarningIssued(message="loss is \x1b[31mred"))
    emit(ErrorRaised.of(NonFiniteError("The loss is nan.", fix="Lower it.")))
    emit(RunFinished(status="failed", seconds=1.0))
    done = pantheraml("watch", str(folder))
    assert done.returncode == NonFiniteError.exit_code
    assert "\x1b" not in done.stdout
    assert "loss is \\x1b[31mred" in done.stdout
    emit(RunFinished(status="stopped", seconds=1.0))
    assert pantheraml("watch", str(folder)).returncode == 130


def test_watch_says_that_nobody_works_on_a_run(live: tuple[Path, EventWriter]) -> None:
    """Its supervisor was killed: the lock is free, and the last event is old."""
    folder, _ = live
    (folder / LOCK).unlink()
    (folder / LOCK).touch()
    lines = (folder / FILE_NAME).read_text().splitlines()
    old = [json.dumps({**json.loads(line), "time": time.time() - 1000}) for line in lines]
    (folder / FILE_NAME).write_text("\n".join(old) + "\n")
    done = pantheraml("watch", str(folder))
    assert done.returncode == 71
    assert "pantheraml resume" in done.stderr


def test_a_reader_that_leaves_ends_watch(live: tuple[Path, EventWriter], started: Callable[..., Any]) -> None:
    folder, emit = live
    process = started("watch", str(folder), "--json", stdout=subprocess.PIPE)
    process.stdout.readline()
    process.stdout.close()
    deadline = time.monotonic() + PATIENCE
    while process.poll() is None and time.monotonic() < deadline:
        emit(step(2))
        time.sleep(0.05)
    assert process.returncode == 0


class Terminal:
    """A terminal of a size, and what was written to it."""

    def __init__(self, columns: int, rows: int) -> None:
        self.master, self.end = pty.openpty()
        self.text = ""
        self.resize(columns, rows)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self.master, 65536)
            except OSError:
                return
            if not data:
                return
            self.text += data.decode(errors="replace")

    def wait_for(self, text: str, since: int = 0) -> None:
        deadline = time.monotonic() + PATIENCE
        while text not in self.text[since:]:
            assert time.monotonic() < deadline, f"{text!r} never came: {self.text[-3000:]!r}"
            time.sleep(0.02)

    def close(self) -> None:
        os.close(self.end)
        self._reader.join(PATIENCE)
        os.close(self.master)


def test_watch_draws_on_a_terminal_and_follows_its_size(
    live: tuple[Path, EventWriter], started: Callable[..., Any]
) -> None:
    folder, emit = live
    terminal = Terminal(120, 40)
    try:
        process = started("watch", str(folder), stdin=terminal.end, stdout=terminal.end, stderr=terminal.end)
        terminal.wait_for("1 of 20")
        terminal.wait_for("1,001")
        seen = len(terminal.text)
        emit(step(2))
        terminal.wait_for("2 of 20", since=seen)
        seen = len(terminal.text)
        terminal.resize(44, 12)
        os.kill(process.pid, signal.SIGWINCH)
        emit(step(3))
        terminal.wait_for("3 of 20", since=seen)
        frame = terminal.text[seen:].rsplit("\x1b[H", 1)[-1]
        lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", frame).split("\n")
        assert 20 < max(len(line.rstrip()) for line in lines) <= 44
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 0, "Ctrl-C leaves the run alone"
        terminal.wait_for("\x1b[?1049l")
    finally:
        terminal.close()


def test_report_goes_where_it_is_told(live: tuple[Path, EventWriter], tmp_path: Path) -> None:
    folder, _ = live
    done = pantheraml("report", str(folder), "--output", str(tmp_path / "page.html"), "--json")
    found = json.loads(done.stdout)
    assert (found["status"], found["final_loss"], found["report"]) == ("running", 3.0, str(tmp_path / "page.html"))
    assert not (folder / "report.html").exists()
    assert pantheraml("report", str(folder)).stdout.splitlines()[0].startswith("running, step 1 of 20")
    assert (folder / "report.html").is_file()


def test_compare_prints_a_table(live: tuple[Path, EventWriter], tmp_path: Path) -> None:
    folder, _ = live
    other = tmp_path / "other"
    other.mkdir()
    (other / FILE_NAME).write_bytes((folder / FILE_NAME).read_bytes())
    done = pantheraml("compare", str(folder), str(other), "--html", str(tmp_path / "c.html"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0].split() == ["live", "other"]
    assert "Not finished: live, other." in done.stdout
    assert (tmp_path / "c.html").is_file()


@pytest.mark.parametrize("name", ["watch", "report", "compare"])
def test_a_folder_without_a_run_is_an_error(name: str, tmp_path: Path) -> None:
    done = pantheraml(name, str(tmp_path))
    assert done.returncode == 9
    assert "fix:" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir()), "nothing is written there"
