"""The chat worker: one base, adapters that come and go, and a device that it gives back; what may happen to it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
from openai import OpenAI

from tests import toy
from tests.service.conftest import Server, jsonl, wait_for, wait_until
from tests.service.test_service_chat import ASK, answer

pytestmark = pytest.mark.extended


@pytest.fixture(scope="module")
def with_slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models: one whose answers take their time beside the usual one."""
    root = tmp_path_factory.mktemp("models")
    toy.write_llama(root / "tiny")
    toy.write_llama(root / "slow", hidden_size=128, num_hidden_layers=16, max_position_embeddings=20_000)
    return root


def workers(server: Server) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            ours = process.environ().get("PANTHERAML_CHAT") == str((server.data / "chat").resolve())
            if ours and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def tuned(server: Server, **changes: Any) -> Any:
    """A job that has ended, and with it a model that always says the same."""
    client = server.client()
    rows = [{"messages": [*ASK, {"role": "assistant", "content": "three"}]}] * 8
    file = client.files.create(file=jsonl(rows), purpose="fine-tune")
    job = client.fine_tuning.jobs.create(
        **{
            "model": "tiny",
            "training_file": file.id,
            "hyperparameters": {"n_epochs": 40, "batch_size": 8, "learning_rate_multiplier": 50},
            "seed": 1,
            **changes,
        }
    )
    return wait_for(client, job.id, "succeeded")


@pytest.fixture
def alone(own_server: Callable[..., Server], with_slow: Path) -> Server:
    return own_server("--cpu-slots", "1", models_dir=with_slow)


def test_tuned_models_share_their_base(alone: Server) -> None:
    client = alone.client()
    job = tuned(alone)
    full = tuned(alone, extra_body={"pantheraml": {"config": {"method": {"kind": "full"}}}})
    base = answer(client).choices[0].message.content
    (worker,) = workers(alone)
    for _ in range(2):
        said = answer(client, model=job.fine_tuned_model).choices[0]
        assert (said.message.content, said.finish_reason) == ("three", "stop")
        assert answer(client).choices[0].message.content == base, "the adapter is gone again"
    assert workers(alone) == [worker]
    log = (alone.data / "chat/worker.log").read_text()
    assert log.count("loading a base model") == 1, log
    assert answer(client, model=full.fine_tuned_model).choices[0].message.content == "three"
    deleting(alone, client, job)
    assert alone.stop() is not None
    wait_until(lambda: not workers(alone))


def deleting(server: Server, client: OpenAI, job: Any) -> None:
    """The weights go, what the job tells stays."""
    name = job.fine_tuned_model
    deleted = client.models.delete(name)
    assert (deleted.id, deleted.deleted) == (name, True)
    assert name not in [model.id for model in client.models.list()]
    for call in (client.models.retrieve, client.models.delete, lambda name: answer(client, model=name)):
        with pytest.raises(openai.NotFoundError):
            call(name)
    with pytest.raises(openai.PermissionDeniedError, match="base model"):
        client.models.delete("tiny")
    kept = client.fine_tuning.jobs.retrieve(job.id)
    assert (kept.status, kept.fine_tuned_model) == ("succeeded", name)
    (metrics,) = kept.result_files
    assert client.files.content(metrics).read().startswith(b"step,train_loss")
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(job.result_files[1])
    assert not list((server.data / "jobs" / job.id).rglob("*.safetensors"))
    with server.http() as http:
        artifacts = http.get(f"/v1/fine_tuning/jobs/{job.id}/artifacts").json()["data"]
    assert [each["name"] for each in artifacts] == ["report.html", "run.json"]
    assert client.fine_tuning.jobs.checkpoints.list(job.id).data == []


def test_a_job_gets_the_device_at_once(alone: Server) -> None:
    client = alone.client()
    file = client.files.create(file=jsonl(toy.arithmetic(24)), purpose="fine-tune")
    answer(client)
    stream = long_answer(alone)
    job = client.fine_tuning.jobs.create(
        model="tiny", training_file=file.id, hyperparameters={"n_epochs": 400, "batch_size": 4}
    )
    wait_for(client, job.id, "starting", "running")
    assert not workers(alone)
    with pytest.raises(openai.APIError, match="is needed elsewhere"):
        list(stream)
    with pytest.raises(openai.APIStatusError) as caught:
        answer(client)
    assert (caught.value.status_code, caught.value.code) == (503, "no_free_device")
    assert "None of the 1 CPU slots is free" in caught.value.message
    assert caught.value.response.headers["retry-after"] == "30"
    client.fine_tuning.jobs.cancel(job.id)
    wait_for(client, job.id, "cancelled")
    assert answer(client).choices[0].message.content
    alone.kill()
    wait_until(lambda: not workers(alone))


def test_a_worker_that_dies_is_replaced(alone: Server) -> None:
    client = alone.client()
    text = answer(client).choices[0].message.content
    (first,) = workers(alone)
    first.kill()
    assert answer(client).choices[0].message.content == text
    (second,) = workers(alone)
    assert second != first


def test_idle_models_leave_the_memory(own_server: Callable[..., Server]) -> None:
    server = own_server("--cpu-slots", "1", "--chat-idle-seconds", "1")
    answer(server.client())
    assert workers(server)
    wait_until(lambda: not workers(server))
    answer(server.client())


def long_answer(server: Server, **changes: Any) -> Any:
    """A stream of some minutes, which has begun."""
    stream = answer(server.client(), model="slow", stream=True, max_tokens=15_000, **changes)
    next(stream)
    return stream


def test_who_hangs_up_is_not_answered(alone: Server) -> None:
    stream = long_answer(alone)
    (worker,) = workers(alone)
    stream.close()
    begin = time.monotonic()
    assert answer(alone.client()).choices[0].message.content
    assert time.monotonic() - begin < 30
    assert workers(alone) == [worker], "it was told to stop, and did"

    with pytest.raises(openai.APITimeoutError):
        answer(alone.client(timeout=2), model="slow", max_tokens=15_000)
    assert answer(alone.client()).choices[0].message.content


def test_requests_wait_in_order(alone: Server) -> None:
    stream = long_answer(alone)
    ended: list[int] = []

    def ask(number: int) -> None:
        answer(alone.client())
        ended.append(number)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
        time.sleep(0.3)
    assert not ended
    stream.close()
    for thread in threads:
        thread.join(timeout=120)
    assert ended == [0, 1, 2]


def test_the_service_ends_while_it_answers(alone: Server) -> None:
    stream = long_answer(alone)
    begin = time.monotonic()
    alone.stop()
    assert time.monotonic() - begin < 15
    assert not workers(alone)
    with pytest.raises(openai.APIError, match="shutting down"):
        list(stream)
