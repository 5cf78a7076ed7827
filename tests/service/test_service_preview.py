"""The preview of trained tokens, all wrong rows of a file, and the request that makes a job again."""

from __future__ import annotations

from typing import Any

import pytest
from openai import OpenAI

from tests import toy
from tests.service.conftest import Server, jsonl

pytestmark = pytest.mark.extended


def test_the_tokens_of_a_conversation(server: Server, client: OpenAI) -> None:
    """By the model's own chat template; loss on what the assistant says."""
    turns = [("user", "3+4="), ("assistant", "7"), ("user", "Grüße, 你好"), ("assistant", "Привет")]
    rows = [{"messages": [{"role": role, "content": text} for role, text in turns]}] * 2
    file = client.files.create(file=jsonl(rows), purpose="fine-tune").id
    body: dict[str, Any] = {"model": "tiny", "training_file": file, "rows": 1}
    with server.http() as http:
        found = http.post("/v1/fine_tuning/preview", json=body).raise_for_status().json()
        (row,) = found["rows"]
        text = "<user>3+4=<eos><assistant>7<eos><user>Grüße, 你好<eos><assistant>Привет<eos>"
        assert "".join(piece["text"] for piece in row["pieces"]) == text
        assert "".join(piece["text"] for piece in row["pieces"] if piece["trained"]) == "7<eos>Привет<eos>"
        assert row["tokens"] == sum(piece["tokens"] for piece in row["pieces"])
        assert row["trained_tokens"] == sum(piece["tokens"] for piece in row["pieces"] if piece["trained"])
        assert (found["format"], found["seq_len"], row["line"], row["cut_tokens"]) == ("messages", 256, 1, 0)
        short = http.post("/v1/fine_tuning/preview", json={**body, "seq_len": 20}).json()["rows"][0]
        assert (short["tokens"], short["cut_tokens"]) == (row["tokens"], row["tokens"] - 20)
        for wrong in ({"model": "none"}, {"training_file": "file-none"}, {"seq_len": 1}, {"rows": 1000}):
            assert http.post("/v1/fine_tuning/preview", json={**body, **wrong}).status_code == 400, wrong


def test_all_wrong_rows_are_named(server: Server) -> None:
    rows: list[dict[str, Any]] = [*toy.arithmetic(3), {"prompt": 1, "completion": "x"}, {"prompt": "y"}]
    name, content = jsonl(rows)
    with server.http() as http:
        answer = http.post("/v1/files", files={"file": (name, content)}, data={"purpose": "fine-tune"})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "invalid_file_format")
        assert [(row["line"], row["field"]) for row in error["rows"]] == [(4, "prompt"), (5, "completion")]
        assert error["message"].startswith("Line 4, field `prompt`: expected a string, found the number 1.")
        many = jsonl([{"prompt": 1, "completion": "x"}] * 200)
        error = http.post("/v1/files", files={"file": many}, data={"purpose": "fine-tune"}).json()["error"]
        assert len(error["rows"]) == 50


def test_the_request_that_makes_a_job_again(server: Server, client: OpenAI, training_file: str) -> None:
    own = {
        "hold": True,
        "processes": 2,
        "max_runtime_seconds": 60,
        "config": {"method": {"kind": "full"}, "train": {"warmup_steps": 3}, "data": {"packing": True, "seq_len": 64}},
    }
    hyper: Any = {"n_epochs": 2, "learning_rate_multiplier": 0.5}
    job = client.fine_tuning.jobs.create(
        model="tiny", training_file=training_file, suffix="one", hyperparameters=hyper, extra_body={"pantheraml": own}
    )
    with server.http() as http:
        first = http.get(f"/v1/fine_tuning/jobs/{job.id}/config").json()
        assert first["request"]["pantheraml"]["config"] == own["config"]
        assert first["config"]["data"]["path"].startswith("[data]/files/")
        again = http.post("/v1/fine_tuning/jobs", json=_held(first["request"])).raise_for_status().json()
        second = http.get(f"/v1/fine_tuning/jobs/{again['id']}/config").json()
    assert second == first
    for name in (job.id, again["id"]):
        client.fine_tuning.jobs.cancel(name)


def _held(request: dict[str, Any]) -> dict[str, Any]:
    return {**request, "pantheraml": {**request["pantheraml"], "hold": True}}
