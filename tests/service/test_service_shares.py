"""`--jobs-per-gpu`: jobs that share GPUs, on described hosts. The real dispatcher leases the GPUs and starts the real
supervisors, whose runs find no such GPU, and fail."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import select

from pantheraml.base.errors import ConfigError
from pantheraml.devices import nvml
from pantheraml.devices.fake_nvml import FakeNvml
from pantheraml.planner.known_models import known_config
from pantheraml.planner.memory.reserved import CONTEXT_BYTES
from pantheraml.service import Settings, create_app
from pantheraml.service.context import ServiceContext
from pantheraml.service.jobs.inventory import take_inventory
from pantheraml.service.store.jobs import leases
from pantheraml.service.store.tables import Job
from tests import toy
from tests.service.conftest import PATIENCE_SECONDS, jsonl, new_database

Host = Callable[[str], FakeNvml]


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def make(cluster: str) -> FakeNvml:
        fake = FakeNvml(cluster)
        monkeypatch.setattr(nvml, "binding", fake)
        return fake

    return make


@contextlib.asynccontextmanager
async def serving(settings: Settings) -> AsyncIterator[tuple[httpx.AsyncClient, ServiceContext]]:
    app = create_app(settings)
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as http,
    ):
        yield http, app.state.context


async def upload(http: httpx.AsyncClient) -> str:
    file = {"file": jsonl(toy.arithmetic(24))}
    answer = await http.post("/v1/files", data={"purpose": "fine-tune"}, files=file)
    return str(answer.raise_for_status().json()["id"])


async def until(condition: Callable[[], Any]) -> Any:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not (value := await condition()):
            await asyncio.sleep(0.02)
    return value


@pytest.mark.parametrize("database", ["sqlite", pytest.param("postgresql", marks=pytest.mark.extended)])
def test_jobs_share_gpus(
    host: Host, models: Path, tmp_path: Path, request: pytest.FixtureRequest, database: str
) -> None:
    host("2xH200")
    url = new_database(request.getfixturevalue("postgresql")) if database == "postgresql" else None
    settings = Settings(tmp_path / "data", models, jobs_per_gpu=2, database_url=url, price_per_gpu_hour=2.0)

    async def check() -> None:
        async with serving(settings) as (http, context):
            out = {"action": "disable", "gpu_ids": [0, 1]}
            managed = (await http.post("/multigpu/resources/manage", json=out)).raise_for_status().json()
            assert [each["device"] for each in managed["devices"]] == ["gpu:0", "gpu:1"]
            file = await upload(http)
            jobs = []
            for processes in (2, 1, 1, 1):
                body = {"model": "tiny", "training_file": file, "pantheraml": {"processes": processes}}
                jobs.append((await http.post("/v1/fine_tuning/jobs", json=body)).raise_for_status().json()["id"])
            queue = (await http.get("/v1/queue")).json()["data"]
            assert "needs 2 of 2 devices; 0 free (gpu:0 disabled, gpu:1 disabled)" in queue[0]["waiting_reason"]
            await http.post("/multigpu/resources/manage", json={**out, "action": "enable"})

            async def held() -> dict[str, str] | None:
                async with context.database.read() as session:
                    found = {name: lease.job_id for name, lease in (await leases(session)).items()}
                return found if len(found) == 4 else None

            found = await until(held)
            wide, first, second, late = jobs
            assert found == {"gpu:0:1/2": wide, "gpu:1:1/2": wide, "gpu:0:2/2": first, "gpu:1:2/2": second}
            async with context.database.read() as session:
                assert await context.dispatcher._holders(session) == {0: 2, 1: 2}
            await check_answers(http, found, late)

            async def ended() -> bool:
                async with context.database.read() as session:
                    states = (await session.scalars(select(Job.state))).all()
                return set(states) == {"failed"} and not context.dispatcher._processes

            await until(ended)
            async with context.database.read() as session:
                assert await leases(session) == {}
        total = 141 << 30
        for name in jobs:
            parallel = json.loads((settings.jobs / name / "request.json").read_text())["config"]["parallel"]
            indices = parallel["device_ids"]
            assert len(set(indices)) == len(indices) == (2 if name == wide else 1), "two ranks on one GPU"
            assert 0.48 < parallel["memory_fraction"] < 0.5 - 0.9 * CONTEXT_BYTES / total

    asyncio.run(check())


async def check_answers(http: httpx.AsyncClient, held: dict[str, str], late: str) -> None:
    waits = (await http.get(f"/v1/fine_tuning/jobs/{late}")).json()
    assert waits["waiting_reason"] == "needs 1 of 2 devices; 0 free"
    first, second = (await http.get("/v1/gpus")).json()["data"]
    assert (first["device"], second["device"], first["jobs_at_most"]) == ("gpu:0", "gpu:1", 2)
    assert [each["job"] for each in first["holders"]] == [held["gpu:0:1/2"], held["gpu:0:2/2"]]
    stats = (await http.get("/multigpu/stats")).json()
    assert stats["available_gpus"] == []
    assert stats["gpu_info"][1]["jobs"] == [held["gpu:1:1/2"], held["gpu:1:2/2"]]
    status = (await http.get("/multigpu/resources/status")).json()
    assert ([each["device"] for each in status["devices"]], status["free"]) == (["gpu:0", "gpu:1"], 0)
    busy = await http.post("/multigpu/gpu/test", json={"gpu_ids": [1]})
    assert (busy.status_code, busy.json()["error"]["message"]) == (409, "In use by jobs, or disabled: gpu:1.")
    metrics = (await http.get("/metrics")).text
    assert metrics.count("pantheraml_gpu_in_use{") == 2, "one of each GPU, not of each share"
    wide = (await http.get(f"/v1/fine_tuning/jobs/{held['gpu:0:1/2']}")).json()
    usage = (await http.get("/v1/usage?group_by=job")).json()["data"]
    of_wide = next(each for each in usage if each["job"] == wide["id"])
    assert wide["cost"] == pytest.approx(2.0 * wide["gpu_hours"], abs=1e-5)
    assert of_wide["gpu_hours"] == pytest.approx(wide["gpu_hours"], abs=0.5 / 3600 * 2)


def test_a_job_that_was_planned_alone_gets_its_share(host: Host, models: Path, tmp_path: Path) -> None:
    """The service was started again with --jobs-per-gpu while the job was waiting."""
    host("1xH200")
    settings = Settings(tmp_path / "data", models)

    async def check() -> None:
        device = {"gpu_ids": [0]}
        async with serving(settings) as (http, _):
            await http.post("/multigpu/resources/manage", json={"action": "disable", **device})
            body = {"model": "tiny", "training_file": await upload(http)}
            job = (await http.post("/v1/fine_tuning/jobs", json=body)).raise_for_status().json()["id"]
        async with serving(replace(settings, jobs_per_gpu=2)) as (http, context):
            await http.post("/multigpu/resources/manage", json={"action": "enable", **device})

            async def ended() -> bool:
                state = (await http.get(f"/v1/fine_tuning/jobs/{job}")).json()["state"]
                return bool(state == "failed" and not context.dispatcher._processes)  # all are reaped

            await until(ended)
        parallel = json.loads((settings.jobs / job / "request.json").read_text())["config"]["parallel"]
        assert 0.48 < parallel["memory_fraction"] < 0.5

    asyncio.run(check())


def test_what_does_not_fit_into_a_share_is_refused(host: Host, tmp_path: Path) -> None:
    host("2xH200")
    large = toy.write_llama(tmp_path / "models" / "large")
    (large / "config.json").write_text(json.dumps(known_config("llama-3.1-70b")))

    async def check(jobs_per_gpu: int) -> httpx.Response:
        settings = Settings(tmp_path / str(jobs_per_gpu), tmp_path / "models", jobs_per_gpu=jobs_per_gpu)
        async with serving(settings) as (http, _):
            body = {"model": "large", "training_file": await upload(http), "pantheraml": {"processes": 1}}
            return await http.post("/v1/fine_tuning/jobs?dry_run=true", json=body)

    alone, refused = asyncio.run(check(1)), asyncio.run(check(4))
    assert alone.status_code == 200, alone.text
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (400, "does_not_fit")
    assert "GiB would be needed, and there are 34.8 GiB" in error["message"]
    assert error["message"].endswith("4 jobs share each GPU here, and its memory.")
    half = asyncio.run(check(2)).raise_for_status().json()
    assert half["plan"]["predicted_memory_bytes"] < 141 << 29
    assert half["predicted_seconds"] == pytest.approx(2 * half["plan"]["predicted_seconds"])
    assert "up to 2 jobs share a GPU" in half["plan"]["warnings"][-1]


def test_chat_takes_one_share(host: Host, models: Path, tmp_path: Path) -> None:
    host("2xH200")

    async def check() -> None:
        settings = Settings(tmp_path / "data", models, jobs_per_gpu=2)
        async with serving(settings) as (http, context):
            given_back = asyncio.Event()

            async def give_back() -> None:
                given_back.set()

            lent = await context.dispatcher.borrow(give_back)
            assert lent == "gpu:1:2/2"
            async with context.database.read() as session:
                assert await context.dispatcher._holders(session) == {1: 1}, "chat alone uses the energy of GPU 1"
            device = context.chat._device(lent)
            assert (device.gpu, device.memory_fraction) == (1, context.dispatcher.inventory.memory_fraction)
            await http.post("/multigpu/resources/manage", json={"action": "disable", "gpu_ids": [1]})
            async with asyncio.timeout(PATIENCE_SECONDS):
                await given_back.wait()
            assert await context.dispatcher.borrow(give_back) == "gpu:0:2/2"

    asyncio.run(check())


def test_leases_of_another_number_of_shares_are_respected(host: Host) -> None:
    """After a restart with another --jobs-per-gpu, adopted jobs still hold what they were started on."""
    host("2xH200")
    halves = take_inventory(None, 2)
    assert halves.devices == ("gpu:0:1/2", "gpu:0:2/2", "gpu:1:1/2", "gpu:1:2/2")
    assert halves.held({"gpu:1": "whole"}) == {"gpu:1:1/2": "whole", "gpu:1:2/2": "whole"}
    assert halves.held({"gpu:0:3/3": "third"}) == {"gpu:0:1/2": "third", "gpu:0:2/2": "third"}
    assert halves.held({"gpu:0:2/2": "half"}) == {"gpu:0:2/2": "half"}
    assert take_inventory(None).held({"gpu:1:2/2": "half"}) == {"gpu:1": "half"}


def test_too_many_jobs_per_gpu_are_refused(host: Host) -> None:
    host("1xT4")
    assert len(take_inventory(None, 8).devices) == 8
    with pytest.raises(ConfigError, match="too small for 16 jobs"):
        take_inventory(None, 16)


def test_an_option_for_other_machines_is_told(
    host: Host, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    host("1xH200")
    take_inventory(None, 2)
    assert not caplog.text
    take_inventory(2)
    assert "--cpu-slots has no effect" in caplog.text
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    caplog.clear()
    assert take_inventory(2, 2).devices == ("cpu:0", "cpu:1")
    assert "--jobs-per-gpu has no effect" in caplog.text
