"""Files in parts, as `client.uploads.upload_file_chunked` sends them: order, checksums, limits, nothing left over."""

from __future__ import annotations

import hashlib
import io
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from tests import toy
from tests.service.conftest import Server, jsonl, wait_until
from tests.service.test_service_security import keys

MIB = 1 << 20


@pytest.fixture
def content() -> bytes:
    return jsonl(toy.arithmetic(40))[1].getvalue()


def pending(client: OpenAI, content: bytes, **changes: Any) -> Any:
    settings = {"bytes": len(content), "filename": "a.jsonl", "mime_type": "application/jsonl", "purpose": "fine-tune"}
    return client.uploads.create(**{**settings, **changes})


def part(client: OpenAI, upload: Any, content: bytes) -> str:
    sent = client.uploads.parts.create(upload.id, data=("part", io.BytesIO(content)))
    assert (sent.object, sent.upload_id) == ("upload.part", upload.id)
    return sent.id


def parts_on_disk(server: Server) -> list[Path]:
    return list((server.data / "uploads").iterdir())


def test_a_chunked_file(client: OpenAI, server: Server, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    done = client.uploads.upload_file_chunked(
        file=path,
        mime_type="application/jsonl",
        purpose="fine-tune",
        part_size=300,
        md5=hashlib.md5(content, usedforsecurity=False).hexdigest(),
    )
    assert (done.status, done.filename) == ("completed", "rows.jsonl")
    assert done.file is not None
    assert (done.file.status, done.file.rows, done.file.bytes) == ("processed", 40, len(content))  # type: ignore[attr-defined]
    assert client.files.content(done.file.id).read() == content
    assert not parts_on_disk(server)


def test_the_asynchronous_client(server: Server, content: bytes) -> None:
    async def upload() -> Any:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any") as client:
            return await client.uploads.upload_file_chunked(
                file=content, filename="b.jsonl", bytes=len(content), mime_type="text/plain", purpose="fine-tune"
            )

    assert anyio.run(upload).file.filename == "b.jsonl"


def test_the_order_is_that_of_complete(client: OpenAI) -> None:
    upload = pending(client, b"abc", purpose="user_data", expires_after={"anchor": "created_at", "seconds": 3600})
    third, first, second = (part(client, upload, each) for each in (b"c", b"a", b"b"))
    done = client.uploads.complete(upload.id, part_ids=[first, second, third])
    assert client.files.content(done.file.id).read() == b"abc"
    assert done.file.expires_at - done.file.created_at in (3599, 3600, 3601)
    again = client.uploads.complete(upload.id, part_ids=[first, second, third])
    assert again.file == done.file, "a repeated request makes no second file"
    with pytest.raises(openai.BadRequestError, match="upload is completed"):
        part(client, upload, b"d")


def test_what_does_not_fit_is_refused_and_may_be_mended(client: OpenAI, server: Server) -> None:
    upload = pending(client, b"abcd", purpose="user_data")
    one, two = part(client, upload, b"ab"), part(client, upload, b"xx")
    for part_ids, words in (([one], "2 bytes; 4"), ([one, one], "twice"), ([one, "part-0"], "part-0 is not a part")):
        with pytest.raises(openai.BadRequestError, match=words):
            client.uploads.complete(upload.id, part_ids=part_ids)
    right = hashlib.md5(b"abcd", usedforsecurity=False).hexdigest()
    with pytest.raises(openai.BadRequestError, match="have the MD5"):
        client.uploads.complete(upload.id, part_ids=[one, two], md5=right)
    three = part(client, upload, b"cd")
    assert client.uploads.complete(upload.id, part_ids=[one, three], md5=right).file.bytes == 4
    assert not parts_on_disk(server)
    assert not list((server.data / "incoming").iterdir())


def test_wrong_rows_are_refused_at_the_end(client: OpenAI, server: Server) -> None:
    before = sorted((server.data / "files").iterdir())
    upload = pending(client, b'{"text": 1}')
    sent = part(client, upload, b'{"text": 1}')
    with pytest.raises(openai.BadRequestError, match="Line 1, field `text`") as caught:
        client.uploads.complete(upload.id, part_ids=[sent])
    assert caught.value.code == "invalid_file_format"
    assert client.uploads.cancel(upload.id).status == "cancelled"
    assert client.uploads.cancel(upload.id).status == "cancelled"
    assert not parts_on_disk(server)
    assert sorted((server.data / "files").iterdir()) == before
    with pytest.raises(openai.BadRequestError, match="upload is cancelled"):
        client.uploads.complete(upload.id, part_ids=[sent])


def test_limits(client: OpenAI, server: Server) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        pending(client, b"", bytes=1 << 40)
    assert caught.value.status_code == 413
    for wrong in ({"purpose": "vision"}, {"bytes": 0}, {"filename": "../a"}):
        with pytest.raises(openai.BadRequestError):
            pending(client, b"a", **wrong)
    with pytest.raises(openai.NotFoundError):
        client.uploads.parts.create("upload-0", data=b"a")
    upload = pending(client, b"a", purpose="user_data")
    with pytest.raises(openai.APIStatusError) as caught:
        part(client, upload, bytes(64 * MIB + 1))
    assert caught.value.status_code == 413
    client.uploads.cancel(upload.id)
    assert not parts_on_disk(server)


def test_a_broken_part_leaves_nothing(client: OpenAI, server: Server) -> None:
    upload = pending(client, b"a", purpose="user_data")
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        head = (
            f"POST /v1/uploads/{upload.id}/parts HTTP/1.1\r\nHost: {host}\r\nContent-Length: 900000\r\n"
            "Content-Type: multipart/form-data; boundary=b\r\n\r\n"
            '--b\r\nContent-Disposition: form-data; name="data"; filename="a"\r\n\r\n'
        )
        connection.sendall(head.encode() + b"x" * 300_000)
        wait_until(lambda: list((server.data / "incoming").iterdir()))
    wait_until(lambda: not list((server.data / "incoming").iterdir()))
    assert not parts_on_disk(server)
    client.uploads.cancel(upload.id)


def test_others_do_not_see_it(own_server: Callable[..., Server], tmp_path: Path) -> None:
    made = [keys(tmp_path / "data", "create", user, "--scope", "submit")["key"] for user in ("ann", "bob")]
    server = own_server()
    ann, bob = map(server.client, made)
    upload = pending(ann, b"a", purpose="user_data")
    for call in (
        lambda: part(bob, upload, b"a"),
        lambda: bob.uploads.complete(upload.id, part_ids=["part-0"]),
        lambda: bob.uploads.cancel(upload.id),
    ):
        with pytest.raises(openai.NotFoundError):
            call()


def _peak(server: Server) -> int:
    """Most memory that the service ever had."""
    assert server.process is not None
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))) << 10


@pytest.mark.parametrize("size", [64 * MIB, pytest.param(1024 * MIB, marks=pytest.mark.extended)])
def test_memory_stays_flat(own_server: Callable[..., Server], tmp_path: Path, size: int) -> None:
    server = own_server()
    client = server.client()
    client.uploads.upload_file_chunked(
        file=b"x" * 1000, filename="a", bytes=1000, mime_type="text/plain", purpose="user_data"
    )
    path = tmp_path / "large.bin"
    with open(path, "wb") as file:
        block = os.urandom(MIB)
        for _ in range(size // MIB):
            file.write(block)
    before = _peak(server)
    done = client.uploads.upload_file_chunked(
        file=path, mime_type="text/plain", purpose="user_data", part_size=min(size, 64 * MIB) // 2
    )
    assert done.file is not None
    assert done.file.bytes == size
    assert _peak(server) - before < 24 * MIB
    assert (server.data / "files" / done.file.id).stat().st_size == size
    assert not parts_on_disk(server)
