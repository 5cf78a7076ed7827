"""The service under load: a steady stream of mixed reads and live readers, beside a long queue and a job that trains.

Requests are sent when they are due, not when the one before was answered, and their latency counts from then: a service
that stalls is not spared the requests of that time. Training is measured alone, under load, and alone again.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import inputs
from table import Column, Table, milliseconds, percent

TABLE = Table(
    title="The service: reads beside a long queue and a job that trains",
    how="SQLite; the client is one process on the same host and shares its cores with the service and the job.",
    columns=(
        Column("phase", "phase"),
        Column("reads/s asked", "asked_per_second"),
        Column("answered", "answered_per_second", lambda value: f"{value:.0f}"),
        Column("failed", "failed"),
        Column("median", "median_seconds", milliseconds),
        Column("p99", "p99_seconds", milliseconds),
        Column("training speed kept", "training_share", lambda value: "" if value is None else percent(value)),
        Column("queued jobs", "parameters.jobs"),
        Column("live readers", "parameters.readers"),
    ),
)
MIX = (
    (40, "/v1/fine_tuning/jobs/{job}"),
    (20, "/v1/fine_tuning/jobs/{job}/events?limit=20"),
    (15, "/v1/fine_tuning/jobs?limit=20"),
    (10, "/v1/models"),
    (10, "/healthz"),
    (5, "/v1/overview"),
)
"""Shares of the reads, in percent."""
CONNECTIONS = 64
LATE_SECONDS = 20.0
"""What is not answered so long after the last request was due has failed."""
_WAIT_SECONDS = 300.0


def run(
    jobs: int = 2000, readers: int = 200, reads_per_second: int = 500, seconds: float = 20.0, seed: int = 0
) -> dict[str, Any]:
    parameters = {
        "jobs": jobs,
        "readers": readers,
        "reads_per_second": reads_per_second,
        "seconds": seconds,
        "connections": CONNECTIONS,
    }
    with tempfile.TemporaryDirectory() as folder:
        data, models = Path(folder) / "data", Path(folder) / "models"
        data.mkdir(mode=0o700)
        models.mkdir()
        inputs.write_model(models / "m", "tiny")
        asyncio.run(_fill(data, jobs))
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
            rows = asyncio.run(_phases(url, readers, reads_per_second, seconds, random.Random(seed)))
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
                id=_name(number),
                owner="local" if number < jobs // 4 else "another",
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


def _name(number: int) -> str:
    return f"ftjob-{number:024d}"


async def _phases(url: str, readers: int, rate: int, seconds: float, rng: random.Random) -> list[dict[str, Any]]:
    alone = await _load(url, [_name(0)], rate, seconds, rng)
    job = await asyncio.to_thread(_train, url)
    speeds = []
    rows = [{"phase": "no job trains", **alone, "training_share": None}]
    for loaded in (False, True, False):
        before = await asyncio.to_thread(_trained, url, job)
        begin = time.perf_counter()
        if loaded:
            streams = [asyncio.create_task(_follow(url, job)) for _ in range(readers)]
            measured = await _load(url, [job, _name(0), _name(1)], rate, seconds, rng)
            for stream in streams:
                stream.cancel()
            told = await asyncio.gather(*streams, return_exceptions=True)
            broken = sum(isinstance(each, OSError) for each in told)
            rows.append({"phase": "a job trains", **measured, "broken_readers": broken})
        else:
            await asyncio.sleep(seconds)
        elapsed = time.perf_counter() - begin
        speeds.append((await asyncio.to_thread(_trained, url, job) - before) / elapsed)
    rows[-1]["training_share"] = speeds[1] / statistics.fmean((speeds[0], speeds[2]))
    rows[-1]["training_speeds"] = speeds
    await asyncio.to_thread(_ask, url, f"/v1/fine_tuning/jobs/{job}/cancel", {})
    return rows


def _ask(url: str, path: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def _train(url: str) -> str:
    """Start a job on the one slot, and wait until it trains."""
    from pantheraml.client import Client, Submission

    with tempfile.TemporaryDirectory() as folder, Client(url) as client:
        rows = Path(folder) / "rows.jsonl"
        rng = random.Random(0)
        words = (" ".join(f"t{rng.randrange(3, 500)}" for _ in range(200)) for _ in range(64))
        rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in words))
        wanted = Submission(
            model="m",
            training_file=client.files.upload(rows).id,
            epochs=10_000,
            batch_size=16,
            processes=1,
            priority=100,
        )
        job = client.jobs.submit(wanted).id
        deadline = time.monotonic() + _WAIT_SECONDS
        while _trained(url, job) < 20:
            assert time.monotonic() < deadline, client.jobs.get(job)
            time.sleep(0.5)
        return job


def _trained(url: str, job: str) -> float:
    """Steps so far, and the share of the next one by its moment: the newest steps are told with a delay of a tick."""
    series = _ask(url, f"/v1/fine_tuning/jobs/{job}/series?points=2")
    return float(max(series["steps"], default=0))


async def _follow(url: str, job: str) -> None:
    """Read the live stream of a job until cancelled."""
    reader, writer = await _connect(url)
    try:
        writer.write(_request(url, f"/v1/fine_tuning/jobs/{job}/stream"))
        while await reader.read(1 << 16):
            pass
        raise ConnectionError("the stream ended")
    finally:
        writer.close()


async def _connect(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    parts = urlsplit(url)
    return await asyncio.open_connection(parts.hostname, parts.port)


def _request(url: str, path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: {urlsplit(url).netloc}\r\n\r\n".encode()


async def _load(url: str, jobs: list[str], rate: int, seconds: float, rng: random.Random) -> dict[str, Any]:
    """Send reads at a steady rate."""
    paths = rng.choices([path for _, path in MIX], [share for share, _ in MIX], k=int(rate * seconds))
    due: asyncio.Queue[tuple[float, str]] = asyncio.Queue()
    latencies: list[float] = []
    failed = 0

    async def work() -> None:
        nonlocal failed
        reader, writer = await _connect(url)
        try:
            while True:
                moment, path = await due.get()
                writer.write(_request(url, path))
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
                await reader.readexactly(int(length.partition(b":")[2]))
                failed += not head.startswith(b"HTTP/1.1 200")
                latencies.append(time.perf_counter() - moment)
                due.task_done()
        finally:
            writer.close()

    workers = [asyncio.create_task(work()) for _ in range(CONNECTIONS)]
    begin = time.perf_counter()
    names = itertools.cycle(jobs)
    for number, path in enumerate(paths):
        moment = begin + number / rate
        await asyncio.sleep(max(0.0, moment - time.perf_counter()))
        due.put_nowait((moment, path.format(job=next(names))))
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(due.join(), LATE_SECONDS)
    elapsed = time.perf_counter() - begin
    for worker in workers:
        worker.cancel()
    await asyncio.gather(*workers, return_exceptions=True)
    latencies.sort()
    return {
        "asked_per_second": rate,
        "answered_per_second": len(latencies) / elapsed,
        "failed": failed + len(paths) - len(latencies),
        "median_seconds": statistics.median(latencies),
        "p99_seconds": latencies[int(0.99 * len(latencies))],
    }
