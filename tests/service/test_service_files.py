"""Files: upload, validation with line and reason, limits, pages, and nothing left of a broken upload."""

from __future__ import annotations

import io
import json
import socket
import time
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI

from tests import toy
from tests.service.conftest import Server, jsonl, wait_until


def bad_request(client: OpenAI, content: bytes, purpose: Any = "fine-tune") -> openai.APIStatusError:
    with pytest.raises(openai.BadRequestError) as caught:
        client.files.create(file=("rows.jsonl", io.BytesIO(content)), purpose=purpose)
    return caught.value


def test_a_file_goes_in_and_comes_out(client: OpenAI, server: Server) -> None:
    name, content = jsonl(toy.arithmetic(12), name="../../etc/ümläut.jsonl")
    file = client.files.create(file=(name, content), purpose="fine-tune")
    assert (file.object, file.status, file.rows, file.purpose) == ("file", "processed", 12, "fine-tune")  # type: ignore[attr-defined]
    assert file.filename == "ümläut.jsonl", "a name is shown, and no more"
    assert client.files.retrieve(file.id) == file
    assert client.files.content(file.id).read() == content.getvalue()
    with server.http() as http:
        for asked, status in (("rows=1-2", 400), ("bytes", 400), ("bytes=9-3", 400), ("bytes=9999999-", 416)):
            refused = http.get(f"/v1/files/{file.id}/content", headers={"Range": asked})
            error = refused.json()["error"]
            assert (refused.status_code, error["param"], error["code"]) == (status, "Range", "invalid_range")
            assert ("content-range" in refused.headers) == (status == 416)
        part = http.get(f"/v1/files/{file.id}/content", headers={"Range": "bytes=3-9"})
        assert (part.status_code, part.content) == (206, content.getvalue()[3:10])
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)
    assert not list((server.data / "files").glob(f"{file.id}*"))


def test_pages_of_files(client: OpenAI) -> None:
    made = [client.files.create(file=(f"{i}.txt", io.BytesIO(b"x")), purpose="user_data").id for i in range(5)]
    newest = [file.id for file in client.files.list(limit=2, purpose="user_data")]  # the client follows the pages
    assert newest[:5] == made[::-1]
    oldest = client.files.list(limit=2, purpose="user_data", order="asc")
    assert (oldest.data[0].id, oldest.has_more) == (newest[-1], True)
    for name in made:
        client.files.delete(name)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{", "Line 3: expected a JSON object, found"),
        (b"[1]", "Line 3: expected a JSON object, found"),
        (b'{"prompt": "a"}', "Line 3, field `completion`: expected the field `completion`"),
        (b'{"prompt": 3, "completion": "b"}', "Line 3, field `prompt`: expected a string, found the number 3"),
        (b'{"prompt": "a", "completion": ""}', "Line 3, field `completion`: expected text, found nothing"),
        (b'{"prompt": "\xff", "completion": "b"}', "Line 3: expected UTF-8 text, found byte 0xff"),
    ],
)
def test_a_wrong_row_is_refused_with_its_line_and_the_reason(client: OpenAI, line: bytes, reason: str) -> None:
    err = bad_request(client, b'{"prompt": "a", "completion": "b"}\n\n' + line + b"\n")
    assert reason in err.message
    assert (err.code, err.param, err.type) == ("invalid_file_format", "file", "invalid_request_error")
    assert err.response.headers["x-should-retry"] == "false"


def test_files_without_rows_or_with_unknown_columns_are_refused(client: OpenAI) -> None:
    assert "no rows" in bad_request(client, b"\n\n").message
    assert "found the fields `question`" in bad_request(client, b'{"question": "a"}\n').message
    assert "Line 1: found no fields" in (many := bad_request(client, b"{}\n" * 5000)).message
    assert "(the first 50 wrong rows)" in many.message
    assert bad_request(client, b"x", purpose="vision").param == "purpose"
    chat = {"messages": [{"role": "user", "content": "a"}]}
    assert "role `assistant`" in bad_request(client, json.dumps(chat).encode()).message


def test_expiry(client: OpenAI) -> None:
    now = time.time()
    kept = client.files.create(
        file=jsonl(toy.arithmetic(2)), purpose="fine-tune", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert kept.expires_at == pytest.approx(now + 3600, abs=60)
    wrong: Any
    for wrong in (5, 2_592_001, -3600, "\u00b2", "1e4", "9" * 5000):
        after: Any = {"anchor": "created_at", "seconds": wrong}
        with pytest.raises(openai.BadRequestError, match="between 3600 and 2592000"):
            client.files.create(file=jsonl(toy.arithmetic(2)), purpose="fine-tune", expires_after=after)


def test_a_broken_upload_leaves_nothing(server: Server) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    before = sorted((server.data / "files").iterdir())
    with socket.create_connection((host, int(port))) as connection:
        head = (
            f"POST /v1/files HTTP/1.1\r\nHost: {host}\r\nContent-Length: 900000\r\n"
            "Content-Type: multipart/form-data; boundary=b\r\n\r\n"
            '--b\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n'
        )
        connection.sendall(head.encode() + b"x" * 300_000)
        wait_until(lambda: list((server.data / "incoming").iterdir()))
    wait_until(lambda: not list((server.data / "incoming").iterdir()))
    assert sorted((server.data / "files").iterdir()) == before


def test_forms_that_are_none(server: Server) -> None:
    with server.http() as http:
        assert http.post("/v1/files", content=b"{}").status_code == 415
        form = {"content-type": "multipart/form-data; boundary=b"}
        assert http.post("/v1/files", content=b"no form", headers=form).status_code == 400
        cut = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nabc'
        assert http.post("/v1/files", content=cut, headers=form).json()["error"]["code"] == "incomplete_upload"
        long = {"content-type": f"multipart/form-data; boundary={'b' * 5000}"}
        assert http.post("/v1/files", content=b"--b--", headers=long).status_code == 400
        unknown = {"purpose": "user_data", "expires_after": '{"anchor": "created_at", "seconds": 3600}'}
        answer = http.post("/v1/files", files={"file": ("a", b"x")}, data=unknown)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "expires_after")
        missing = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nuser_data\r\n--b--\r\n'
        assert http.post("/v1/files", content=missing, headers=form).json()["error"]["param"] == "file"
    assert not list((server.data / "incoming").iterdir())


def test_a_file_that_a_job_waits_for_cannot_be_deleted(client: OpenAI, training_file: str) -> None:
    job = client.fine_tuning.jobs.create(
        model="tiny", training_file=training_file, extra_body={"pantheraml": {"hold": True}}
    )
    with pytest.raises(openai.BadRequestError, match=f"{job.id} still uses this file"):
        client.files.delete(training_file)
    client.fine_tuning.jobs.cancel(job.id)
    assert client.files.delete(training_file).deleted


@pytest.mark.seed("S4-138")
def test_files_on_disk_are_private(server: Server, client: OpenAI, training_file: str) -> None:
    paths: list[Path] = [
        server.data,
        *server.data.glob("service.db*"),
        server.data / "files" / f"{training_file}.jsonl",
    ]
    for path in paths:
        assert path.stat().st_mode & 0o077 == 0, path
