"""How much a user may keep, and send at a time."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import openai
import pytest

from pantheraml.cli.main import main
from pantheraml.service import Settings, create_app, quota
from tests import toy
from tests.service.conftest import Server, jsonl, wait_until

KIB = 1 << 10
FORM = {"purpose": "user_data"}


@pytest.fixture
def small(own_server: Callable[..., Server]) -> Server:
    """64 KiB for all files of a user, 48 KiB for one."""
    gib = 1 << 30
    return own_server("--max-user-gib", str(64 * KIB / gib), "--max-file-gib", str(48 * KIB / gib))


def send(http: httpx.Client, size: int) -> httpx.Response:
    return http.post("/v1/files", files={"file": ("a", bytes(size))}, data=FORM)


def left_in(server: Server) -> list[str]:
    return [str(path) for name in ("incoming", "uploads") for path in (server.data / name).iterdir()]


def test_files_fit_into_the_quota(small: Server) -> None:
    client = small.client()
    with small.http() as http:
        assert send(http, 48 * KIB + 1).status_code == 413
        first = send(http, 48 * KIB).raise_for_status().json()["id"]
        refused = send(http, 16 * KIB + 1)
        assert refused.status_code == 413, "the limit is what is left"
        send(http, 16 * KIB).raise_for_status()
        full = send(http, 1)
        assert (full.status_code, full.json()["error"]["code"]) == (403, "quota_exceeded")
        assert "65,536 bytes; 0 are left" in full.json()["error"]["message"]
        body = {"model_name": "tiny", "dataset_config": {"texts": ["a"]}}
        assert http.post("/multigpu/training/auto", json=body).json()["error"]["code"] == "quota_exceeded"
        with pytest.raises(openai.PermissionDeniedError, match="0 are left"):
            client.uploads.create(bytes=1, filename="a", mime_type="text/plain", purpose="user_data")
        client.files.delete(first)
        upload = client.uploads.create(bytes=40 * KIB, filename="a", mime_type="text/plain", purpose="user_data")
        assert send(http, 8 * KIB + 1).status_code == 413, "what is announced counts"
        send(http, 8 * KIB).raise_for_status()
        client.uploads.cancel(upload.id)
        send(http, 40 * KIB).raise_for_status()
    assert not left_in(small)


@contextlib.contextmanager
def half_sent(server: Server, size: int | None) -> Iterator[socket.socket]:
    """An upload that has begun. `size`: what it announces; None: nothing."""
    host, port = server.url.removeprefix("http://").split(":")
    length = "Transfer-Encoding: chunked" if size is None else f"Content-Length: {size}"
    form = '--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
    body = f"{len(form):x}\r\n{form}\r\n" if size is None else form
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        head = f"POST /v1/files HTTP/1.1\r\nHost: {host}\r\n{length}\r\n"
        connection.sendall(f"{head}Content-Type: multipart/form-data; boundary=b\r\n\r\n{body}".encode())
        yield connection


@pytest.mark.parametrize("size", [48 * KIB, None])
def test_what_is_on_its_way_counts(small: Server, size: int | None) -> None:
    """Else a user could send the whole quota any number of times at once."""
    with half_sent(small, size), small.http() as http:
        wait_until(lambda: left_in(small))
        assert send(http, 17 * KIB).status_code in (403, 413)
        sent = send(http, 15 * KIB)
        assert sent.status_code == 200, sent.text
    wait_until(lambda: not left_in(small))
    with small.http() as http:
        wait_until(lambda: send(http, 48 * KIB).status_code == 200)


def test_files_that_are_sent_at_a_time(own_server: Callable[..., Server]) -> None:
    server = own_server()
    with contextlib.ExitStack() as stack, server.http() as http:
        for _ in range(32):
            stack.enter_context(half_sent(server, 4 * KIB))
        wait_until(lambda: len(left_in(server)) == 32)
        refused = send(http, 1)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "2")
        assert refused.headers["x-should-retry"] == "true"
        assert http.get("/v1/files").status_code == 200
    wait_until(lambda: not left_in(server))
    with server.http() as http:
        assert send(http, 1).status_code == 200


def test_a_disk_that_cannot_hold_it(own_server: Callable[..., Server]) -> None:
    """The kernel refuses to write as it does on a full disk."""
    server = own_server()
    assert server.process is not None
    with server.http() as http:
        http.get("/v1/models").raise_for_status()
        before = resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (1 << 16, before[1]))
        try:
            full = send(http, 1 << 20)
        finally:
            resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, before)
        assert (full.status_code, full.headers["x-should-retry"]) == (507, "false")
        assert "disk of the service is full" in full.json()["error"]["message"]
        assert not left_in(server)
        send(http, 1 << 20).raise_for_status()
        assert http.get("/readyz").status_code == 200
    assert "Traceback" not in server.stop()


def test_some_of_the_disk_is_kept_free(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask(free: int, size: int) -> httpx.Response:
        app = create_app(Settings(tmp_path / "data", models))
        transport = httpx.ASGITransport(app)
        async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport) as http:
            usage = shutil.disk_usage(tmp_path)._replace(total=100_000_000, free=free)
            monkeypatch.setattr("pantheraml.service.quota.shutil.disk_usage", lambda _: usage)
            files = {"file": ("a", bytes(size))}
            return await http.post("http://localhost/v1/files", files=files, data=FORM)

    for free, size, status in ((1_000_000, 10, 507), (1_200_000, 200_000, 507), (1_200_000, 190_000, 200)):
        answer = asyncio.run(ask(free, size))
        assert answer.status_code == status, answer.text
    monkeypatch.undo()


def test_unfinished_jobs_of_a_user(models: Path, tmp_path: Path) -> None:
    async def ask() -> list[httpx.Response]:
        app = create_app(Settings(tmp_path / "data", models, max_queued_per_user=2))
        transport = httpx.ASGITransport(app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://localhost") as http,
        ):
            name, rows = jsonl(toy.arithmetic(4))
            files = {"file": (name, rows.getvalue())}
            sent = await http.post("/v1/files", files=files, data={"purpose": "fine-tune"})
            body = {"model": "tiny", "training_file": sent.json()["id"], "pantheraml": {"hold": True}}
            keys = [{"Idempotency-Key": str(number)} for number in (1, 2, 3, 2)]
            answers = [await http.post("/v1/fine_tuning/jobs", json=body, headers=key) for key in keys]
            await http.post(f"/v1/fine_tuning/jobs/{answers[0].json()['id']}/cancel")
            answers.append(await http.post("/v1/fine_tuning/jobs", json=body, headers=keys[2]))
            return answers

    one, two, refused, repeated, later = asyncio.run(ask())
    assert [one.status_code, two.status_code, later.status_code] == [200, 200, 200]
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "quota_exceeded")
    assert repeated.json()["id"] == two.json()["id"], "a repeated request is no new job"


def test_folders_of_jobs_count(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a user could fill the disk with checkpoints."""
    monkeypatch.setattr(quota, "_MEASURED_SECONDS", 0.0)
    settings = Settings(tmp_path / "data", models, max_user_bytes=64 * KIB)

    async def check() -> None:
        app = create_app(settings)
        transport = httpx.ASGITransport(app)
        base = "http://localhost/v1"
        async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport) as http:
            name, rows = jsonl(toy.arithmetic(4))
            files = {"file": (name, rows.getvalue())}
            sent = await http.post(f"{base}/files", files=files, data={"purpose": "fine-tune"})
            body = {"model": "tiny", "training_file": sent.json()["id"], "pantheraml": {"hold": True}}
            job = (await http.post(f"{base}/fine_tuning/jobs", json=body)).raise_for_status().json()["id"]
            checkpoint = settings.jobs / job / "run" / "checkpoints" / "step-1"
            checkpoint.mkdir(parents=True)
            (checkpoint / "state").write_bytes(bytes(64 * KIB))
            for answer in (
                await http.post(f"{base}/fine_tuning/jobs", json=body),
                await http.post(f"{base}/files", files={"file": ("a", b"a")}, data=FORM),
            ):
                assert (answer.status_code, answer.json()["error"]["code"]) == (403, "quota_exceeded")
                assert "Delete files, models, or checkpoints of jobs" in answer.json()["error"]["message"]
            place = f"{base}/fine_tuning/jobs/{job}/checkpoints"
            early = await http.delete(place)
            assert (early.status_code, early.json()["error"]["code"]) == (400, "wrong_state")
            await http.post(f"{base}/fine_tuning/jobs/{job}/cancel")
            for _ in range(2):
                assert (await http.delete(place)).raise_for_status().json()["deleted"]
            assert not checkpoint.parent.exists()
            (await http.post(f"{base}/fine_tuning/jobs", json=body)).raise_for_status()

    asyncio.run(check())


@pytest.mark.parametrize("option", ["--max-user-gib", "--max-file-gib"])
@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf"])
def test_limits_that_are_none(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", f"{option}={value}"]) == 2
    assert f"{option} must be a number above 0." in capsys.readouterr().err
