"""Every path of the API, asked by somebody else: the description lists them, so that a new one is asked, too."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import toy
from tests.service.conftest import Server, jsonl, wait_for
from tests.service.test_service_security import keys

OPEN = {"/healthz", "/readyz", "/session"}
"""Answer without a key: probes, and the page, which asks who one is."""
OF_THE_MACHINE = {"/multigpu/gpu/{gpu_id}/stats", "/api/v1/multigpu/gpu/{gpu_id}/stats"}
"""Not a user's."""


def request_bodies(things: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Bodies that would be accepted from the owner; for other paths, an empty object is."""
    job = {"model": "tiny", "training_file": things["file_id"]}
    return {
        "/v1/files": {"files": {"file": ("a", b"x")}, "data": {"purpose": "user_data"}},
        "/v1/uploads/{upload_id}/parts": {"files": {"data": ("a", b"x")}},
        "/v1/uploads/{upload_id}/complete": {"json": {"part_ids": [things["part"]]}},
        "/v1/fine_tuning/jobs": {"json": job},
        "/v1/fine_tuning/preview": {"json": job},
        "/v1/webhook_endpoints/{endpoint_id}": {"json": {"name": "mine"}},
        "/v1/webhook_endpoints/{endpoint_id}/test": {"json": {"event_type": "fine_tuning.job.failed"}},
        "/v1/chat/completions": {"json": {"model": things["model"], "messages": [{"role": "user", "content": "a"}]}},
        "/v1/queue/move": {"json": {"job": things["held"], "before": None}},
        "/multigpu/resources/manage": {"json": {"action": "disable", "devices": ["cpu:0"]}},
        "/api/v1/multigpu/resources/manage": {"json": {"action": "disable", "devices": ["cpu:0"]}},
    }


def things_of(owner: httpx.Client, server: Server, key: str) -> dict[str, str]:
    """One of everything that a user can have, by the name that paths have for it."""

    def made(path: str, **sent: Any) -> str:
        name: str = owner.post(path, **sent).raise_for_status().json()["id"]
        return name

    file = made("/v1/files", files={"file": jsonl(toy.arithmetic(4))}, data={"purpose": "fine-tune"})
    job = {"model": "tiny", "training_file": file, "hyperparameters": {"n_epochs": 1}, "metadata": {"secret": "ours"}}
    whole, held = (made("/v1/fine_tuning/jobs", json={**job, "pantheraml": {"hold": hold}}) for hold in (False, True))
    part = {"bytes": 3, "filename": "a", "mime_type": "text/plain", "purpose": "user_data"}
    upload = made("/v1/uploads", json=part)
    hook = {"name": "hook", "url": "http://127.0.0.1:9/", "event_types": ["fine_tuning.job.failed"]}
    return {
        "file_id": file,
        "job_id": whole,
        "held": held,
        "upload_id": upload,
        "part": made(f"/v1/uploads/{upload}/parts", files={"data": ("a", b"abc")}),
        "endpoint_id": made("/v1/webhook_endpoints", json=hook),
        "model": wait_for(server.client(key), whole, "succeeded").fine_tuned_model,
    }


def requests_of(described: dict[str, Any], things: dict[str, str]) -> Iterator[tuple[str, str, str, dict[str, Any]]]:
    """Method, template, address and body of every operation that the description lists."""
    bodies = request_bodies(things)
    for path, operations in described["paths"].items():
        address = path.format(
            **things, gpu_id="0", name=things["model"] if "/models/" in path else "adapter/adapter_model.safetensors"
        )
        for method in operations:
            sent = bodies.get(path, {"json": {}}) if method == "post" else {}
            yield method.upper(), path, address, sent


@pytest.mark.extended
@pytest.mark.seed("S4-135", "S4-138")
def test_nothing_of_a_user_is_reached_by_another(own_server: Callable[..., Server], tmp_path: Path) -> None:
    data = tmp_path / "data"
    made = {
        user: keys(data, "create", user, "--scope", scope)["key"]
        for user, scope in (("ann", "submit"), ("bob", "submit"), ("eve", "read"))
    }
    server = own_server("--cpu-slots", "1", "--allow-private-webhooks")

    def as_user(user: str) -> httpx.Client:
        return server.http(headers={"Authorization": f"Bearer {made[user]}"})

    with as_user("ann") as ann, as_user("bob") as bob, as_user("eve") as eve, server.http() as nobody:
        things = things_of(ann, server, made["ann"])
        described = nobody.get("/openapi.json").json()
        asked = 0
        for method, path, address, sent in requests_of(described, things):
            if path not in OPEN:
                assert nobody.request(method, address, **sent).status_code == 401, (method, path)
            if method in ("POST", "DELETE") and path not in OPEN:
                assert eve.request(method, address, **sent).status_code == 403, (method, path)
            if "{" in path and path not in OF_THE_MACHINE:
                for who in (bob, eve) if method == "GET" else (bob,):
                    assert who.request(method, address, **sent).status_code == 404, (method, path)
                asked += 1
            elif method == "GET" and path != "/openapi.json":
                told = bob.get(address).text
                assert not [name for name in (*things.values(), "ann", "ours") if name in told], path
        assert asked >= 25
        for path, name, status in (
            ("/v1/fine_tuning/jobs", things["file_id"], 400),
            ("/v1/fine_tuning/preview", things["file_id"], 400),
        ):
            assert bob.post(path, json={"model": "tiny", "training_file": name}).status_code == status
        body = {"model": things["model"], "messages": [{"role": "user", "content": "a"}]}
        assert bob.post("/v1/chat/completions", json=body).status_code == 404
        for path, name in (("files", "file_id"), ("fine_tuning/jobs", "job_id"), ("webhook_endpoints", "endpoint_id")):
            assert bob.get(f"/v1/{path}", params={"after": things[name]}).status_code == 404
        assert ann.get(f"/v1/fine_tuning/jobs/{things['held']}").json()["state"] == "paused", "nobody changed it"
        ann.post(f"/v1/uploads/{things['upload_id']}/complete", json={"part_ids": [things["part"]]}).raise_for_status()
        headers = [made["ann"], f"Basic {made['ann']}", f"Bearer {made['ann'][:-1]}", "Bearer", "Bearer \u00e9"]
        for header in headers:
            assert nobody.get("/v1/models", headers={"Authorization": header.encode()}).status_code == 401
        assert nobody.get("/v1/models", params={"api_key": made["ann"]}).status_code == 401
    told = server.stop()
    written = b"".join(path.read_bytes() for path in data.rglob("*") if path.is_file())
    assert not [key for key in made.values() if key in told or key.encode() in written], "keys are kept nowhere"


@pytest.mark.extended
def test_every_change_is_in_the_audit_log(own_server: Callable[..., Server], tmp_path: Path) -> None:
    key = keys(tmp_path / "data", "create", "ann", "--scope", "submit")["key"]
    server = own_server("--cpu-slots", "1", "--allow-private-webhooks")
    page = {"X-Requested-With": "pantheraml"}
    with server.http(headers={"Authorization": f"Bearer {key}"}) as ann, server.http() as browser:
        things = things_of(ann, server, key)
        for method, path in (
            *(("POST", f"/v1/fine_tuning/jobs/{things['held']}/{action}") for action in ("resume", "pause", "cancel")),
            ("POST", f"/v1/uploads/{things['upload_id']}/cancel"),
            ("POST", f"/v1/webhook_endpoints/{things['endpoint_id']}/rotate_secret"),
            ("DELETE", f"/v1/webhook_endpoints/{things['endpoint_id']}"),
            ("DELETE", f"/v1/models/{things['model']}"),
            ("DELETE", f"/v1/files/{things['file_id']}"),
        ):
            answer = ann.request(method, path)
            assert answer.status_code in (200, 400), answer.text  # it may be running already
        for path in ("/multigpu/config", "/multigpu/training/config"):
            ann.post(path, json={}).raise_for_status()
        browser.post("/session", headers={"Authorization": f"Bearer {key}", **page}).raise_for_status()
        browser.delete("/session", headers=page).raise_for_status()
    with contextlib.closing(sqlite3.connect(tmp_path / "data" / "service.db")) as log:
        found = log.execute("SELECT user, action, target, request_id FROM audit WHERE user = 'ann'").fetchall()
    actions = [action for _, action, _, _ in found]
    assert {
        *("file.create", "job.create", "upload.create", "upload.part", "webhook.create", "job.resume", "job.cancel"),
        *("upload.cancel", "webhook.rotate", "webhook.delete", "model.delete", "file.delete"),
        *("multigpu.config", "multigpu.training_config", "session.open", "session.close"),
    } <= set(actions)
    assert actions.count("job.create") == 2
    assert all(target and request.startswith("req_") for _, _, target, request in found)
