"""Watching jobs: live events, series, logs, artifacts, the plan; and what a failed run leaves."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI, OpenAI

from tests import toy
from tests.service.conftest import Server, jsonl, wait_for, wait_until
from tests.service.test_service_control import submit

pytestmark = pytest.mark.extended


def read_stream(server: Server, job_id: str, last: str | None = None, until: str = "end") -> list[dict[str, Any]]:
    """Server-sent events up to the first of the kind `until`."""
    headers = {} if last is None else {"Last-Event-ID": last}
    found: list[dict[str, Any]] = []
    with server.http() as http, http.stream("GET", f"/v1/fine_tuning/jobs/{job_id}/stream", headers=headers) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        event: dict[str, Any] = {}
        for line in answer.iter_lines():
            name, _, value = line.partition(": ")
            if name in ("id", "event", "data"):
                event[name] = json.loads(value) if name == "data" else value
            elif not line and event:
                found.append(event)
                if event.get("event") == until:
                    break
                event = {}
    return found


@pytest.fixture(scope="session")
def watched(server: Server) -> Iterator[dict[str, Any]]:
    """A job that has ended, and what its live stream told meanwhile."""
    with server.client() as client:
        file = client.files.create(file=jsonl(toy.arithmetic(24)), purpose="fine-tune").id
        held = client.files.create(file=jsonl(toy.arithmetic(8, seed=1)), purpose="fine-tune").id
        job: Any = client.fine_tuning.jobs.create(
            model="tiny",
            training_file=file,
            validation_file=held,
            hyperparameters={"n_epochs": 3, "batch_size": 4},
            extra_body={"pantheraml": {"config": {"train": {"eval_every_steps": 6}}}},
        )
        told: list[dict[str, Any]] = []
        reader = threading.Thread(target=lambda: told.extend(read_stream(server, job.id)))
        reader.start()
        done = wait_for(client, job.id, "succeeded")
        reader.join(60)
        yield {"id": job.id, "told": told, "job": done}


def test_the_live_stream_tells_everything_once(server: Server, client: OpenAI, watched: dict[str, Any]) -> None:
    told = watched["told"]
    listed = client.fine_tuning.jobs.list_events(watched["id"], limit=1000).data
    assert [event["id"] for event in told[:-1]] == [event.id for event in reversed(listed)]
    assert told[-1] == {"event": "end", "data": {"state": "succeeded"}}
    middle = told[len(told) // 2]["id"]
    again = read_stream(server, watched["id"], last=middle)
    assert [event.get("id") for event in again] == [event.get("id") for event in told[len(told) // 2 + 1 :]]


def test_series_are_thinned_and_go_on_from_a_cursor(server: Server, watched: dict[str, Any]) -> None:
    with server.http(params={}) as http:
        path = f"/v1/fine_tuning/jobs/{watched['id']}/series"
        whole = http.get(path).raise_for_status().json()
        assert whole["steps"] == list(range(1, 19))
        few = http.get(path, params={"points": 6}).json()
        assert (few["total"], len(few["steps"])) == (18, 6)
        assert max(whole["values"]) in few["values"]
        assert min(whole["values"]) in few["values"]
        later = http.get(path, params={"after": whole["cursor"]}).json()
        assert (later["steps"], later["cursor"]) == ([], whole["cursor"])
        held_out = http.get(path, params={"metric": "valid_loss"}).json()
        assert held_out["steps"] == [6, 12, 18]


def test_logs_and_artifacts_by_range(server: Server, watched: dict[str, Any]) -> None:
    base = f"/v1/fine_tuning/jobs/{watched['id']}"
    with server.http() as http:
        log = http.get(f"{base}/logs")
        end = http.get(f"{base}/logs", headers={"Range": "bytes=-5"})
        assert end.status_code in ((206,) if len(log.content) >= 5 else (200, 416))
        names = {item["name"]: item["bytes"] for item in http.get(f"{base}/artifacts").json()["data"]}
        assert {"report.html", "run.json", "adapter/adapter_model.safetensors"} <= names.keys()
        weights = http.get(f"{base}/artifacts/adapter/adapter_model.safetensors")
        assert len(weights.content) == names["adapter/adapter_model.safetensors"]
        part = http.get(f"{base}/artifacts/run.json", headers={"Range": "bytes=0-0"})
        assert (part.status_code, part.content) == (206, b"{")
        assert http.get(f"{base}/plan").json()["world_size"] == 1
        for name in ("config.yaml", "../request.json", "..%2Frequest.json", "adapter/../config.yaml", "events.jsonl"):
            assert http.get(f"{base}/artifacts/{name}").status_code == 404, name


def test_checkpoints_carry_the_figures_of_their_step(server: Server, client: OpenAI, watched: dict[str, Any]) -> None:
    """Each that still exists, once."""
    found = client.fine_tuning.jobs.checkpoints.list(watched["id"]).data
    folder = server.data / "jobs" / watched["id"] / "run" / "checkpoints"
    on_disk = sorted(int(path.name.removeprefix("step-")) for path in folder.glob("step-*"))
    assert [checkpoint.step_number for checkpoint in reversed(found)] == on_disk
    assert all(checkpoint.metrics.valid_loss is not None for checkpoint in found)
    assert all(checkpoint.metrics.train_loss is not None for checkpoint in found)


@pytest.mark.extended
def test_lines_of_a_run_that_cannot_be_read_are_told_once(server: Server, client: OpenAI, training_file: str) -> None:
    job = submit(client, training_file, epochs=10_000).id
    wait_for(client, job, "running")
    with open(server.data / "jobs" / job / "run" / "events.jsonl", "ab") as stream:
        stream.write(b"{}\nnothing\n")

    def told() -> list[Any]:
        events = client.fine_tuning.jobs.list_events(job, limit=10_000).data
        return [event for event in events if event.kind == "events.damaged"]  # type: ignore[attr-defined]

    wait_until(told)
    client.fine_tuning.jobs.cancel(job)
    wait_for(client, job, "cancelled")
    (event,) = told()
    assert (event.level, event.data) == ("warn", {"lines": 2})
    assert event.message.startswith("2 line(s) of events.jsonl cannot be read")


def test_a_run_that_fails_says_why(own_server: Callable[..., Server], models: Path, tmp_path: Path) -> None:
    """The weights are damaged, which only the run finds out."""
    broken = tmp_path / "models" / "broken"
    shutil.copytree(models / "tiny", broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    server = own_server(models_dir=broken.parent)
    client = server.client()
    file = client.files.create(file=jsonl(toy.arithmetic(4)), purpose="fine-tune").id
    job = client.fine_tuning.jobs.create(model="broken", training_file=file)
    ended: Any = wait_for(client, job.id, "failed")
    assert (ended.status, ended.error.code, ended.starts) == ("failed", "ModelError", 1)
    assert "model.safetensors" in ended.error.message
    assert (ended.fine_tuned_model, ended.result_files) == (None, [])
    assert ended.finished_at is not None
    assert client.fine_tuning.jobs.list_events(job.id).data[0].level == "error"
    assert not server.processes(job.id)


async def _with_the_asynchronous_client(url: str, file: str) -> str:
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client:
        job = await client.fine_tuning.jobs.create(
            model="tiny", training_file=file, extra_body={"pantheraml": {"hold": True}}
        )
        assert (await client.fine_tuning.jobs.retrieve(job.id)).status == "queued"
        return (await client.fine_tuning.jobs.cancel(job.id)).status


def test_the_asynchronous_client(server: Server, training_file: str) -> None:
    assert asyncio.run(_with_the_asynchronous_client(server.url, training_file)) == "cancelled"
