"""What a user sets under `/multigpu` reaches jobs, on a described host with four GPUs; nothing is started there."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from pantheraml.devices.fake_nvml import FakeNvml
from pantheraml.service import Settings, create_app
from tests import toy
from tests.seed_blocks import read_blocks

Host = Callable[..., FakeNvml]
BODIES: list[dict[str, Any]] = [json.loads(body) for body in re.findall(r"-d '(.*?)'", read_blocks()["S4:231"], re.S)]
"""Of the document's curl commands: the configuration, and a training."""


@contextlib.asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[httpx.AsyncClient]:
    toy.write_llama(folder / "models" / "gpt2")
    app = create_app(Settings(folder / "data", folder / "models"))
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http,
    ):
        # no job may start: the GPUs are only described
        out = {"action": "disable", "gpu_ids": [0, 1, 2, 3]}
        (await http.post("/multigpu/resources/manage", json=out)).raise_for_status()
        yield http


async def config_of(http: httpx.AsyncClient, training_id: str) -> dict[str, Any]:
    from pantheraml.service.store.tables import Job

    app: Any = http._transport
    async with app.app.state.context.database.read() as session:
        job = await session.get_one(Job, training_id)
        return {**job.config, "gpu_ids": job.gpu_ids}


@pytest.mark.seed("S4-077", "S4-081", "S4-091", "S4-092", "S4-093", "S4-094")
def test_the_bodies_of_the_document(host: Host, tmp_path: Path) -> None:
    host("4xH200")

    async def check() -> None:
        async with serving(tmp_path) as http:
            stored = (await http.post("/multigpu/config", json=BODIES[0])).raise_for_status().json()
            assert {name: stored[name] for name in BODIES[0]} == BODIES[0]
            answer = await http.post("/multigpu/training/dataparallel", json=BODIES[1])
            assert answer.status_code == 200, answer.text
            job = answer.json()
            assert (job["training_type"], job["devices"], job["device"]) == ("dataparallel", 4, "cuda")
            assert job["hyperparameters"]["batch_size"] == 32, "8 on each of 4"
            config = await config_of(http, job["training_id"])
            assert config["gpu_ids"] == config["parallel"]["device_ids"] == [0, 1, 2, 3]
            assert config["data"]["seq_len"] == 512
            other = await http.post("/multigpu/training/distributed", json=BODIES[1])
            assert (other.status_code, other.json()["error"]["param"]) == (422, "training_type")

    asyncio.run(check())


@pytest.mark.seed("S4-096", "S4-097", "S4-098", "S4-099", "S4-100", "S4-101", "S4-103", "S4-104")
def test_every_field_reaches_the_job(host: Host, tmp_path: Path) -> None:
    host("4xH200")
    settings = {
        "gpu_ids": [1, 3],
        "distributed_training": True,
        "backend": "gloo",
        "batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 3,
        "sync_batch_norm": False,
        "mixed_precision": False,
        "memory_fraction": 0.5,
    }

    async def check() -> None:
        async with serving(tmp_path) as http:
            (await http.post("/multigpu/config", json=settings)).raise_for_status()
            body = {**BODIES[1], "training_type": "auto"}
            job = (await http.post("/multigpu/training/auto", json=body)).raise_for_status().json()
            config = await config_of(http, job["training_id"])
            assert config["gpu_ids"] == [1, 3]
            parallel = {name: config["parallel"][name] for name in ("mode", "world_size", "backend", "sync_bn")}
            assert parallel == {"mode": "distributed", "world_size": 2, "backend": "gloo", "sync_bn": False}
            assert config["parallel"]["memory_fraction"] == 0.5
            assert config["model"]["precision"] == "fp32"
            assert (config["train"]["micro_batch_size"], config["train"]["global_batch_size"]) == (2, 12)
            (await http.post("/multigpu/config", json={**settings, "use_multi_gpu": False})).raise_for_status()
            alone = (await http.post("/multigpu/training/auto", json=body)).raise_for_status().json()
            assert alone["devices"] == 1
            too_many = {**body, "training_config": {"world_size": 3}}
            refused = await http.post("/multigpu/training/auto", json=too_many)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "use_multi_gpu")

    asyncio.run(check())


@pytest.mark.seed("S4-016", "S4-090")
def test_recommendations_avoid_what_is_unwell(host: Host, tmp_path: Path) -> None:
    fake = host("4xH200")
    fake.gpus[1].ecc = (0, 1)
    fake.gpus[2].used_bytes = fake.gpus[2].total_bytes // 2

    async def check() -> None:
        async with serving(tmp_path) as http:
            found = (await http.get("/multigpu/gpu/recommendations")).json()
        assert found["config"]["gpu_ids"] == [0, 3]
        assert found["config"]["distributed_training"]
        advice = {each["name"]: each for each in found["recommendations"]}
        assert advice["gpu:1"]["value"] == advice["gpu:2"]["value"] == "avoid"
        assert "only 50 % of its memory is free" in advice["gpu:2"]["reason"]

    asyncio.run(check())
