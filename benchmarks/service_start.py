"""How long the service takes to start, and what a large upload costs it: time, memory, and what a broken one leaves."""

from __future__ import annotations

import http.client
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import inputs
import psutil
from priority import set_niceness
from table import Column, Table

TABLE = Table(
    title="The service: start and large uploads",
    how="SQLite. From the command to the first answer; then one file in a multipart request, and one whose connection "
    "breaks in the middle.",
    columns=(
        Column("start", "start_seconds", lambda value: f"{value:.2f} s"),
        Column("CPU time of it", "start_cpu_seconds", lambda value: f"{value:.2f} s"),
        Column("upload", "parameters.mebibytes", lambda value: f"{value} MiB"),
        Column("took", "upload_seconds", lambda value: f"{value:.1f} s"),
        Column("memory before", "memory_before_bytes", lambda value: f"{value / (1 << 20):.0f} MiB"),
        Column("most memory during it", "memory_peak_bytes", lambda value: f"{value / (1 << 20):.0f} MiB"),
        Column("left by a broken one", "broken_leaves_bytes", lambda value: f"{value} bytes"),
        Column("niceness", "parameters.niceness"),
    ),
)
_BLOCK = os.urandom(1 << 20)
_HEAD = (
    b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nuser_data\r\n'
    b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.bin"\r\n\r\n'
)
_END = b"\r\n--b--\r\n"


def run(mebibytes: int = 1024, starts: int = 5, niceness: int = 0) -> dict[str, Any]:
    """`niceness`: of all that takes part, below 0 on a host where others are at work."""
    set_niceness(os.getpid(), niceness)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "models").mkdir()
        inputs.write_model(root / "models" / "m", "tiny")
        began = []
        for number in range(starts):
            with _served(root, f"data-{number}") as (_, seconds, process):
                began.append((seconds, sum(process.cpu_times()[:2])))
        with _served(root, "data") as (url, _, process):
            _upload(url, 1, 1)
            before = _memory(process, "VmRSS")
            begin = time.perf_counter()
            _upload(url, mebibytes, mebibytes)
            seconds = time.perf_counter() - begin
            peak = _memory(process, "VmHWM")
            kept = _bytes_in(root / "data")
            _upload(url, mebibytes, mebibytes // 2)
            left = _settled(root / "data", kept)
    return {
        "parameters": {"mebibytes": mebibytes, "starts": starts, "niceness": niceness},
        "results": {
            "start_seconds": statistics.median(each[0] for each in began),
            "start_cpu_seconds": statistics.median(each[1] for each in began),
            "starts": began,
            "upload_seconds": seconds,
            "memory_before_bytes": before,
            "memory_peak_bytes": peak,
            "broken_leaves_bytes": left,
        },
    }


@contextmanager
def _served(root: Path, data: str) -> Iterator[tuple[str, float, psutil.Process]]:
    """A service: its address, the seconds until its first answer, its process."""
    begin = time.perf_counter()
    command = [sys.executable, "-m", "pantheraml.cli.main", "serve", "--port", "0"]
    server = subprocess.Popen(
        [*command, "--data-dir", str(root / data), "--models-dir", str(root / "models")],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert server.stdout is not None
        url = server.stdout.readline().split()[-1]
        with urllib.request.urlopen(f"{url}/readyz", timeout=60) as answer:
            answer.read()
        yield url, time.perf_counter() - begin, psutil.Process(server.pid)
    finally:
        server.terminate()
        server.communicate(timeout=30)


def _upload(url: str, announced: int, sent: int) -> None:
    """Send a file of as many MiB as announced, or hang up before."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=300)
    connection.putrequest("POST", "/v1/files")
    connection.putheader("Content-Type", "multipart/form-data; boundary=b")
    connection.putheader("Content-Length", str(len(_HEAD) + (announced << 20) + len(_END)))
    connection.endheaders(_HEAD)
    for _ in range(sent):
        connection.send(_BLOCK)
    if sent == announced:
        connection.send(_END)
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        answer.read()
    connection.close()


def _memory(process: psutil.Process, field: str) -> int:
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(field))) << 10


def _bytes_in(data: Path) -> int:
    """Of uploaded content, whole or not."""
    folders = (data / "files", data / "incoming", data / "uploads")
    return sum(path.stat().st_size for folder in folders for path in folder.iterdir())


def _settled(data: Path, kept: int) -> int:
    """Bytes beside those that were kept, as soon as there are none, or after a while."""
    deadline = time.monotonic() + 10
    while (left := _bytes_in(data) - kept) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left
