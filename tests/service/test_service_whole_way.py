"""From training rows to a chat answer with the unmodified `openai` client, over a service that is killed at every
stage."""

from __future__ import annotations

import asyncio
import csv
import io
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from tests import toy
from tests.service.conftest import PATIENCE_SECONDS, Server, jsonl, wait_for, wait_until
from tests.service.test_service_chat_worker import workers

ASK: Any = [{"role": "user", "content": "what is it?"}]


@pytest.mark.extended
def test_upload_tune_and_chat_though_the_service_is_killed(own_server: Callable[..., Server], tmp_path: Path) -> None:
    server = own_server("--cpu-slots", "2")
    client = server.client()
    rows = [{"messages": [*ASK, {"role": "assistant", "content": "a panther"}]}] * 16
    upload = client.uploads.upload_file_chunked(
        file=toy.write_jsonl(tmp_path / "rows.jsonl", rows),
        mime_type="application/jsonl",
        purpose="fine-tune",
        part_size=500,
    )
    assert upload.file is not None
    job = client.fine_tuning.jobs.create(
        model="tiny",
        training_file=upload.file.id,
        seed=1,
        hyperparameters={"n_epochs": 60, "batch_size": 8, "learning_rate_multiplier": 50},
        extra_body={"pantheraml": {"processes": 2}},
    )
    with server.suspended_in_training(client, job.id):
        server.kill()
        assert server.processes(job.id), "its processes are left alone"
        server.start()
    client = server.client()
    done = wait_for(client, job.id, "succeeded")
    assert (done.starts, done.processes) == (1, 2)
    events = client.fine_tuning.jobs.list_events(job.id, limit=200).data
    steps = [event.data["step"] for event in reversed(events) if event.type == "metrics"]
    assert steps == list(range(1, 121)), "each once"

    metrics, adapter = (client.files.content(name).read() for name in done.result_files)
    assert len(list(csv.DictReader(io.StringIO(metrics.decode())))) == 120
    with tarfile.open(fileobj=io.BytesIO(adapter)) as archive:
        assert "adapter/adapter_model.safetensors" in archive.getnames()

    ask = {"model": done.fine_tuned_model, "messages": ASK, "temperature": 0, "max_tokens": 30}
    stream = client.chat.completions.create(**ask, stream=True)
    next(stream)
    server.kill()
    stream.close()
    wait_until(lambda: not workers(server))
    server.start()
    said = server.client().chat.completions.create(**ask).choices[0]
    assert (said.message.content, said.finish_reason) == ("a panther", "stop")
    server.stop()
    assert not workers(server)
    assert not server.processes()


@pytest.mark.extended
def test_the_asynchronous_client_goes_all_the_way(own_server: Callable[..., Server]) -> None:
    server = own_server("--cpu-slots", "1")
    rows = [{"messages": [*ASK, {"role": "assistant", "content": "a panther"}]}] * 4

    async def go() -> None:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
            jobs = client.fine_tuning.jobs
            file = await client.files.create(file=jsonl(rows), purpose="fine-tune")
            assert (await client.files.wait_for_processing(file.id)).status == "processed"
            job = await jobs.create(model="tiny", training_file=file.id, hyperparameters={"n_epochs": 2})
            async with asyncio.timeout(PATIENCE_SECONDS):
                while job.status not in ("succeeded", "failed"):
                    await asyncio.sleep(0.1)
                    job = await jobs.retrieve(job.id)
            assert job.status == "succeeded", job.error
            events = [event async for event in jobs.list_events(job.id, limit=5)]
            assert [event.data["step"] for event in events if event.type == "metrics"] == [2, 1]
            assert [point.step_number async for point in jobs.checkpoints.list(job.id)] == [2]
            metrics = await client.files.content(job.result_files[0])
            assert len(list(csv.DictReader(io.StringIO(metrics.text)))) == 2
            assert job.fine_tuned_model in [model.id async for model in client.models.list()]
            ask: Any = {"model": job.fine_tuned_model, "messages": ASK, "temperature": 0, "max_tokens": 4}
            whole = await client.chat.completions.create(**ask)
            pieces = [chunk async for chunk in await client.chat.completions.create(**ask, stream=True)]
            told = "".join(chunk.choices[0].delta.content or "" for chunk in pieces)
            assert told == whole.choices[0].message.content

    asyncio.run(go())
    server.stop()
    assert not workers(server)
