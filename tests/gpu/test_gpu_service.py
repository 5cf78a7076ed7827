"""The service on a GPU that jobs share: two train at once and a third waits; then a model is tried on the same GPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import toy

pytest.importorskip("fastapi")
pytest.importorskip("openai")
pytest.importorskip("asyncpg")

from tests.service.conftest import Server, jsonl, models, own_server, wait_for, wait_until

__all__ = ["models", "own_server"]  # fixtures

SETTINGS: Any = {
    "model": "tiny",
    "seed": 1,
    "hyperparameters": {"n_epochs": 20, "batch_size": 8, "learning_rate_multiplier": 50},
}
ROWS = toy.arithmetic(64)


def losses(server: Server, job: str) -> list[float]:
    events = server.client().fine_tuning.jobs.list_events(job, limit=200).data
    return [event.data["train_loss"] for event in reversed(events) if event.type == "metrics"]


@pytest.mark.timeout(280)
def test_jobs_share_a_gpu(own_server: Callable[..., Server]) -> None:
    server = own_server("--jobs-per-gpu", "2")
    client = server.client()
    file = client.files.create(file=jsonl(ROWS), purpose="fine-tune").id
    first, second, third = (client.fine_tuning.jobs.create(training_file=file, **SETTINGS).id for _ in range(3))
    with server.suspended_in_training(client, first, second), server.http() as http:
        gpus = http.get("/v1/gpus").json()["data"]
        assert {holder["job"] for gpu in gpus for holder in gpu["holders"]} == {first, second}
        if len(gpus) == 1:
            waiting = client.fine_tuning.jobs.retrieve(third)
            assert (waiting.state, waiting.waiting_reason) == ("queued", "needs 1 of 1 devices; 0 free")  # type: ignore[attr-defined]
        for job in (first, second):
            parallel = json.loads(Path(server.data, "jobs", job, "request.json").read_text())["config"]["parallel"]
            assert parallel["device_ids"] == [0]
            assert 0.4 < parallel["memory_fraction"] < 0.5
    assert wait_for(client, first, "succeeded").fine_tuned_model
    tuned = wait_for(client, second, "succeeded").fine_tuned_model
    wait_for(client, third, "succeeded")
    alone = losses(server, third)
    assert len(alone) == 160
    assert alone[-1] < 0.8 * alone[0]
    for job in (first, second):
        assert losses(server, job) == pytest.approx(alone, rel=1e-2), "who shares a GPU trains as if it were alone"
    said = client.chat.completions.create(
        model=tuned, messages=[{"role": "user", "content": "1 + 1 = "}], max_tokens=8, temperature=0
    )
    assert said.choices[0].finish_reason in ("stop", "length")
    assert said.usage is not None
    assert said.usage.completion_tokens > 0


@pytest.mark.timeout(280)
def test_a_gpu_is_tested_by_a_step(own_server: Callable[..., Server]) -> None:
    server = own_server()
    with server.http(timeout=200) as http:
        done = http.post("/multigpu/gpu/test", json={"gpu_ids": [0]}).raise_for_status().json()
        assert (done["status"], done["devices"], done["error"]) == ("passed", ["gpu:0"], None)
        wait_until(lambda: not server.processes())
