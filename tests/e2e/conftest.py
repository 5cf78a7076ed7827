"""The command line, run as users run it: in its own process, checked by output, exit code and files."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from pantheraml.base.env import child_environment
from tests import toy
from tests.event_log import raw_events
from tests.ports import reserved_port

COMMAND = [sys.executable, "-m", "pantheraml.cli.main"]
HERE = Path(__file__).parent
TEST_SECONDS = 900
COMMAND_SECONDS = 300.0
PATIENCE_SECONDS = 200.0
"""For a whole test, for one command, and for something that is about to come. A machine with other work takes ten times
as long as an idle one; where all goes well, generous limits cost nothing."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TEST_SECONDS))


def wait_until(condition: Callable[[], object], *, pause: float = 0.02) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(pause)


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str


@dataclass(frozen=True)
class Playground:
    """A folder with a small model and data, and the command line in it."""

    root: Path
    environment: dict[str, str]
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    @property
    def model(self) -> str:
        return str(self.root / "model")

    @property
    def data(self) -> str:
        return str(self.root / "data.jsonl")

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*COMMAND, *arguments],
            cwd=self.root,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        return process

    def __call__(self, *arguments: str, timeout: float = COMMAND_SECONDS) -> Ended:
        return result_of(self.start(*arguments), timeout=timeout)

    def train(self, output: str, *arguments: str, data: str | None = None) -> Ended:
        """A short run on one CPU process."""
        return self(*self._training(output, data), *arguments)

    def start_training(self, output: str, *arguments: str) -> subprocess.Popen[str]:
        """The same, not waited for."""
        return self.start(*self._training(output, None), *arguments)

    def _training(self, output: str, data: str | None) -> list[str]:
        fixed = ["--model", self.model, "--data", data or self.data, "--output", output, "--device", "cpu"]
        return ["train", *fixed, "--set", "data.seq_len=64", "--set", "train.global_batch_size=4"]

    def processes(self) -> list[psutil.Process]:
        """All processes of this playground, including orphans: found by the cache folder in their environment."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.environ().get("PANTHERAML_CACHE") == self.environment["PANTHERAML_CACHE"]:
                    found.append(process)
        return found

    def wait_for_event(self, run: str, kind: str, count: int = 1) -> None:
        """Wait until a run has written `count` events of this kind."""
        wait_until(lambda: [event["kind"] for event in raw_events(self.root / run)].count(kind) >= count)

    def wait_for_steps(self, run: str) -> None:
        """Wait for the first step."""
        self.wait_for_event(run, "train.step")

    def wait_for_checkpoint(self, run: str) -> None:
        """Wait for a complete checkpoint, even if its event is not written yet."""
        wait_until(lambda: list((self.root / run / "checkpoints").glob("step-*/manifest.json")))


def result_of(process: subprocess.Popen[str], stdin: str | None = None, *, timeout: float = COMMAND_SECONDS) -> Ended:
    """Wait for a command, and return its result."""
    out, err = process.communicate(stdin, timeout=timeout)
    return Ended(process.returncode, out, err)


def workers_of(pid: int) -> list[psutil.Process]:
    """The training ranks below a command line process, without the agent between them."""
    found = []
    for process in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            command = process.cmdline()
            if "pantheraml.worker" in command and "pantheraml.worker.entry" not in command:
                found.append(process)
    return found


@pytest.fixture(scope="session")
def playground(tmp_path_factory: pytest.TempPathFactory) -> Playground:
    root = tmp_path_factory.mktemp("playground")
    toy.write_llama(root / "model")
    toy.write_jsonl(root / "data.jsonl", toy.arithmetic(200))
    environment = child_environment(
        PANTHERAML_CACHE=str(root / "cache"),
        OMP_NUM_THREADS="1",
        OMP_WAIT_POLICY="PASSIVE",  # a run's threads wait asleep: spinning, they take a busy machine four times as long
        HF_HUB_OFFLINE="1",
    )
    return Playground(root, environment)


@pytest.fixture(autouse=True)
def nobody_left(playground: Playground) -> Iterator[None]:
    """Kill what a failed test leaves behind; a test that passes leaves nothing."""
    yield
    _, left = psutil.wait_procs(playground.processes(), timeout=60)  # for those on their way out
    leftover = []
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            leftover.append(" ".join(process.cmdline()))
            process.kill()
    psutil.wait_procs(left, timeout=10)
    for command in playground.started:
        if command.returncode is None:
            print(*command.communicate(), sep="\n")  # shown if the test has failed
    playground.started.clear()
    assert not leftover, "the test left processes behind"


@pytest.fixture
def port() -> Iterator[str]:
    with reserved_port() as number:
        yield str(number)


@pytest.fixture
def failing(playground: Playground) -> Callable[..., str]:
    """Run a training that must fail with this exit code; return its message, which is never a traceback."""

    def fail(code: int, *arguments: str, output: str = "runs/failing", data: str | None = None) -> str:
        ended = playground.train(output, "--set", "train.max_steps=1", *arguments, data=data)
        assert ended.code == code, ended
        assert "Traceback" not in ended.err
        return ended.err

    return fail
