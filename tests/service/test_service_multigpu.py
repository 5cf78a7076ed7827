"""`/multigpu`, at its two places: the state of the devices, and training on the texts of a request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from pantheraml.base.errors import ConfigError
from pantheraml.devices.probe import probe
from pantheraml.service import FineTuningService, Settings, lifespan, router
from pantheraml.service.schemas.multigpu import TrainingConfig
from pantheraml.specs.gpu_config import GPUConfig
from tests.service.conftest import Server, wait_until

BODY: dict[str, Any] = {
    "model_name": "tiny",
    "dataset_config": {"texts": ["1+1=2", "1+2=3", "2+2=4", "2+3=5"], "max_length": 64},
    "training_config": {"epochs": 2, "learning_rate": 5e-5, "batch_size_per_gpu": 1},
    "user_id": 123,
}


@pytest.mark.seed("S4-022", "S4-024", "S4-076", "S4-079", "S4-080", "S4-086", "S4-087", "S4-095")
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
        metrics = http.get(f"{prefix}/performance/metrics").raise_for_status().json()
        assert sorted(metrics) == ["gpu_utilization", "gpus", "jobs", "memory_utilization", "timestamp"]
        assert len(metrics["gpus"]) == len(gpus)


@pytest.mark.extended
@pytest.mark.seed("S4-082", "S4-083", "S4-088", "S4-093", "C24", "C25")
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
        ("auto", {"training_config": {"learning_rate": True}}, 400, "training_config.learning_rate"),
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


@pytest.mark.seed("S4-077", "S4-078", "S4-084", "S4-091", "S4-092", "S4-023", "C25")
def test_settings_are_kept(own_server: Callable[..., Server], models: Path) -> None:
    """Also when the service starts again."""
    server = own_server("--cpu-slots", "1")
    body = {"use_multi_gpu": False, "batch_size_per_gpu": 4, "mixed_precision": False, "memory_fraction": 0.8}
    with server.http() as http:
        assert http.get("/multigpu/config").json() == GPUConfig().model_dump()
        answer = http.post("/multigpu/config", json=body).raise_for_status().json()
        assert answer == {**GPUConfig().model_dump(), **body}
        for changes, says in (
            ({"memory_fraction": 1.5}, "memory_fraction"),
            ({"batch_size_per_gpu": 0}, "batch_size_per_gpu"),
            ({"batch_size_per_gpu": 1 << 40}, "batch_size_per_gpu"),
            ({"gpus": 4}, "no field `gpus`"),
            ({"gpu_ids": [99]}, "There is no GPU 99"),
        ):
            refused = http.post("/multigpu/config", json=changes)
            assert refused.status_code == 400
            assert says in refused.json()["error"]["message"]
        assert http.post("/multigpu/training/config", json={"epochs": 0}).status_code == 400
        given = {"epochs": 1, "learning_rate": 1e-3}
        http.post("/multigpu/training/config", json=given).raise_for_status()
    server.stop()
    with own_server("--cpu-slots", "1").http() as http:
        assert http.get("/multigpu/config").json() == answer
        assert http.get("/multigpu/training/config").json() == {**TrainingConfig().model_dump(), **given}
        alone = http.post("/multigpu/training/distributed", json=BODY)
        assert (alone.status_code, alone.json()["error"]["param"]) == (400, "use_multi_gpu")
        http.post("/multigpu/config", json={**body, "gradient_accumulation_steps": 1 << 40}).raise_for_status()
        large = http.post("/multigpu/training/auto", json=BODY)
        assert (large.status_code, large.json()["error"]["param"]) == (400, "hyperparameters.batch_size")
        http.post("/multigpu/config", json=body).raise_for_status()
        later = {**BODY, "training_config": {"learning_rate": 2e-3}}
        job = http.post("/multigpu/training/auto", json=later).raise_for_status().json()
        assert job["hyperparameters"] == {"n_epochs": 1, "batch_size": 4, "learning_rate_multiplier": 10.0}
        plan = http.get(f"/v1/fine_tuning/jobs/{job['training_id']}/plan").json()
        assert (plan["precision"], plan["global_batch_size"], plan["micro_batch_size"]) == ("fp32", 4, 4)
        http.post(f"/v1/fine_tuning/jobs/{job['training_id']}/cancel").raise_for_status()
        wait_until(lambda: http.get("/multigpu/training/history").json()["history"][0]["status"] == "cancelled")


@pytest.mark.extended
@pytest.mark.seed("S4-025", "S4-036", "S4-085", "S4-089", "S4-127")
def test_devices_are_tested_and_taken_out_of_use(own_server: Callable[..., Server]) -> None:
    server = own_server("--cpu-slots", "2")
    with server.http(timeout=250) as http:
        done = http.post("/multigpu/gpu/test", json={"processes": 2}).raise_for_status().json()
        assert (done["status"], done["processes"], done["steps"], done["error"]) == ("passed", 2, 2, None)
        assert done["devices"] == ["cpu:0", "cpu:1"]
        assert done["loss"] > 0
        out = {"action": "disable", "devices": ["cpu:0"], "reason": "a new fan"}
        http.post("/multigpu/resources/manage", json=out).raise_for_status()
        (first, second) = (status := http.get("/multigpu/resources/status").json())["devices"]
        assert (first["enabled"], first["reason"], second["enabled"], status["free"]) == (False, "a new fan", True, 1)
        refused = http.post("/multigpu/gpu/test", json={"processes": 2})
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "devices_in_use")
        body = {**BODY, "training_config": {"epochs": 1, "batch_size_per_gpu": 1}}
        job = http.post("/multigpu/training/distributed", json=body).raise_for_status().json()
        path = f"/v1/fine_tuning/jobs/{job['training_id']}"
        wait_until(lambda: http.get(path).json()["waiting_reason"] == "needs 2 of 2 devices; 1 free (cpu:0 disabled)")
        alone = http.post("/multigpu/gpu/test").raise_for_status().json()
        assert (alone["status"], alone["devices"]) == ("passed", ["cpu:1"])
        http.post("/multigpu/resources/manage", json={**out, "action": "enable"}).raise_for_status()
        wait_until(lambda: http.get(path).json()["state"] in ("starting", "running", "succeeded"))
        http.post(f"{path}/cancel")
        wait_until(lambda: http.get(path).json()["state"] in ("cancelled", "succeeded"))
        assert [model["id"] for model in http.get("/v1/models").json()["data"] if "gpu-test" in model["id"]] == []


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("resources/manage", {"action": "disable"}, 400, "name some gpu_ids or devices"),
        ("resources/manage", {"action": "sell", "devices": ["cpu:0"]}, 400, "action"),
        ("resources/manage", {"action": "disable", "devices": ["cpu:9"]}, 404, "No such device: cpu:9"),
        ("resources/manage", {"action": "disable", "gpu_ids": [9]}, 404, "No such device: gpu:9"),
        ("gpu/test", {"gpu_ids": [9]}, 400, "There is no GPU 9"),
        ("gpu/test", {"processes": 3000}, 400, "but processes is 3000"),
    ],
)
def test_devices_that_are_not_there(server: Server, path: str, body: Any, status: int, says: str) -> None:
    with server.http() as http:
        answer = http.post(f"/multigpu/{path}", json=body)
    assert answer.status_code == status
    assert says in answer.json()["error"]["message"]


@pytest.mark.seed("S4-026", "S4-090", "S4-134")
def test_recommendations_have_reasons(server: Server) -> None:
    with server.http() as http:
        found = http.get("/multigpu/gpu/recommendations").raise_for_status().json()
        of_model = http.get("/multigpu/gpu/recommendations", params={"model_name": "tiny"}).raise_for_status().json()
        missing = http.get("/multigpu/gpu/recommendations", params={"model_name": "../tiny"})
    assert (missing.status_code, missing.json()["error"]["param"]) == (404, "model_name")
    assert all(each["reason"] for each in of_model["recommendations"])
    assert GPUConfig(**of_model["config"]).batch_size_per_gpu >= 1
    names = [each["name"] for each in of_model["recommendations"]]
    assert "train.micro_batch_size" in names
    assert len(names) > len(found["recommendations"]) >= 1
    if not probe().gpus:
        assert found["config"]["backend"] == "gloo"


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
