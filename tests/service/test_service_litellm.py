"""LiteLLM's calls for fine-tuning: what it sends is taken, and what it validates is there; and LiteLLM itself.

It copies every answer into a model of its own that validates, unlike the `openai` client. Of a new job it knows neither
`method` nor `metadata` nor `extra_body`: it leaves them out.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from openai.types.fine_tuning import FineTuningJob

from pantheraml.base.env import child_environment
from pantheraml.service.jobs.states import State
from pantheraml.service.schemas.fine_tuning import Waiting, job_object
from pantheraml.service.store.tables import Job
from tests.service.conftest import HERE, Server

PYTHON = Path(sys.prefix) / "litellm" / "bin" / "python"


def test_what_litellm_sends_is_taken(server: Server, client: OpenAI, training_file: str) -> None:
    """Bodies as version 1.106 sends them, to its calls without and with everything that they take."""
    least = {"model": "tiny", "training_file": training_file, "hyperparameters": {}}
    most = {
        **least,
        "hyperparameters": {"n_epochs": 1, "batch_size": "auto", "learning_rate_multiplier": 0.5},
        "integrations": [],
        "seed": 3,
        "suffix": "lite",
        "validation_file": training_file,
    }
    with server.http() as http:
        for body in (least, most):
            answer = http.post("/v1/fine_tuning/jobs", json=body).raise_for_status().json()
            assert FineTuningJob(**answer).status == "queued"
            path = f"/v1/fine_tuning/jobs/{answer['id']}"
            cancelled = http.post(f"{path}/cancel", headers={"content-type": "application/json"})  # without a body
            assert FineTuningJob(**cancelled.raise_for_status().json()).status in ("cancelled", "running")
            assert FineTuningJob(**http.get(path).json()).hyperparameters.n_epochs in (1, 3)
        listed = http.get("/v1/fine_tuning/jobs", params={"limit": 2}).json()["data"]
    assert [FineTuningJob(**job).model for job in listed] == ["tiny", "tiny"]


@pytest.mark.parametrize("state", list(State))
def test_a_job_of_every_state_is_valid(state: State) -> None:
    job = Job(
        id="ftjob-0123456789abcdef01234567",
        owner="ann",
        state=state.value,
        model="tiny",
        training_file="file-1",
        seed=1,
        hyperparameters={"n_epochs": 1, "batch_size": 2, "learning_rate_multiplier": 1.0},
        processes=1,
        device="cpu",
        created_at=1.5,
        state_at=1.5,
        seconds_run=0.0,
        token=0,
        priority=0,
        result_files=[],
        error={"code": "ModelError", "message": "why", "param": None} if state is State.FAILED else None,
    )
    shown = job_object(job, Waiting(reason="it waits"))
    valid: Any = FineTuningJob(**shown)
    assert valid.status in ("validating_files", "queued", "running", "succeeded", "failed", "cancelled")
    assert valid.state == state.value, "the true one"
    assert (valid.organization_id, valid.result_files) == ("ann", [])
    assert valid.status == valid.state or state not in (State.SUCCEEDED, State.FAILED, State.CANCELLED)


@pytest.mark.extended
@pytest.mark.skipif(not PYTHON.is_file(), reason="LiteLLM has no environment; `make litellm` makes it")
def test_litellm_itself(own_server: Callable[..., Server]) -> None:
    server = own_server("--cpu-slots", "1")
    done = subprocess.run(
        [str(PYTHON), str(HERE / "litellm_calls.py"), f"{server.url}/v1"],
        env=child_environment(LITELLM_LOCAL_MODEL_COST_MAP="True", PYTHONPATH=None),  # which it would download
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["file"] == ["processed", "fine-tune"]
    assert told["created"] == ["LiteLLMFineTuningJob", "queued", 1, 3]
    assert told["listed"]
    status, model, results = told["done"]
    assert (status, results) == ("succeeded", 2)
    assert model.startswith("ft:tiny:local:lite:")
    assert told["metrics"] == "step,train_loss"
    assert told["answer"] == 4
    assert told["chunks"] >= 4
    assert (told["cancelled"], told["deleted"]) == (["cancelled", True], True)
    assert told["refused"][0] == "BadRequestError"
    assert "can be fine-tuned here: tiny" in told["refused"][1]
