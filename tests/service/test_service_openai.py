"""End to end with the unmodified `openai` client, to trained weights, over a service that is killed on the way."""

from __future__ import annotations

import csv
import io
import tarfile
from collections.abc import Callable
from typing import Any

import pytest

from tests import toy
from tests.service.conftest import Server, jsonl, wait_for, wait_until


@pytest.mark.seed("S4-023", "S4-024")
def test_a_job_ends_well_though_the_service_is_killed(own_server: Callable[..., Server]) -> None:
    server = own_server("--cpu-slots", "2")
    client = server.client()
    assert [model.id for model in client.models.list()] == ["tiny"]
    file = client.files.create(file=jsonl(toy.arithmetic(24)), purpose="fine-tune")
    assert client.files.wait_for_processing(file.id).status == "processed"
    hyperparameters = {"n_epochs": 4, "batch_size": 4}
    job = client.fine_tuning.jobs.create(
        model="tiny",
        training_file=file.id,
        suffix="sums",
        seed=3,
        metadata={"team": "a"},
        method={"type": "supervised", "supervised": {"hyperparameters": hyperparameters}},
        extra_body={"pantheraml": {"processes": 2}},
    )
    assert (job.status, job.seed, job.metadata) == ("queued", 3, {"team": "a"})
    assert job.hyperparameters.batch_size == 4
    wait_until(lambda: server.processes(job.id))

    server.kill()
    assert server.processes(job.id), "the job goes on without the service"
    server.start()
    client = server.client()

    done = wait_for(client, job.id, "succeeded")
    assert (done.status, done.starts, done.fine_tuned_model) == ("succeeded", 1, f"ft:tiny:local:sums:{job.id[-8:]}")
    assert not server.processes(job.id)
    assert client.models.retrieve(done.fine_tuned_model).owned_by == "local"
    events = client.fine_tuning.jobs.list_events(job.id, limit=100).data
    steps = [event.data["step"] for event in reversed(events) if event.type == "metrics"]
    assert steps == list(range(1, 25)), "each step once, though two services read them"
    (checkpoint,) = client.fine_tuning.jobs.checkpoints.list(job.id).data
    assert checkpoint.step_number == 24
    assert checkpoint.metrics.train_loss == events_loss(events, 24)

    metrics, adapter = (client.files.content(name).read() for name in done.result_files)
    rows = list(csv.DictReader(io.StringIO(metrics.decode())))
    assert [int(row["step"]) for row in rows] == steps
    assert float(rows[-1]["train_loss"]) < float(rows[0]["train_loss"])
    with tarfile.open(fileobj=io.BytesIO(adapter)) as archive:
        assert {"adapter/adapter_config.json", "adapter/adapter_model.safetensors"} <= set(archive.getnames())
    assert done.trained_tokens == sum(int(row["tokens"]) for row in rows)


def events_loss(events: list[Any], step: int) -> float:
    """Training loss that the events tell of a step."""
    figures = (event.data for event in events if event.kind == "train.step")
    return next(data["train_loss"] for data in figures if data["step"] == step)
