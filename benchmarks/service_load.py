"""The service under load: a steady stream of mixed reads and live readers, beside a long queue and a job that trains.

Requests are sent when they are due, not when the one before was answered, and their latency counts from then: a service
that stalls is not spared the requests of that time. Windows with and without load alternate, and each loaded one is
compared with its neighbors, so that what else the host does falls on both.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import inputs
import psutil
from priority import set_niceness
from table import Column, Table, milliseconds, percent

TABLE = Table(
    title="The service: reads beside a long queue and a job that trains",
    how="SQLite. A job trains on one of two CPU slots, and so on half of the cores; the client is one process on the "
    "same host, on the other half, where it competes with the service. Medians over windows, worst p99 beside.",
    columns=(
        Column("reads/s asked", "asked_per_second"),
        Column("answered", "answered_per_second", lambda value: f"{value:.0f}"),
        Column("failed", "failed"),
        Column("median", "median_seconds", milliseconds),
        Column("p99", "p99_seconds", milliseconds),
        Column("worst p99", "worst_p99_seconds", milliseconds),
        Column("training speed kept", "training_share", percent),
        Column("CPU of the service", "service_cores", lambda value: f"{value:.2f} cores"),
        Column("queued jobs", "parameters.jobs"),
        Column("live readers", "parameters.readers"),
        Column("niceness", "parameters.niceness"),
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
_SETTLE_SECONDS = 3.0


def run(
    jobs: int = 2000,
    readers: int = 200,
    reads_per_second: int = 500,
    seconds: float = 10.0,
    windows: int = 3,
    niceness: int = 0,
    seed: int = 0,
) -> dict[str, Any]:
    """`niceness`: of all that takes part, below 0 on a host where others are at work."""
    parameters = {
        "jobs": jobs,
        "readers": readers,
        "reads_per_second": reads_per_second,
        "seconds": seconds,
        "windows": windows,
        "connections": CONNECTIONS,
        "niceness": niceness,
    }
    set_niceness(os.getpid(), niceness)
    cores = psutil.Process().cpu_affinity()
    with tempfile.TemporaryDirectory() as folder:
        data, models = Path(folder) / "data", Path(folder) / "models"
        models.mkdir()
        inputs.write_model(models / "m", "tiny")
        server = subprocess.Popen(
            [
                *(sys.executable, "-m", "pantheraml.cli.main", "serve", "--port", "0", "--cpu-slots", "2"),
                *("--data-dir", str(data), "--models-dir", str(models)),
                *("--requests-per-minute", str(100 * reads_per_second)),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        try:
            assert server.stdout is not None
            service = Service(server.stdout.readline().split()[-1], psutil.Process(server.pid), data)
            rows = _measure(service, jobs, Load(readers, reads_per_second, seconds), windows, random.Random(seed))
        finally:
            server.terminate()
            server.communicate(timeout=30)
            _end_jobs(data)
            psutil.Process().cpu_affinity(cores)
    return {"parameters": parameters, "results": rows}


@dataclass(frozen=True)
class Service:
    url: str
    process: psutil.Process
    data: Path

    def cpu_seconds(self) -> float:
        return sum(self.process.cpu_times()[:2])

    def step_times(self, job: str) -> list[float]:
        """When each step of a job ended, by its events."""
        lines = (self.data / "jobs" / job / "run" / "events.jsonl").read_bytes().splitlines()
        return [
            json.loads(line)["time"] for line in lines if b'"kind":"train.step"' in line[:200] and line[-1:] == b"}"
        ]


@dataclass(frozen=True)
class Load:
    readers: int
    reads_per_second: int
    seconds: float


def _measure(service: Service, jobs: int, load: Load, windows: int, rng: random.Random) -> dict[str, Any]:
    job = _train(service)
    for process in _processes_of(service.data):  # their sessions are their own
        set_niceness(process.pid, os.getpriority(os.PRIO_PROCESS, 0))
    try:
        asyncio.run(_fill(service.data, jobs))
        time.sleep(_SETTLE_SECONDS)
        spans, measured = [], []
        for loaded in [False, *itertools.chain.from_iterable([(True, False)] * windows)]:
            if loaded:
                span, found = asyncio.run(_window(service, job, load, rng))
                measured.append(found)
            else:
                begin = time.time()
                time.sleep(load.seconds)
                span = (begin, time.time())
            spans.append(span)
        times = service.step_times(job)
        speeds = [sum(begin <= moment < end for moment in times) / (end - begin) for begin, end in spans]
        for number, found in enumerate(measured):
            before, during, after = speeds[2 * number : 2 * number + 3]
            found["training_share"] = during / statistics.fmean((before, after))
    finally:
        _ask(service.url, f"/v1/fine_tuning/jobs/{job}/cancel", {})
        time.sleep(_SETTLE_SECONDS)
    names = ("answered_per_second", "median_seconds", "p99_seconds", "service_cores", "training_share")
    return {
        "asked_per_second": load.reads_per_second,
        **{name: statistics.median(found[name] for found in measured) for name in names},
        "worst_p99_seconds": max(found["p99_seconds"] for found in measured),
        "failed": sum(found["failed"] for found in measured),
        "broken_readers": sum(found["broken_readers"] for found in measured),
        "steps_per_second": speeds,
        "windows": measured,
    }


def _end_jobs(data: Path) -> None:
    """End what a service that was stopped early has left running."""
    for process in _processes_of(data):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _processes_of(data: Path) -> list[psutil.Process]:
    """Of the jobs of a data folder."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get("PANTHERAML_CACHE") == str((data / "cache").resolve()):
                found.append(process)
    return found


async def _fill(data: Path, jobs: int) -> None:
    """Queue jobs that need both slots, one of which is held, so that none starts."""
    from pantheraml.service.jobs.states import State
    from pantheraml.service.store.database import Database
    from pantheraml.service.store.jobs import add_job, move
    from pantheraml.service.store.tables import Job

    database = Database(f"sqlite+aiosqlite:///{data / 'service.db'}")
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


async def _window(
    service: Service, job: str, load: Load, rng: random.Random
) -> tuple[tuple[float, float], dict[str, Any]]:
    """From when to when, and what was measured."""
    streams = [asyncio.create_task(_follow(service.url, job)) for _ in range(load.readers)]
    await asyncio.sleep(_SETTLE_SECONDS)  # they first read what the job has told up to now
    begin, used = time.time(), service.cpu_seconds()
    measured = await _load(service.url, [job, _name(0), _name(1)], load.reads_per_second, load.seconds, rng)
    span = begin, time.time()
    measured["service_cores"] = (service.cpu_seconds() - used) / (span[1] - span[0])
    for stream in streams:
        stream.cancel()
    told = await asyncio.gather(*streams, return_exceptions=True)
    return span, {**measured, "broken_readers": sum(isinstance(each, OSError) for each in told)}


def _ask(url: str, path: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def _train(service: Service) -> str:
    """Start a job on one of the slots, wait until it trains, and keep off its cores."""
    from pantheraml.client import Client, Submission

    with tempfile.TemporaryDirectory() as folder, Client(service.url) as client:
        rows = Path(folder) / "rows.jsonl"
        rng = random.Random(0)
        words = (" ".join(f"t{rng.randrange(3, 500)}" for _ in range(200)) for _ in range(64))
        rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in words))
        wanted = Submission(
            model="m", training_file=client.files.upload(rows).id, epochs=10_000, batch_size=16, processes=1, priority=0
        )
        job = client.jobs.submit(wanted).id
        deadline = time.monotonic() + _WAIT_SECONDS
        while client.jobs.get(job).state != "running" or len(service.step_times(job)) < 20:
            assert time.monotonic() < deadline, client.jobs.get(job)
            time.sleep(0.5)
    request = json.loads((service.data / "jobs" / job / "request.json").read_text())
    others = {*psutil.Process().cpu_affinity()} - {*request["cores"]}
    if others:
        psutil.Process().cpu_affinity(sorted(others))
    return job


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
