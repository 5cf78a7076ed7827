"""From training rows to a chat answer with the unmodified `openai` client, over a service that is killed at every
stage."""

from __future__ import annotations

import csv
import io
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import toy
from tests.service.conftest import Server, wait_for, wait_until
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
