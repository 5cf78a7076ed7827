"""The API under fire by the unmodified schemathesis, stateful where it can: no 5xx, no breach of its description."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pantheraml.base.env import child_environment
from pantheraml.base.event_stream import FILE_NAME
from pantheraml.service.jobs.timeline import timeline
from pantheraml.service.schemas.examples import EXAMPLES as SHOWN
from tests import toy
from tests.service.conftest import Server, jsonl
from tests.service.fuzz_hooks import ENDED, FILE

EXAMPLES = 10
NOT_CHECKED = (
    # whether a name is that of a model, and whether rows can be trained on, no description can say
    "positive_data_acceptance",
)


@pytest.mark.extended
@pytest.mark.timeout(600)
def test_nothing_that_is_sent_makes_the_service_fail(own_server: Callable[..., Server], tmp_path: Path) -> None:
    server = own_server("--cpu-slots", "1")
    client = server.client()
    file = client.files.create(file=jsonl(toy.arithmetic(4)), purpose="fine-tune").id
    ended = client.fine_tuning.jobs.create(model="tiny", training_file=file, extra_body={"pantheraml": {"hold": True}})
    client.fine_tuning.jobs.cancel(ended.id)
    done = subprocess.run(
        [
            str(Path(sys.executable).with_name("schemathesis")),
            *("run", f"{server.url}/openapi.json", "--phases", "examples,coverage,fuzzing,stateful"),
            *("--max-examples", str(EXAMPLES), "--no-color", "--request-timeout", "60"),
            *("--exclude-checks", ",".join(NOT_CHECKED)),
            *("--seed", "1"),  # the same requests every time
        ],
        cwd=tmp_path,
        env=child_environment(
            **{FILE: file, ENDED: ended.id},
            SCHEMATHESIS_HOOKS="tests.service.fuzz_hooks",
            PYTHONPATH=str(Path(__file__).parents[2]),
        ),
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )
    told = done.stdout[-8000:]
    assert done.returncode == 0, told
    assert "API Links:" in told
    with server.http() as http:
        assert http.get("/readyz").status_code == 200
    made = list(server.client().fine_tuning.jobs.list(limit=100))
    assert made, "some of its jobs were accepted"
    assert ") failed" not in server.stop(), "no exception was caught on the way"


def test_the_description_says_what_answers_are(server: Server) -> None:
    with server.http() as http:
        described = http.get("/openapi.json").raise_for_status().json()
    components = described["components"]["schemas"]
    assert {"Job", "File", "Page_Job_", "JobPlan", "Error", "Overview", "UsageReport"} <= components.keys()
    for path, operations in described["paths"].items():
        for method, operation in operations.items():
            assert "default" in operation["responses"], (method, path)
            assert "422" not in operation["responses"], (method, path)
            for answer in operation["responses"].values():
                stream = answer.get("content", {}).get("text/event-stream")
                assert stream is None or stream["itemSchema"]["required"][0] == "data", (method, path)
    references = set(find_references(described))
    assert {name.rpartition("/")[2] for name in references if "/schemas/" in name} <= components.keys()


def test_every_body_has_an_example_that_is_understood(server: Server) -> None:
    """It may name what is not here, but nothing in it is of a wrong kind."""
    shown: dict[str, Any] = {}
    with server.http() as http:
        described = http.get("/openapi.json").raise_for_status().json()
        for path, operations in described["paths"].items():
            body = operations.get("post", {}).get("requestBody", {}).get("content", {}).get("application/json")
            if body is None:
                continue
            (example,) = body["examples"].values()
            shown[path] = example["value"]
            if path.startswith("/api"):
                continue
            answer = http.post(
                path.format(upload_id="upload-0", endpoint_id="whe-0", job_id="ftjob-0"), json=example["value"]
            )
            refused = answer.json().get("error", {}) if answer.status_code != 200 else {}
            assert refused.get("code") != "invalid_request", (path, refused)
            if answer.status_code == 200 and path == "/v1/uploads":
                http.post(f"/v1/uploads/{answer.json()['id']}/cancel").raise_for_status()
        http.post("/multigpu/training/config", json={}).raise_for_status()
    assert shown.keys() == SHOWN.keys()


def find_references(value: object) -> list[str]:
    if isinstance(value, dict):
        own = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
        return own + [each for inner in value.values() for each in find_references(inner)]
    return [each for inner in value for each in find_references(inner)] if isinstance(value, list) else []


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("/v1/files", "GET, POST"),
        ("/v1/files/file-1", "DELETE, GET"),
        ("/v1/models/a/b", "DELETE, GET"),
        ("/multigpu/config", "GET, POST"),
        ("/api/v1/multigpu/training/config", "GET, POST"),
    ],
)
def test_a_method_that_a_path_does_not_have(server: Server, path: str, allowed: str) -> None:
    with server.http() as http:
        answer = http.put(path)
    assert (answer.status_code, answer.headers["allow"]) == (405, allowed)


def test_a_place_beyond_the_end(tmp_path: Path) -> None:
    """So far that no file system could go there."""
    (tmp_path / FILE_NAME).write_text("{}\n")
    assert timeline(tmp_path, (1 << 62) - 1)["samples"] == []


def test_texts_that_make_no_job_are_refused(server: Server) -> None:
    with server.http() as http:
        body = {"model_name": "tiny", "dataset_config": {"texts": ["a"]}}
        large = {**body, "training_config": {"batch_size_per_gpu": 1 << 16, "world_size": 4096}}
        answer = http.post("/multigpu/training/auto", json=large)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "hyperparameters.batch_size")
        answer = http.post("/multigpu/training/auto", json={**body, "user_id": "a\0"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "metadata")
