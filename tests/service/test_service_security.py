"""Access control: keys, scopes, users, host names, limits, and no leaks in responses."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from pantheraml.cli.main import main
from pantheraml.service import Settings, create_app
from pantheraml.service.catalog import Catalog
from tests import toy
from tests.service.conftest import Server, jsonl, new_database, wait_until


def keys(data: Path, *arguments: str) -> Any:
    """What `pantheraml keys ... --json` prints."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        assert main(["keys", *arguments, "--data-dir", str(data), "--json"]) == 0
    return json.loads(output.getvalue())


def held(client: openai.OpenAI, file: str) -> str:
    body = {"pantheraml": {"hold": True}}
    return client.fine_tuning.jobs.create(model="tiny", training_file=file, extra_body=body).id


@pytest.mark.seed("S4-135", "S4-137", "C25")
def test_keys_scopes_and_users(own_server: Callable[..., Server], tmp_path: Path) -> None:
    data = tmp_path / "data"
    made = {
        name: keys(data, "create", name, "--scope", scope)
        for name, scope in (("ann", "submit"), ("bob", "submit"), ("eve", "read"), ("root", "admin"))
    }
    assert made["ann"]["key"].startswith("pml-")
    assert len(made["ann"]["key"]) >= 47, "256 bits"
    database = b"".join(path.read_bytes() for path in data.glob("service.db*"))
    assert made["ann"]["key"].encode() not in database, "only its hash is kept"
    server = own_server()
    ann, bob, eve, root = (server.client(made[name]["key"]) for name in ("ann", "bob", "eve", "root"))
    for wrong in ("nothing", "pml-" + "x" * 43):
        with pytest.raises(openai.AuthenticationError):
            server.client(wrong).models.list()

    file = ann.files.create(file=jsonl(toy.arithmetic(4)), purpose="fine-tune").id
    job = held(ann, file)
    for call in (
        lambda: bob.files.retrieve(file),
        lambda: bob.files.content(file),
        lambda: bob.files.delete(file),
        lambda: bob.fine_tuning.jobs.retrieve(job),
        lambda: bob.fine_tuning.jobs.cancel(job),
        lambda: bob.fine_tuning.jobs.list_events(job),
        lambda: bob.fine_tuning.jobs.list(after=job),
    ):
        with pytest.raises(openai.NotFoundError):
            call()
    with pytest.raises(openai.BadRequestError, match="No such file"):
        held(bob, file)
    assert list(bob.files.list()) == list(bob.fine_tuning.jobs.list()) == []
    assert root.fine_tuning.jobs.retrieve(job).organization_id == "ann"

    assert list(eve.files.list()) == []
    with pytest.raises(openai.PermissionDeniedError, match="scope `submit`"):
        eve.files.create(file=jsonl(toy.arithmetic(4)), purpose="fine-tune")
    with pytest.raises(openai.PermissionDeniedError, match="scope `admin`"):
        own = {"pantheraml": {"hold": True, "priority": 1}}
        ann.fine_tuning.jobs.create(model="tiny", training_file=file, extra_body=own)

    keys(data, "revoke", made["ann"]["id"])
    with pytest.raises(openai.AuthenticationError, match="revoked"):
        ann.models.list()
    with contextlib.closing(sqlite3.connect(data / "service.db")) as log:
        changes = log.execute("SELECT user, action, target FROM audit ORDER BY id").fetchall()
    assert [change[:2] for change in changes] == [
        *[("operator", "key.create")] * 4,
        *[("ann", "file.create"), ("ann", "job.create"), ("operator", "key.revoke")],
    ]
    assert changes[5][2] == job
    statuses = {key["user"]: key["status"] for key in keys(data, "list")}
    assert statuses == {"ann": "revoked", "bob": "active", "eve": "active", "root": "active"}


def test_the_first_key_closes_a_service_that_was_open(own_server: Callable[..., Server], tmp_path: Path) -> None:
    server = own_server()
    assert server.client().models.list().data
    expired = keys(tmp_path / "data", "create", "ann", "--days", "0.000001")

    def closed() -> bool:
        return httpx.get(f"{server.url}/v1/models").status_code == 401

    wait_until(closed)
    with pytest.raises(openai.AuthenticationError, match="expired"):
        server.client(expired["key"]).models.list()
    assert httpx.get(f"{server.url}/healthz").json()["status"] == "ok"
    (tmp_path / "data" / "files").rename(tmp_path / "gone")
    form = {"files": {"file": ("a", b"x")}, "data": {"purpose": "user_data"}}
    assert httpx.post(f"{server.url}/v1/files", **form).status_code == 401
    admin = keys(tmp_path / "data", "create", "root", "--scope", "admin")["key"]
    failed = httpx.post(f"{server.url}/v1/files", headers={"authorization": f"Bearer {admin}"}, **form)
    assert failed.status_code == 500
    told = server.stop()
    assert "No API keys" in told
    assert failed.headers["x-request-id"] in told, "the log tells why"
    assert "FileNotFoundError" in told
    assert "FileNotFoundError" not in failed.text


@pytest.mark.parametrize("header", ["X-Forwarded-For", "X-Real-IP", "Forwarded"])
def test_a_proxy_is_not_served_without_keys(server: Server, header: str) -> None:
    """It is on this machine, but those for whom it asks may be anywhere."""
    with server.http() as http:
        answer = http.get("/v1/models", headers={header: "203.0.113.7"})
        assert answer.status_code == 401
        assert "only programs of this machine" in answer.json()["error"]["message"]
        assert http.get("/v1/models").status_code == 200


def test_others_are_not_served_without_keys(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = ["--data-dir", str(tmp_path / "data"), "--models-dir", str(models)]
    assert main(["serve", "--host", "0.0.0.0", "--port", "0", *folders]) == 2
    told = capsys.readouterr().err
    assert "Others can reach 0.0.0.0, and there are no API keys" in told
    assert "--insecure" in told


def test_a_data_folder_has_one_service(server: Server, models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = ["--data-dir", str(server.data), "--models-dir", str(models)]
    assert main(["serve", "--port", "0", *folders]) == 2
    assert "Another service is using" in capsys.readouterr().err


def test_a_planted_lock_is_refused(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").touch()
    (tmp_path / "data").mkdir(mode=0o700)
    (tmp_path / "data" / "service.lock").symlink_to(tmp_path / "mine")
    assert main(["serve", "--port", "0", "--data-dir", str(tmp_path / "data"), "--models-dir", str(models)]) == 2
    told = capsys.readouterr().err
    assert "cannot be opened: it is a symlink, which is not followed" in told
    assert "service.lock" in told


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"Host": "evil.example"}, "foreign_host"),
        ({"Host": "127.0.0.1.evil.example"}, "foreign_host"),
        ({"Host": ""}, "foreign_host"),
        ({"Origin": "https://evil.example"}, "foreign_origin"),
        ({"Host": "10.9.8.7"}, "foreign_host"),
        ({"Host": "[::1"}, "foreign_host"),
        ({"Origin": "null"}, "foreign_origin"),
        ({"Origin": "http://["}, "foreign_origin"),
        ({"Origin": "http://localhost:99999999"}, "foreign_origin"),
        ({"Host": "localhost:8000", "Origin": "http://localhost:3000"}, "foreign_origin"),
        ({"Host": "localhost:8000", "Origin": "http://127.0.0.1:8000"}, "foreign_origin"),
    ],
)
def test_requests_by_way_of_other_sites_are_refused(server: Server, headers: dict[str, str], code: str) -> None:
    with server.http() as http:
        answer = http.get("/v1/models", headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, code)
        for host, origin in (("localhost:1", "http://localhost:1"), ("LOCALHOST", "https://localhost")):
            assert http.get("/v1/models", headers={"Host": host, "Origin": origin}).status_code == 200


def test_a_service_on_all_addresses_is_reached_by_each_and_by_names_of_proxies(
    own_server: Callable[..., Server],
) -> None:
    server = own_server("--host", "0.0.0.0", "--insecure", "--allow-host", "Tune.example")
    with server.http() as http:
        for host, origin, status in (
            ("127.0.0.1:80", None, 200),
            ("tune.example", "https://tune.example", 200),
            ("127.0.0.1:8000", "https://tune.example", 200),  # a proxy that gives its own name for Host
            ("tune.example", "https://127.0.0.1", 403),
            ("other.example", None, 403),
            ("10.9.8.7", None, 403),
        ):
            headers = {"Host": host} if origin is None else {"Host": host, "Origin": origin}
            assert http.get("/v1/models", headers=headers).status_code == status, (host, origin)
        assert "--allow-host" in http.get("/v1/models", headers={"Host": "other.example"}).json()["error"]["message"]
    with httpx.Client(base_url=server.url.replace("0.0.0.0", "127.0.0.2"), timeout=60) as http:
        assert http.get("/v1/models").status_code == 200, "an address of this machine that no option names"


@pytest.mark.parametrize("name", ["https://tune.example", "tune.example:8000", "tune.example/", "[::1]", "*", ""])
def test_a_name_that_no_request_can_have_is_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--allow-host", name]) == 2
    assert "without scheme and port" in capsys.readouterr().err


def test_every_answer_has_an_id_and_security_headers(server: Server) -> None:
    with server.http() as http:
        for path, status in (("/healthz", 200), ("/v1/nothing", 404), ("/readyz", 200)):
            answer = http.get(path)
            assert answer.status_code == status
            assert answer.headers["x-request-id"].startswith("req_")
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert "server" not in answer.headers
        assert http.get("/v1/nothing").json()["error"]["message"] == "Not Found"
        assert http.put("/v1/models").status_code == 405


def test_bodies_are_bounded(server: Server) -> None:
    def endless() -> Any:
        for _ in range(64):
            yield b"x" * (1 << 16)

    with server.http() as http:
        known = http.post("/v1/fine_tuning/jobs", content=b"x" * (2 << 20))
        streamed = http.post("/v1/fine_tuning/jobs", content=endless())
    assert (known.status_code, streamed.status_code) == (413, 413)


def test_a_models_folder_hides_what_lies_elsewhere(
    own_server: Callable[..., Server], models: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "models"
    (folder / "org").mkdir(parents=True)
    outside = tmp_path / "outside"
    outside.mkdir()
    for name in ("config.json", "model.safetensors"):
        (outside / name).write_text("{}")
    (folder / "linked").symlink_to(outside)
    (folder / "org" / "pickled").mkdir()
    (folder / "org" / "pickled" / "config.json").write_text("{}")
    (folder / "org" / "pickled" / "pytorch_model.bin").write_text("")
    (folder / "org" / "tiny").symlink_to(folder / "org" / "real")
    (folder / "org" / "real").mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / "org" / "real" / name).write_text("{}")
    server = own_server(models_dir=folder)
    assert [model.id for model in server.client().models.list()] == ["org/real", "org/tiny"]
    assert server.client().models.retrieve("org/real").id == "org/real"


@pytest.mark.seed("S4-136")
def test_too_many_requests_are_refused_for_a_while(models: Path, tmp_path: Path) -> None:
    async def ask() -> list[httpx.Response]:
        app = create_app(Settings(tmp_path / "data", models, requests_per_minute=3))
        transport = httpx.ASGITransport(app)
        async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport) as http:
            answers = [await http.get("http://localhost/v1/models") for _ in range(4)]
            for other in ({"authorization": "Bearer other"}, {"cookie": "pantheraml_session=other"}):
                answers.append(await http.get("http://localhost/v1/models", headers=other))
            many = [await http.get("http://localhost/v1/models", headers={"cookie": f"a={n}"}) for n in range(30)]
            assert {answer.status_code for answer in many} == {200, 429}, "an address has a limit, too"
            return answers

    *served, refused, of_another_key, of_another_page = asyncio.run(ask())
    assert [answer.status_code for answer in served] == [200] * 3
    assert (refused.status_code, refused.json()["error"]["type"]) == (429, "rate_limit_error")
    assert 1 <= int(refused.headers["retry-after"]) <= 61
    assert refused.headers["x-should-retry"] == "true"
    assert (of_another_key.status_code, of_another_page.status_code) == (200, 200)


@pytest.mark.seed("S4-166")
def test_an_unexpected_failure_shows_no_more_than_its_request(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: object) -> None:
        raise RuntimeError("secret words")

    async def ask() -> httpx.Response:
        app = create_app(Settings(tmp_path / "data", models))
        async with app.router.lifespan_context(app), httpx.AsyncClient(transport=httpx.ASGITransport(app)) as http:
            monkeypatch.setattr(Catalog, "models", fail)
            return await http.get("http://localhost/v1/models")

    answer = asyncio.run(ask())
    assert answer.status_code == 500
    assert "secret" not in answer.text
    assert answer.headers["x-request-id"] in answer.text


def test_a_service_with_readers_ends_at_once(own_server: Callable[..., Server]) -> None:
    server = own_server()
    client = server.client()
    file = client.files.create(file=jsonl(toy.arithmetic(4)), purpose="fine-tune").id
    job = held(client, file)
    with server.http() as http, http.stream("GET", f"/v1/fine_tuning/jobs/{job}/stream") as stream:
        assert stream.status_code == 200
        assert "graceful shutdown exceeded" not in server.stop(), "it waited for the reader"
    with contextlib.suppress(httpx.HTTPError):
        stream.close()


@pytest.mark.extended
def test_a_stream_ends_with_its_key(own_server: Callable[..., Server], tmp_path: Path) -> None:
    key = keys(tmp_path / "data", "create", "ann", "--scope", "submit")
    server = own_server()
    client = server.client(key["key"])
    job = held(client, client.files.create(file=jsonl(toy.arithmetic(4)), purpose="fine-tune").id)
    headers = {"Authorization": f"Bearer {key['key']}"}
    with server.http(headers=headers) as http, http.stream("GET", f"/v1/fine_tuning/jobs/{job}/stream") as stream:
        lines = stream.iter_lines()
        assert next(lines)
        keys(tmp_path / "data", "revoke", key["id"])
        assert not [line for line in lines if line.startswith("event: end")], "it ended, but the job has not"
    assert "Traceback" not in server.stop()


def test_another_database_than_postgresql_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["serve"], ["keys", "list"]):
        assert main([*command, "--database-url", "mysql://me:password@host/db"]) == 2
        told = capsys.readouterr().err
        assert "postgresql://" in told
        assert "password" not in told


@pytest.mark.extended
def test_a_database_has_one_service(
    own_server: Callable[..., Server], postgresql: str, models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A second one would take the first one's jobs for lost, and kill nothing but start them again."""
    url = new_database(postgresql)
    server = own_server("--database-url", url)
    folders = ["--data-dir", str(tmp_path / "other"), "--models-dir", str(models)]
    command = ["serve", "--port", "0", "--database-url", url, *folders]
    assert main(command) == 2
    assert "Another service is using this database" in capsys.readouterr().err
    server.kill()
    server.start()
