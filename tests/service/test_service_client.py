"""The typed client, sync and async, and `pantheraml jobs`, against a real service."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pantheraml.base.env import child_environment
from pantheraml.base.errors import ConfigError, DataError, ServiceError, ServiceUnavailableError
from pantheraml.cli.main import main
from pantheraml.client import AsyncClient, Client, Submission
from pantheraml.client.download import Download
from tests import toy
from tests.ports import reserved_port
from tests.service.conftest import Server, jsonl, wait_until
from tests.service.test_service_security import keys as keys_command


@pytest.fixture
def native(server: Server) -> Iterator[Client]:
    with Client(server.url, retries=0) as client:
        yield client


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return toy.write_jsonl(tmp_path / "train.jsonl", toy.arithmetic(24))


def cli(server: Server, *arguments: str) -> tuple[int, str, str]:
    """Exit code and output of `pantheraml jobs` in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "pantheraml.cli.main", "jobs", *arguments],
        env=child_environment(PANTHERAML_URL=server.url, PANTHERAML_API_KEY=None),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def write_checkpoint(server: Server, job: str) -> Path:
    folder = server.data / "jobs" / job / "run/checkpoints/step-1"
    folder.mkdir(parents=True)
    return folder


def test_files_jobs_and_models(native: Client, server: Server, data: Path, tmp_path: Path) -> None:
    file = native.files.upload(data)
    assert (file.rows, file.filename) == (24, "train.jsonl")
    assert native.files.get(file.id) == file
    assert file in native.files.list()
    assert native.files.download(file.id, tmp_path / "back.jsonl").read_bytes() == data.read_bytes()
    wanted = Submission(
        model="tiny", training_file=file.id, epochs=2, batch_size=4, hold=True, metadata={"of": "client"}
    )
    plan = native.jobs.plan(wanted)
    assert plan.plan.world_size == 1
    assert plan.hyperparameters["n_epochs"] == 2
    job = native.jobs.submit(wanted)
    assert (job.state, job.metadata, job.waiting_reason) == ("paused", {"of": "client"}, "it is paused; resume it")
    assert native.jobs.get(job.id).id == native.jobs.list(1)[0].id == job.id
    assert [event.kind for event in native.jobs.events(job.id)] == ["state"] * 3
    assert (native.jobs.artifacts(job.id), native.jobs.logs(job.id)) == ([], "")
    checkpoint = write_checkpoint(server, job.id)
    with pytest.raises(ServiceError, match="it continues from its checkpoints"):
        native.jobs.delete_checkpoints(job.id)
    assert native.jobs.cancel(job.id).has_ended
    native.jobs.delete_checkpoints(job.id)
    assert not checkpoint.exists()
    assert [event.message for event in native.jobs.stream(job.id)][-1] == "Cancelled"
    assert native.jobs.wait(job.id).state == "cancelled"
    native.files.delete(file.id)
    assert "tiny" in [model.id for model in native.models()]
    assert [device.device for device in native.gpus().data] == ["cpu:0", "cpu:1"]
    assert native.overview().user == "local"
    assert native.queue().data == []
    assert native.usage().price_per_gpu_hour is None


def test_what_is_refused_raises_the_class_that_the_service_had(native: Client, data: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.jsonl"
    wrong.write_text('{"text": "a"}\n{"text": 3}\n')
    with pytest.raises(DataError, match="Line 2"):
        native.files.upload(wrong)
    with pytest.raises(DataError, match="cannot be read"):
        native.files.upload(tmp_path / "nothing")
    file = native.files.upload(data).id
    for changes, kind, reason in (
        ({"config": {"method": {"rank": 0}}}, ConfigError, "method.rank"),
        ({"processes": 0}, ConfigError, "pantheraml.processes"),
        ({"model": "none"}, ServiceError, "can be fine-tuned here: tiny"),
        ({"processes": 3}, ServiceError, "needs 3 CPU slots"),
    ):
        with pytest.raises(kind, match=reason):
            native.jobs.plan(Submission(**{"model": "tiny", "training_file": file, **changes}))
    with pytest.raises(ServiceError, match="No such fine-tuning job") as caught:
        native.jobs.get("ftjob-nothing")
    assert (caught.value.status, caught.value.code) == (404, "not_found")
    assert (caught.value.request_id or "").startswith("req_")


def test_a_service_that_is_not_there() -> None:
    with reserved_port() as port:
        url = f"http://127.0.0.1:{port}"
        with Client(url, retries=1) as client, pytest.raises(ServiceUnavailableError, match="does not answer"):
            client.models()
    for wrong in ("localhost:8000", "ftp://host", "http://"):
        with pytest.raises(ConfigError, match="is not the URL"):
            Client(wrong)
    with pytest.raises(ConfigError, match="characters that no key has"):
        Client(url, "pml-\nx")


def test_another_server_is_no_service(server: Server) -> None:
    """Its answer is not taken for one."""
    with Client(f"{server.url}/healthz?", retries=0) as client, pytest.raises(ServiceError, match="did not answer"):
        client.models()


def test_keys(own_server: Callable[..., Server], tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = keys_command(tmp_path / "data", "create", "ann", "--scope", "read")["key"]
    server = own_server()
    with Client(server.url, retries=0) as client, pytest.raises(ServiceError, match="did not provide") as caught:
        client.models()
    assert "PANTHERAML_API_KEY" in str(caught.value)
    monkeypatch.setenv("PANTHERAML_API_KEY", key)
    monkeypatch.setenv("PANTHERAML_URL", f"{server.url}/v1")
    with Client(retries=0) as client:
        assert client.overview().scopes == ["read"]
        with pytest.raises(ServiceError, match="scope `submit`"):
            client.files.upload(data)


def test_a_broken_download_goes_on(native: Client, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    toy.write_jsonl(rows, toy.arithmetic(2000))
    file, whole = native.files.upload(rows), rows.read_bytes()
    target = tmp_path / "out" / "rows.jsonl"
    with native.http.stream("GET", f"/v1/files/{file.id}/content") as answer:
        part = Download(target, answer.headers["etag"]).part
    part.parent.mkdir()
    part.write_bytes(whole[:10_000])
    asked: list[str] = []
    native.http.event_hooks = {"request": [lambda request: asked.append(request.headers.get("range", ""))]}
    assert native.files.download(file.id, target).read_bytes() == whole
    assert asked == ["bytes=0-0", "bytes=10000-"]
    assert list(target.parent.iterdir()) == [target]
    Download(target, '"another version"').part.write_bytes(b"x" * 20_000)
    native.http.event_hooks = {"request": []}
    assert native.files.download(file.id, target).read_bytes() == whole
    assert list(target.parent.iterdir()) == [target]


def test_a_planted_piece_of_a_download_is_not_used(native: Client, tmp_path: Path) -> None:
    """In a folder that others can write to, they know the name of the piece if they know the file."""
    rows, target, victim = tmp_path / "rows.jsonl", tmp_path / "back.jsonl", tmp_path / "victim"
    toy.write_jsonl(rows, toy.arithmetic(500))
    file, whole = native.files.upload(rows), rows.read_bytes()
    with native.http.stream("GET", f"/v1/files/{file.id}/content") as answer:
        part = Download(target, answer.headers["etag"]).part
    victim.write_bytes(b"precious")
    part.symlink_to(victim)
    assert native.files.download(file.id, target).read_bytes() == whole
    assert victim.read_bytes() == b"precious"
    assert not target.is_symlink()
    if os.geteuid() == 0:
        part.write_bytes(b"x" * 100)
        os.chown(part, 12345, 12345)
        assert native.files.download(file.id, target).read_bytes() == whole
        assert target.stat().st_uid == 0


def test_the_asynchronous_client(server: Server, data: Path, tmp_path: Path) -> None:
    async def use() -> None:
        async with AsyncClient(server.url, retries=0) as client:
            file = await client.files.upload(data)
            job = await client.jobs.submit(Submission(model="tiny", training_file=file.id, hold=True))
            assert (await client.jobs.list(1))[0].id == job.id
            assert (await client.jobs.plan(Submission(model="tiny", training_file=file.id))).plan.world_size == 1
            assert (await client.jobs.cancel(job.id)).state == "cancelled"
            checkpoint = write_checkpoint(server, job.id)
            await client.jobs.delete_checkpoints(job.id)
            assert not checkpoint.exists()
            assert [event.message async for event in client.jobs.stream(job.id)][-1] == "Cancelled"
            assert (await client.jobs.wait(job.id)).state == "cancelled"
            assert [text async for text in client.jobs.follow_logs(job.id)] == []
            path = await client.files.download(file.id, tmp_path / "back.jsonl")
            assert path.read_bytes() == data.read_bytes()
            assert (await client.queue()).data == []
            assert (await client.overview()).queued == 0
            with pytest.raises(ServiceError, match="No such"):
                await client.jobs.get("ftjob-nothing")

    asyncio.run(use())


def test_the_commands_print(server: Server, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*arguments: str) -> str:
        capsys.readouterr()
        assert main(["jobs", *arguments, "--url", server.url]) == 0, capsys.readouterr().err
        return capsys.readouterr().out

    common = ("--model", "tiny", "--data", str(data), "--epochs", "2")
    plan = run("submit", *common, "--dry-run")
    assert "settings  n_epochs 2" in plan
    job = run("submit", *common, "--hold", "--set", "method.rank=4").strip()
    assert run("list", "--limit", "1").splitlines()[1].split()[:3] == [job, "paused", "tiny"]
    shown = run("show", job)
    assert "why it waits      it is paused; resume it" in shown
    assert json.loads(run("show", job, "--json"))["id"] == job
    assert run("logs", job) == ""
    assert run("pause", job) == f"{job} paused\n"
    assert run("cancel", job) == f"{job} cancelled\n"
    assert json.loads(run("list", "--json"))[0]["state"] == "cancelled"
    assert main(["jobs", "watch", job, "--url", server.url]) == 130
    assert main(["jobs", "download", job, "--url", server.url]) == 2
    assert "written nothing yet" in capsys.readouterr().err
    assert main(["jobs", "show", "ftjob-nothing", "--url", server.url]) == 12
    told = capsys.readouterr().err
    assert "ServiceError: No such fine-tuning job" in told
    assert "Traceback" not in told


@pytest.mark.extended
def test_from_submission_to_weights_by_commands(server: Server, data: Path, tmp_path: Path) -> None:
    code, job, told = cli(
        server, "submit", "--model", "tiny", "--data", str(data), "--epochs", "2", "--batch-size", "4"
    )
    assert code == 0, told
    job = job.strip()
    code, output, told = cli(server, "watch", job)
    assert code == 0, told
    assert "Step 12: training loss=" in output
    assert f"{job} succeeded: ft:tiny:local::" in output
    code, output, _ = cli(server, "download", job, "--output", str(tmp_path / "out"))
    assert code == 0
    assert (tmp_path / "out/adapter/adapter_model.safetensors").stat().st_size > 0
    assert str(tmp_path / "out/report.html") in output
    _, shown, _ = cli(server, "show", job)
    assert "artifact          adapter/adapter_model.safetensors" in shown
    code, _, told = cli(server, "download", job, "../request.json")
    assert (code, "has no file" in told) == (2, True)


@pytest.mark.extended
def test_a_stream_outlives_the_service(own_server: Callable[..., Server]) -> None:
    """It reconnects, and tells each event once."""
    with reserved_port() as port, Client(f"http://127.0.0.1:{port}", retries=8) as client:
        server = own_server("--port", str(port), "--cpu-slots", "1")
        file = server.client().files.create(file=jsonl(toy.arithmetic(24)), purpose="fine-tune").id
        job = client.jobs.submit(Submission(model="tiny", training_file=file, epochs=30, batch_size=4)).id
        told: list[Any] = []
        reader = threading.Thread(target=lambda: told.extend(client.jobs.stream(job)))
        reader.start()
        wait_until(lambda: "Step 3:" in str(client.jobs.events(job)))
        server.kill()
        server.start()
        reader.join(200)
        assert not reader.is_alive()
        steps = [event.data["step"] for event in told if event.kind == "train.step"]
        assert steps == list(range(1, 181))
        assert client.jobs.get(job).state == "succeeded"
        assert "".join(client.jobs.follow_logs(job)) == client.jobs.logs(job)
        series = client.jobs.series(job, points=10)
        assert (series.total, len(series.steps)) == (180, 10)


@pytest.mark.extended
def test_folders_may_be_named_as_seen_from_here(own_server: Callable[..., Server], data: Path, models: Path) -> None:
    """As the documentation does: the processes of jobs work in other folders."""
    here, there = (Path(os.path.relpath(path)) for path in (data.parent / "service-data", models))
    server = own_server("--cpu-slots", "1", data=here, models_dir=there)
    with Client(server.url) as client:
        file = client.files.upload(data).id
        job = client.jobs.submit(Submission(model="tiny", training_file=file, epochs=1, batch_size=8)).id
        ended = client.jobs.wait(job)
        assert (ended.state, ended.error) == ("succeeded", None)
