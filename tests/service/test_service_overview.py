"""Overview, order of the queue, and accounting."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from pantheraml.devices import nvml
from pantheraml.devices.fake_nvml import FakeNvml
from pantheraml.service import Settings, create_app
from tests import toy
from tests.service.conftest import Server, jsonl, wait_for, wait_until
from tests.service.test_service_control import submit
from tests.service.test_service_security import keys as keys_command


def test_an_idle_service_shows_its_devices(server: Server) -> None:
    with server.http() as http:
        seen = http.get("/v1/overview").raise_for_status().json()
        assert [device["device"] for device in seen["devices"]] == ["cpu:0", "cpu:1"]
        assert seen["devices"][0]["kind"] == "cpu"
        assert seen["host"]["cpu_count"] >= 1
        assert seen["scopes"] == ["read", "submit", "admin"]
        assert http.get("/v1/gpus").json()["host"]["ram_total_bytes"] > 0


def test_gpus_with_their_health(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeNvml("2xH100-80GB")
    driver.gpus[1].ecc = (0, 3)
    monkeypatch.setattr(nvml, "binding", driver)

    async def ask() -> Any:
        app = create_app(Settings(tmp_path / "data", models))
        transport = httpx.ASGITransport(app)
        async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport) as http:
            for _ in range(100):
                answer = (await http.get("http://localhost/v1/gpus")).raise_for_status().json()
                if answer["data"][0]["health"] is not None:
                    break
                await asyncio.sleep(0.1)
            return answer["data"]

    first, second = asyncio.run(ask())
    assert (first["device"], first["name"], first["health"]) == ("gpu:0", "NVIDIA H100 80GB HBM3", "ok")
    assert first["memory_used_bytes"] == driver.gpus[0].used_bytes
    assert first["temperature_celsius"] == 34
    assert second["health"] == "fail"
    assert "3 uncorrected ECC error(s)" in second["health_reasons"][0]


@pytest.mark.extended
@pytest.mark.seed("S4-145")
def test_queue_and_accounts(own_server: Callable[..., Server]) -> None:
    server = own_server("--cpu-slots", "1", "--price-per-gpu-hour", "2.5")
    client = server.client()
    file = client.files.create(file=jsonl(toy.arithmetic(24)), purpose="fine-tune").id
    running = submit(client, file, epochs=10_000)
    wait_for(client, running.id, "running")
    first, second, third = (submit(client, file).id for _ in range(3))
    with server.http() as http:

        def order() -> list[str]:
            return [entry["job"] for entry in http.get("/v1/queue").raise_for_status().json()["data"]]

        wait_until(lambda: order() == [first, second, third])
        moved = http.post("/v1/queue/move", json={"job": third, "before": first}).raise_for_status().json()
        assert [entry["job"] for entry in moved["data"]] == [third, first, second]
        http.post("/v1/queue/move", json={"job": third, "before": None}).raise_for_status()
        assert order() == [first, second, third]
        shown: Any = client.fine_tuning.jobs.retrieve(second)
        assert shown.queue_position == 2
        unknown = http.post("/v1/queue/move", json={"job": running.id})
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "not_found")

        seen = wait_until(
            lambda: (now := http.get("/v1/overview").json())["running"][0]["seconds_left"] is not None and now
        )
        (now,) = seen["running"]
        assert (now["job"], now["devices"], now["total_steps"]) == (running.id, ["cpu:0"], 60_000)
        assert 0 < now["progress"] < 1
        assert now["seconds_left"] > 0
        assert seen["devices"][0]["job"] == running.id
        assert seen["queued"] == 3
        assert [entry["position"] for entry in seen["queue"]] == [1, 2, 3]

        for job in (first, second, third, running.id):
            client.fine_tuning.jobs.cancel(job)
        done: Any = wait_for(client, running.id, "cancelled")
        (account,) = http.get("/v1/usage").raise_for_status().json()["data"]
        assert (account["user"], account["jobs"], account["gpu_hours"]) == ("local", 1, 0.0)
        assert account["cpu_slot_hours"] == pytest.approx(done.cpu_slot_hours, rel=0.2, abs=1e-4)
        assert account["cost"] == 0.0, "only GPUs have a price"
        (by_job,) = http.get("/v1/usage", params={"group_by": "job"}).json()["data"]
        assert (by_job["job"], by_job["model"]) == (running.id, "tiny")


@pytest.mark.extended
def test_a_user_at_the_limit_waits(own_server: Callable[..., Server]) -> None:
    server = own_server("--cpu-slots", "2", "--max-running-per-user", "1")
    client = server.client()
    file = client.files.create(file=jsonl(toy.arithmetic(24)), purpose="fine-tune").id
    first = submit(client, file, epochs=10_000)
    wait_for(client, first.id, "running")
    second = submit(client, file)
    expected = "its user runs 1 job(s), as many as are allowed at a time"
    wait_until(lambda: client.fine_tuning.jobs.retrieve(second.id).waiting_reason == expected)  # type: ignore[attr-defined]
    for job in (second, first):
        client.fine_tuning.jobs.cancel(job.id)
    wait_for(client, first.id, "cancelled")


@pytest.mark.extended
def test_others_jobs_have_no_names(own_server: Callable[..., Server], tmp_path: Path) -> None:
    data = tmp_path / "data"
    keys = {
        user: keys_command(data, "create", user, "--scope", scope)["key"]
        for user, scope in (("ann", "submit"), ("bob", "read"), ("boss", "admin"))
    }
    server = own_server("--cpu-slots", "1", data=data)
    with server.client(keys["ann"]) as ann:
        file = ann.files.create(file=jsonl(toy.arithmetic(24)), purpose="fine-tune").id
        jobs = [submit(ann, file, epochs=10_000).id for _ in range(2)]
        wait_for(ann, jobs[0], "starting", "running")
        views = {}
        for user, key in keys.items():
            with server.http(headers={"authorization": f"Bearer {key}"}) as http:
                views[user] = http.get("/v1/overview").raise_for_status().json()
                move = http.post("/v1/queue/move", json={"job": jobs[1]}).status_code
                assert move == (200 if user == "boss" else 403)
                accounts = http.get("/v1/usage").json()["data"]
                assert [each["user"] for each in accounts] == ([] if user == "bob" else ["ann"])
        assert [views[user]["queue"][0]["job"] for user in keys] == [jobs[1], None, jobs[1]]
        assert [len(views[user]["running"]) for user in keys] == [1, 0, 1]
        assert [views[user]["devices"][0]["job"] for user in keys] == [jobs[0], None, jobs[0]]
        assert all(views[user]["devices"][0]["in_use"] for user in keys)
        for job in reversed(jobs):
            ann.fine_tuning.jobs.cancel(job)
        wait_for(ann, jobs[0], "cancelled")


@pytest.mark.extended
@pytest.mark.seed("S4-144")
def test_a_job_that_stalls_raises_an_alert(own_server: Callable[..., Server]) -> None:
    """Its worker is stopped for a while; the service is restarted meanwhile and tells it once."""
    server = own_server("--cpu-slots", "1", "--stall-seconds", "3")
    client = server.client()
    file = client.files.create(file=jsonl(toy.arithmetic(24)), purpose="fine-tune").id
    job = submit(client, file, epochs=10_000)

    def alerts() -> list[tuple[str, str, bool]]:
        with server.client() as asking:
            found = asking.fine_tuning.jobs.list_events(job.id, limit=10_000).data
        told: list[Any] = [event for event in reversed(found) if event.kind.startswith("alert.")]  # type: ignore[attr-defined]
        return [(each.kind, each.level, each.data["active"]) for each in told if each.kind == "alert.stall"]

    wait_until(lambda: "training loss" in client.fine_tuning.jobs.list_events(job.id, limit=1).data[0].message)
    begun = ("alert.stall", "error", True)
    with server.suspended(job.id):
        wait_until(lambda: alerts() == [begun])
        server.kill()
        server.start()
        with server.http() as http:
            now = wait_until(lambda: http.get("/v1/overview").json()["running"])
            assert "alert.stall" in now[0]["alerts"]
            assert "alert.stall" in [each["kind"] for each in http.get("/v1/overview").json()["incidents"]]
            assert f'pantheraml_job_alert{{alert="stall",job_id="{job.id}"}} 1.0' in http.get("/metrics").text
    wait_until(lambda: begun in alerts() and alerts()[-1][2] is False)
    client = server.client()
    client.fine_tuning.jobs.cancel(job.id)
    wait_for(client, job.id, "cancelled")
