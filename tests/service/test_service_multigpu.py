"""`/multigpu`, at its two places: the state of the devices, and training on the texts of a request."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from pantheraml.base.errors import ConfigError
from pantheraml.devices.probe import probe
from pantheraml.service import FineTuningService, Settings, lifespan, router
from tests.service.conftest import Server

BODY: dict[str, Any] = {
    "model_name": "tiny",
    "dataset_config": {"texts": ["1+1=2", "1+2=3", "2+2=4", "2+3=5"], "max_length": 64},
    "training_config": {"epochs": 2, "learning_rate": 5e-5, "batch_size_per_gpu": 1},
    "user_id": 123,
}


@pytest.mark.seed("S4-076", "S4-079", "S4-080", "S4-086", "S4-095")
@pytest.mark.parametrize("prefix", ["/multigpu", "/api/v1/multigpu"])
def test_devices_are_shown_as_they_are(server: Server, prefix: str) -> None:
    gpus = probe().gpus
    with server.http() as http:
        health = http.get(f"{prefix}/health").raise_for_status().json()
        assert (health["status"], health["gpu_count"], health["gpu_available"]) == ("healthy", len(gpus), bool(gpus))
        stats = http.get(f"{prefix}/stats").raise_for_status().json()
        assert [gpu["name"] for gpu in stats["gpu_info"]] == [gpu.name for gpu in gpus]
        assert stats["available_gpus"] == [gpu.index for gpu in gpus]
        missing = http.get(f"{prefix}/gpu/99/stats")
        assert (missing.status_code, missing.json()["error"]["message"]) == (404, "No such GPU: 99")
        resources = http.get(f"{prefix}/resources/status").raise_for_status().json()
        assert len(resources["devices"]) == (len(gpus) or 2)
        assert http.get(f"{prefix}/performance/metrics").raise_for_status().json()["jobs"] == []


@pytest.mark.extended
@pytest.mark.seed("S4-082", "S4-083", "S4-088", "S4-093")
def test_training_on_texts(server: Server) -> None:
    with server.http(timeout=250) as http:
        answers = []
        for kind in ("auto", "distributed"):
            body = {**BODY, "training_type": kind}
            answer = http.post(f"/multigpu/training/{kind}", json=body, params={"wait": True})
            answers.append(answer.raise_for_status().json())
        assert [answer["status"] for answer in answers] == ["succeeded", "succeeded"]
        assert [answer["devices"] for answer in answers] == [1, 2]
        assert [answer["training_type"] for answer in answers] == ["auto", "distributed"]
        assert [answer["hyperparameters"]["batch_size"] for answer in answers] == [1, 2]
        assert all(answer["trained_tokens"] and answer["fine_tuned_model"] for answer in answers)
        history = http.get("/multigpu/training/history").json()["history"]
        assert [job["training_id"] for job in history[:2]] == [answer["training_id"] for answer in reversed(answers)]
        rate = http.get(f"/v1/fine_tuning/jobs/{answers[0]['training_id']}/series", params={"metric": "learning_rate"})
        assert max(rate.json()["values"]) == pytest.approx(5e-5)


@pytest.mark.parametrize(
    ("kind", "changes", "status", "param"),
    [
        ("auto", {"training_type": "distributed"}, 422, "training_type"),
        ("auto", {"model_name": "gpt2"}, 400, "model"),
        ("auto", {"dataset_config": {"texts": []}}, 400, "dataset_config.texts"),
        ("auto", {"dataset_config": {"texts": ["  "]}}, 400, "dataset_config.texts"),
        ("auto", {"training_config": {"epochs": 0}}, 400, "training_config.epochs"),
        ("auto", {"training_config": {"optimizer": "x"}}, 400, "training_config.optimizer"),
        ("distributed", {"training_config": {"world_size": 3}}, 400, "pantheraml.processes"),
    ],
)
def test_what_cannot_be_trained_is_refused(
    server: Server, kind: str, changes: dict[str, Any], status: int, param: str
) -> None:
    before = sorted(server.data.joinpath("files").iterdir())
    with server.http() as http:
        answer = http.post(f"/multigpu/training/{kind}", json={**BODY, **changes})
    assert sorted(server.data.joinpath("files").iterdir()) == before
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


@pytest.mark.skipif(len(probe().gpus) >= 2, reason="for machines where it cannot work")
def test_dataparallel_needs_gpus(server: Server) -> None:
    with server.http() as http:
        answer = http.post("/multigpu/training/dataparallel", json=BODY)
    assert answer.status_code == 400
    assert "needs at least two GPUs" in answer.json()["error"]["message"]


@pytest.mark.seed("S4-147", "S4-148")
def test_the_router_in_an_application_of_ones_own(models: Path, tmp_path: Path) -> None:
    async def ask() -> list[int]:
        app = FastAPI(lifespan=lifespan(Settings(tmp_path / "data", models)))
        app.include_router(router, prefix="/api/v1")
        async with app.router.lifespan_context(app), httpx.AsyncClient(transport=httpx.ASGITransport(app)) as http:
            paths = ("/api/v1/multigpu/health", "/multigpu/health", "/api/v1/multigpu/gpu/99/stats")
            return [(await http.get(f"http://localhost{path}")).status_code for path in paths]

    assert asyncio.run(ask()) == [200, 404, 404]


@pytest.mark.extended
@pytest.mark.seed("S4-068", "S4-069", "S4-070", "S4-072", "S4-073", "S4-074", "S4-075")
def test_the_service_without_a_server(models: Path, tmp_path: Path) -> None:
    async def work() -> dict[str, Any]:
        async with FineTuningService(Settings(tmp_path / "data", models, cpu_slots=2)) as service:
            stats = await service.get_gpu_stats()
            assert stats["available_gpus"] == [gpu.index for gpu in probe().gpus]
            assert len(stats["gpu_info"]) == len(probe().gpus)
            with pytest.raises(ConfigError, match="no model 'gpt2'"):
                await service.prepare_dataset(texts=["a"], model_name="gpt2", max_length=512)
            dataset = await service.prepare_dataset(texts=["1+1=2", "1+2=3"], model_name="tiny", max_length=64)
            with pytest.raises(ConfigError, match="needs 3 CPU slots"):
                await service.finetune_model_distributed("tiny", dataset, {"epochs": 1}, user_id=123, world_size=3)
            return await service.finetune_model_multi_gpu(
                model_name="tiny", dataset=dataset, training_config={"epochs": 1, "batch_size_per_gpu": 1}, user_id=123
            )

    result = asyncio.run(work())
    assert (result["status"], result["user_id"]) == ("succeeded", "123")
    assert result["fine_tuned_model"].startswith("ft:tiny:123::")
