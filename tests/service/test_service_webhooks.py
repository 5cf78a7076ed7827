"""Webhooks: signatures that OpenAI's SDK accepts, retries, and delivery after the service was killed."""

from __future__ import annotations

import http.server
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI

from tests import toy
from tests.service.conftest import Server, jsonl, wait_for, wait_until
from tests.service.test_service_security import keys

ENDED: Any = ["fine_tuning.job.succeeded", "fine_tuning.job.failed", "fine_tuning.job.cancelled"]


class Receiver:
    """A server that keeps what it is sent, and answers with the next of `answers`, then with 200."""

    def __init__(self) -> None:
        self.messages: list[tuple[dict[str, str], str]] = []
        self.answers: list[int] = []
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"])).decode()
                outer.messages.append(({name.lower(): value for name, value in self.headers.items()}, body))
                self.send_response(outer.answers.pop(0) if outer.answers else 200)
                self.send_header("location", f"http://127.0.0.1:{outer.port}/elsewhere")
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *arguments: Any) -> None:
                """Nobody reads it."""

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}/hook?a=b"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.close()


@pytest.fixture
def service(own_server: Callable[..., Server]) -> Server:
    return own_server("--cpu-slots", "1", "--allow-private-webhooks")


def held_job(client: OpenAI) -> str:
    file = client.files.create(file=jsonl(toy.arithmetic(4)), purpose="fine-tune").id
    body = {"pantheraml": {"hold": True}}
    return client.fine_tuning.jobs.create(model="tiny", training_file=file, extra_body=body).id


def test_a_signed_message(service: Server, receiver: Receiver) -> None:
    client = service.client()
    endpoint = client.webhooks.create(name="ours", url=receiver.url, event_types=ENDED)
    job = held_job(client)
    client.fine_tuning.jobs.cancel(job)
    wait_until(lambda: receiver.messages)
    headers, body = receiver.messages[0]
    event = client.webhooks.unwrap(body, headers, secret=endpoint.signing_secret)
    assert (event.type, event.object, event.data.id) == ("fine_tuning.job.cancelled", "event", job)
    assert headers["webhook-id"] == event.id
    assert headers["host"] == f"127.0.0.1:{receiver.port}"
    with pytest.raises(openai.InvalidWebhookSignatureError):
        client.webhooks.unwrap(body.replace(job, "ftjob-0"), headers, secret=endpoint.signing_secret)
    time.sleep(2.5)
    assert len(receiver.messages) == 1, "what has arrived is not sent again"


def test_endpoints_as_the_sdk_has_them(service: Server, receiver: Receiver) -> None:
    client = service.client()
    assert set(ENDED) <= set(client.webhooks.event_types.list().data)
    made = client.webhooks.create(name="ours", url=receiver.url, event_types=ENDED[:1])
    second = client.webhooks.create(name="second", url=receiver.url, event_types=ENDED)
    assert made.signing_secret.startswith("whsec_")
    assert [each.id for each in client.webhooks.list(limit=1)] == [second.id, made.id]
    shown = client.webhooks.retrieve(made.id)
    assert not hasattr(shown, "signing_secret"), "it is shown once"
    assert shown.signing_secret_hint == f"whsec_...{made.signing_secret[-4:]}"
    changed = client.webhooks.update(made.id, name="other", event_types=ENDED[1:])
    assert (changed.name, changed.event_types, changed.url) == ("other", sorted(ENDED[1:]), receiver.url)
    rotated = client.webhooks.rotate_secret(made.id, keep_old_secret_active_for_24_hours=True)
    result = client.webhooks.test(made.id, event_type="fine_tuning.job.failed")
    assert (result.status_code, result.event_type) == (200, "fine_tuning.job.failed")
    headers, body = receiver.messages[-1]
    for secret in (made.signing_secret, rotated.signing_secret):
        assert client.webhooks.unwrap(body, headers, secret=secret).data.id == "ftjob-test"
    last = client.webhooks.rotate_secret(made.id)
    client.webhooks.test(made.id, event_type="fine_tuning.job.failed")
    headers, body = receiver.messages[-1]
    client.webhooks.unwrap(body, headers, secret=last.signing_secret)
    with pytest.raises(openai.InvalidWebhookSignatureError):
        client.webhooks.unwrap(body, headers, secret=rotated.signing_secret)
    assert client.webhooks.delete(made.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.webhooks.retrieve(made.id)
    with pytest.raises(openai.BadRequestError, match="no such event type"):
        client.webhooks.create(name="a", url=receiver.url, event_types=["batch.completed"])


def test_it_is_tried_again_and_no_redirect_is_followed(service: Server, receiver: Receiver) -> None:
    receiver.answers = [302, 500]
    client = service.client()
    client.webhooks.create(name="ours", url=receiver.url, event_types=ENDED)
    job = held_job(client)
    client.fine_tuning.jobs.cancel(job)
    wait_until(lambda: len(receiver.messages) == 2)
    ids = {headers["webhook-id"] for headers, _ in receiver.messages}
    assert len(ids) == 1, "its id is the same at every attempt"
    assert all(job in body for _, body in receiver.messages)


def test_a_killed_service_tells_it_later(service: Server, receiver: Receiver) -> None:
    client = service.client()
    dead = Receiver()
    client.webhooks.create(name="ours", url=dead.url, event_types=ENDED)
    dead.close()
    job = held_job(client)
    client.fine_tuning.jobs.cancel(job)
    service.kill()
    service.start()
    client = service.client()
    (endpoint,) = client.webhooks.list()
    client.webhooks.update(endpoint.id, url=receiver.url)
    wait_until(lambda: receiver.messages)
    assert job in receiver.messages[0][1]


def test_private_addresses_are_refused(client: OpenAI) -> None:
    """A user must not reach through the service what only its machine can."""
    for host in ("127.0.0.1", "localhost", "[::1]", "10.0.0.1", "169.254.169.254", "[::ffff:127.0.0.1]", "0.0.0.0"):
        with pytest.raises(openai.BadRequestError, match="not a public address") as caught:
            client.webhooks.create(name="a", url=f"https://{host}:8000/x", event_types=ENDED)
        assert caught.value.code == "url_not_allowed"
    for url in ("http://example.com", "file:///etc/passwd", "https://", "https://a:b@example.com/", "https://[", "x"):
        with pytest.raises(openai.BadRequestError):
            client.webhooks.create(name="a", url=url, event_types=ENDED)
    assert not list(client.webhooks.list())


def test_users_have_their_own(own_server: Callable[..., Server], receiver: Receiver, tmp_path: Path) -> None:
    made = [keys(tmp_path / "data", "create", user, "--scope", "submit")["key"] for user in ("ann", "bob")]
    server = own_server("--allow-private-webhooks")
    ann, bob = map(server.client, made)
    endpoint = ann.webhooks.create(name="a", url=receiver.url, event_types=ENDED)
    assert not list(bob.webhooks.list())
    for call in (bob.webhooks.retrieve, bob.webhooks.delete, bob.webhooks.rotate_secret):
        with pytest.raises(openai.NotFoundError):
            call(endpoint.id)
    bob.fine_tuning.jobs.cancel(held_job(bob))
    job = held_job(ann)
    ann.fine_tuning.jobs.cancel(job)
    wait_until(lambda: receiver.messages)
    assert job in receiver.messages[0][1], "of ann's job, not of bob's"


@pytest.mark.extended
def test_a_trained_model_is_announced(service: Server, receiver: Receiver) -> None:
    client = service.client()
    client.webhooks.create(name="ours", url=receiver.url, event_types=ENDED)
    file = client.files.create(file=jsonl(toy.arithmetic(4)), purpose="fine-tune").id
    job = client.fine_tuning.jobs.create(model="tiny", training_file=file, hyperparameters={"n_epochs": 1})
    wait_for(client, job.id, "succeeded")
    wait_until(lambda: receiver.messages)
    assert '"type": "fine_tuning.job.succeeded"' in receiver.messages[0][1]


@pytest.mark.extended
def test_a_stall_is_announced(own_server: Callable[..., Server], receiver: Receiver) -> None:
    server = own_server("--cpu-slots", "1", "--stall-seconds", "3", "--allow-private-webhooks")
    client = server.client()
    client.webhooks.create(name="ours", url=receiver.url, event_types=["fine_tuning.job.stalled"])  # type: ignore[list-item]
    file = client.files.create(file=jsonl(toy.arithmetic(24)), purpose="fine-tune").id
    job = client.fine_tuning.jobs.create(model="tiny", training_file=file, hyperparameters={"n_epochs": 5000})
    wait_until(lambda: "training loss" in client.fine_tuning.jobs.list_events(job.id, limit=1).data[0].message)
    for process in server.processes(job.id):
        if "pantheraml.runs.supervisor" not in process.cmdline():
            process.suspend()
    wait_until(lambda: receiver.messages)
    event = json.loads(receiver.messages[0][1])
    assert (event["type"], event["data"]["id"]) == ("fine_tuning.job.stalled", job.id)
    assert "No progress for" in event["data"]["message"]
    client.fine_tuning.jobs.cancel(job.id)
    wait_for(client, job.id, "cancelled")
