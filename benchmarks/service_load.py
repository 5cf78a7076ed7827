"""Reads of the service over keep-alive connections while thousands of jobs wait in its queue."""

from __future__ import annotations

import asyncio
import http.client
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from table import Column, Table, milliseconds

TABLE = Table(
    title="The service: reads beside a long queue",
    how="SQLite; the clients are threads of one Python process on the same host, and share its cores.",
    columns=(
        Column("path", "path"),
        Column("requests/s", "requests_per_second"),
        Column("median", "median_seconds", milliseconds),
        Column("p99", "p99_seconds", milliseconds),
        Column("start", "start_seconds", milliseconds),
        Column("queued jobs", "parameters.jobs"),
        Column("connections", "parameters.connections"),
    ),
)
FIRST = f"ftjob-{0:024d}"
PATHS = ("/healthz", f"/v1/fine_tuning/jobs/{FIRST}", "/v1/fine_tuning/jobs?limit=20")


def run(jobs: int = 2000, connections: int = 4, requests: int = 500) -> dict[str, Any]:
    parameters = {"jobs": jobs, "connections": connections, "requests": requests}
    with tempfile.TemporaryDirectory() as folder:
        data, models = Path(folder) / "data", Path(folder) / "models"
        data.mkdir(mode=0o700)
        models.mkdir()
        asyncio.run(_fill(data, jobs))
        begin = time.perf_counter()
        server = subprocess.Popen(
            [
                *(sys.executable, "-m", "pantheraml.cli.main", "serve", "--port", "0", "--cpu-slots", "1"),
                *("--data-dir", str(data), "--models-dir", str(models)),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        try:
            assert server.stdout is not None
            url = server.stdout.readline().split()[-1]
            start = time.perf_counter() - begin
            rows = [
                {"path": path, "start_seconds": start, **_measure(url, path, connections, requests)} for path in PATHS
            ]
        finally:
            server.terminate()
            server.communicate(timeout=30)
    return {"parameters": parameters, "results": rows}


async def _fill(data: Path, jobs: int) -> None:
    """Queue jobs that need two slots of the one there is, so that none starts."""
    from pantheraml.service.jobs.states import State
    from pantheraml.service.store.database import Database
    from pantheraml.service.store.jobs import add_job, move
    from pantheraml.service.store.tables import Job

    database = Database(f"sqlite+aiosqlite:///{data / 'service.db'}")
    await database.migrate()
    async with database.write() as session:
        for number in range(jobs):
            job = Job(
                id=f"ftjob-{number:024d}",
                owner="local",
                model="m",
                training_file="file-1",
                seed=0,
                hyperparameters={},
                config={"as long as": "x" * 3000},
                plan={"as long as": "x" * 2000},
                processes=2,
                device="cpu",
                created_at=time.time(),
                result_files=[],
            )
            await add_job(session, job)
            await move(session, job, State.QUEUED, "Files validated, job queued", queued_at=time.time())
    await database.close()


def _measure(url: str, path: str, connections: int, requests: int) -> dict[str, float]:
    seconds: list[float] = []

    def read() -> None:
        connection = http.client.HTTPConnection(urlsplit(url).netloc)
        for _ in range(requests):
            begin = time.perf_counter()
            connection.request("GET", path)
            answer = connection.getresponse()
            answer.read()
            assert answer.status == 200, answer.status
            seconds.append(time.perf_counter() - begin)
        connection.close()

    threads = [threading.Thread(target=read) for _ in range(connections)]
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wall = time.perf_counter() - begin
    seconds.sort()
    return {
        "requests_per_second": len(seconds) / wall,
        "median_seconds": seconds[len(seconds) // 2],
        "p99_seconds": seconds[int(0.99 * len(seconds))],
    }
