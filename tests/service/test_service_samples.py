"""What a model writes before and after its job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from tests import toy
from tests.service.conftest import Server, jsonl, wait_for

pytestmark = pytest.mark.extended

ROWS = [{"prompt": f"{number}+0=", "completion": "ninety"} for number in (7, 8)]
HELD_OUT: list[dict[str, Any]] = [{"prompt": "7+0=", "completion": "ninety"}, {"prompt": "8+0=", "completion": "eight"}]


@pytest.fixture(scope="module", autouse=True)
def started(server: Server) -> None:
    """The chat worker outlives the test that starts it."""
    with server.client() as client:
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "1"}], max_tokens=1)


def continued(folder: Path, prompt: str, tokens: int) -> str:
    """By transformers alone."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    answer = model.generate(ids, do_sample=False, max_new_tokens=tokens)[0, ids.shape[1] :]
    return str(tokenizer.decode(answer, skip_special_tokens=True))


def test_before_and_after(server: Server, client: OpenAI, models: Path) -> None:
    train, held = (
        client.files.create(file=jsonl(rows, name), purpose="fine-tune").id
        for rows, name in ((ROWS * 8, "train.jsonl"), (HELD_OUT, "held-out.jsonl"))
    )
    job = client.fine_tuning.jobs.create(
        model="tiny",
        training_file=train,
        validation_file=held,
        seed=3,
        hyperparameters={"n_epochs": 40, "batch_size": 8, "learning_rate_multiplier": 50},
        extra_body={"pantheraml": {"config": {"method": {"kind": "full"}}}},
    )
    url = f"/v1/fine_tuning/jobs/{job.id}/samples"
    with server.http(timeout=120) as http:
        assert http.post(url, json={}).json()["error"]["code"] == "no_model", "not before it has ended"
        wait_for(client, job.id, "succeeded")
        empty = http.get(url).json()
        assert (empty["data"], empty["created_at"]) == ([], None)
        found = http.post(url, json={"max_tokens": 8}).raise_for_status().json()
        assert http.get(url).json() == found, "kept for those who only look"
        for wrong in ({"rows": 0}, {"rows": 1000}, {"max_tokens": 0}, {"x": 1}):
            assert http.post(url, json=wrong).status_code == 400, wrong
        assert http.post("/v1/fine_tuning/jobs/ftjob-none/samples", json={}).status_code == 404
    assert (found["filename"], found["trained_on"]) == ("held-out.jsonl", False)
    assert [(row["line"], row["prompt"], row["expected"]) for row in found["data"]] == [
        (number, row["prompt"], row["completion"]) for number, row in enumerate(HELD_OUT, 1)
    ]
    assert [row["after"] for row in found["data"]] == ["ninety", "ninety"], "what it was taught, right or wrong"
    for row in found["data"]:
        assert row["before"] == continued(models / "tiny", row["prompt"], 8), "without a chat template, as in training"


def test_deleted_data_is_told(server: Server, client: OpenAI) -> None:
    file = client.files.create(file=jsonl(toy.arithmetic(4)), purpose="fine-tune").id
    job = client.fine_tuning.jobs.create(
        model="tiny", training_file=file, hyperparameters={"n_epochs": 1, "batch_size": 4}
    )
    wait_for(client, job.id, "succeeded")
    client.files.delete(file)
    with server.http() as http:
        error = http.post(f"/v1/fine_tuning/jobs/{job.id}/samples", json={}).json()["error"]
    assert (error["code"], error["message"]) == ("file_not_found", "The data of the job is deleted.")
