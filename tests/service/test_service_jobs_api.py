"""Creating and listing jobs: what is accepted, what is refused and how, without running any."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from pantheraml.devices.probe import cpu_count
from tests import toy
from tests.service.conftest import Server, jsonl

HOLD = {"pantheraml": {"hold": True}}


def held(client: OpenAI, file: str, **changes: Any) -> Any:
    own = {"hold": True, **changes.pop("own", {})}
    return client.fine_tuning.jobs.create(
        **{"model": "tiny", "training_file": file, "extra_body": {"pantheraml": own}, **changes}
    )


def refused(client: OpenAI, file: str, **changes: Any) -> openai.APIStatusError:
    with pytest.raises(openai.APIStatusError) as caught:
        held(client, file, **changes)
    assert caught.value.response.headers["x-should-retry"] == "false"
    return caught.value


def test_automatic_hyperparameters_are_chosen_and_shown(client: OpenAI, training_file: str) -> None:
    job = held(client, training_file)
    assert job.hyperparameters.model_dump() == {"n_epochs": 3, "batch_size": 16, "learning_rate_multiplier": 1.0}
    assert 0 <= job.seed < 1 << 31
    assert (job.organization_id, job.result_files, job.error) == ("local", [], None)
    small = client.files.create(file=jsonl(toy.arithmetic(3)), purpose="fine-tune")
    assert held(client, small.id).hyperparameters.batch_size == 3
    old_form = held(client, training_file, hyperparameters={"n_epochs": 2, "learning_rate_multiplier": 0.5})
    assert old_form.hyperparameters.n_epochs == 2
    assert old_form.method.supervised.hyperparameters.learning_rate_multiplier == 0.5


@pytest.mark.parametrize(
    ("changes", "param", "reason"),
    [
        ({"model": "../tiny"}, "model", "can be fine-tuned here: tiny"),
        ({"model": "/etc"}, "model", "can be fine-tuned here: tiny"),
        ({"training_file": "file-nothing"}, "training_file", "No such file"),
        ({"training_file": "../service.db"}, "training_file", "No such file"),
        ({"validation_file": "file-nothing"}, "validation_file", "No such file"),
        ({"suffix": "a/b"}, "suffix", "pattern"),
        ({"suffix": "a" * 65}, "suffix", "64"),
        ({"seed": -1}, "seed", "greater than or equal to 0"),
        ({"method": {"type": "dpo"}}, "method", "only the method `supervised` is available here"),
        ({"integrations": [{"type": "wandb", "wandb": {"project": "p"}}]}, "integrations", "not available"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata", "at most 16 pairs"),
        ({"metadata": {"a": "b\0"}}, "metadata", "null characters"),
        ({"hyperparameters": {"n_epochs": 0}}, "hyperparameters.n_epochs", "greater than or equal to 1"),
        ({"own": {"priority": 101}}, "pantheraml.priority", "less than or equal to 100"),
        ({"own": {"processes": 3}}, "pantheraml.processes", "needs 3 CPU slots, but there are 2"),
        ({"own": {"processes": 4096}}, "pantheraml.processes", "needs 4096 CPU slots, but there are 2"),
        ({"own": {"config": {"data": {"path": "/etc/passwd"}}}}, "pantheraml.config.data.path", "not permitted"),
        ({"own": {"config": {"model": {"trust_remote_code": True}}}}, "pantheraml.config.model", "not permitted"),
        ({"own": {"config": {"train": {"epochs": 4}}}}, None, "train.epochs is set both"),
        ({"own": {"config": {"train": {"optimiser": "x"}}}}, None, "train.optimiser"),
        ({"own": {"config": {"report": {"sinks": ["wandb"]}}}}, "pantheraml.config.report", "not permitted"),
        ({"own": {"config": {"method": {"rank": 0}}}}, None, "method.rank"),
    ],
)
def test_what_cannot_run_is_refused(
    client: OpenAI, training_file: str, changes: dict[str, Any], param: str | None, reason: str
) -> None:
    err = refused(client, training_file, **changes)
    assert (err.status_code, err.type) == (400, "invalid_request_error")
    assert reason in err.message
    assert "Traceback" not in err.message
    if param is not None:
        assert (err.param or "").startswith(param)


def test_an_answer_names_its_request(client: OpenAI, training_file: str) -> None:
    err = refused(client, training_file, model="none")
    assert err.request_id is not None
    assert err.request_id.startswith("req_")


def test_an_idempotency_key_makes_one_job(client: OpenAI, training_file: str) -> None:
    headers = {"Idempotency-Key": "once"}
    first, second = (held(client, training_file, extra_headers=headers) for _ in range(2))
    assert first.id == second.id
    assert held(client, training_file).id != first.id


def test_lists_follow_pages_and_filter_metadata(client: OpenAI, training_file: str) -> None:
    made = [held(client, training_file, metadata={"list": "a", "n": str(i)}).id for i in range(3)]
    plain = held(client, training_file).id
    jobs = client.fine_tuning.jobs
    assert [job.id for job in jobs.list(limit=1, metadata={"list": "a"})] == made[::-1]
    assert [job.id for job in jobs.list(metadata={"list": "a", "n": "1"})] == [made[1]]
    without = [job.id for job in jobs.list(limit=100, extra_query={"metadata": "null"})]
    assert plain in without
    assert not set(made) & set(without)
    page = jobs.list(limit=2)
    assert (len(page.data), page.has_more) == (2, True)


@pytest.mark.parametrize(
    "name", ["", " ", "a.b", "[0]", 'a"b', '"', "\\", "'", "$", "]", "a]b", "%", "\U0001f600", "\n"]
)
def test_metadata_may_have_any_name(client: OpenAI, training_file: str, name: str) -> None:
    value = f"of {name}"
    job = held(client, training_file, metadata={name: value, "other": "x"})
    assert job.metadata == {name: value, "other": "x"}
    found = [each.id for each in client.fine_tuning.jobs.list(metadata={name: value, "other": "x"})]
    assert found == [job.id]
    for wrong in ({name: "x"}, {name + "x": value}, {"other": value}):
        assert not client.fine_tuning.jobs.list(metadata=wrong).data


def test_more_pairs_than_a_job_can_have(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="At most 16 pairs"):
        client.fine_tuning.jobs.list(metadata={str(i): "" for i in range(2000)})


@pytest.mark.parametrize("path", ["events", "checkpoints"])
@pytest.mark.parametrize("after", ["ftevent-\u00b2", "\u0663", "-1", "x", "9" * 19])
def test_what_is_no_id_of_an_event(client: OpenAI, training_file: str, path: str, after: str) -> None:
    job = held(client, training_file).id
    jobs = client.fine_tuning.jobs
    with pytest.raises(openai.NotFoundError):
        (jobs.list_events if path == "events" else jobs.checkpoints.list)(job, after=after)


@pytest.mark.parametrize("last", [b"abc", b"ftevent-\xb2", b"-1", b"9" * 19])
def test_a_stream_after_what_is_no_event_is_refused(
    server: Server, client: OpenAI, training_file: str, last: bytes
) -> None:
    """Before it begins: a program that lost its place must not take silence for the end."""
    job = held(client, training_file).id
    with server.http() as http:
        answer = http.get(f"/v1/fine_tuning/jobs/{job}/stream", headers={"Last-Event-ID": last})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "Last-Event-ID")


def test_a_dry_run_plans_and_queues_nothing(client: OpenAI, server: Server, training_file: str) -> None:
    before = len(list(client.fine_tuning.jobs.list(limit=100)))
    with server.http() as http:
        body = {"model": "tiny", "training_file": training_file, "pantheraml": {"processes": 2}}
        plan = http.post("/v1/fine_tuning/jobs?dry_run=true", json=body).raise_for_status().json()
    assert plan["plan"]["world_size"] == 2
    threads = next(each for each in plan["plan"]["choices"] if each["name"] == "threads_per_process")
    assert int(threads["value"]) == max(1, cpu_count() // 2), "as many as the slots have cores"
    assert (plan["predicted_gpu_hours"], plan["predicted_cost"]) == (0.0, None), "no price was given"
    assert "predicted_seconds" in plan
    assert all(choice["reason"] for choice in plan["plan"]["choices"])
    assert len(list(client.fine_tuning.jobs.list(limit=100))) == before


def test_states_that_do_not_allow_an_action(client: OpenAI, training_file: str) -> None:
    job = held(client, training_file)
    assert client.fine_tuning.jobs.pause(job.id).id == job.id, "it is paused already"
    client.fine_tuning.jobs.cancel(job.id)
    for action in ("pause", "resume"):
        with pytest.raises(openai.BadRequestError, match=f"cancelled cannot be told to {action}"):
            getattr(client.fine_tuning.jobs, action)(job.id)
    for call in (client.fine_tuning.jobs.retrieve, client.fine_tuning.jobs.list_events):
        with pytest.raises(openai.NotFoundError):
            call("ftjob-nothing")


def test_models(client: OpenAI) -> None:
    assert client.models.retrieve("tiny").object == "model"
    for name in ("nothing", "../tiny", "ft:tiny:local::12345678"):
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve(name)


@pytest.mark.parametrize("path", ["files/%00", "fine_tuning/jobs/a%00", "models/%00", "files?after=%00"])
def test_null_characters_are_no_failure(server: Server, path: str) -> None:
    with server.http() as http:
        assert http.get(f"/v1/{path}").status_code == 400


def test_one_idempotency_key_sent_at_the_same_time(server: Server, training_file: str) -> None:
    """As a client does whose first request was slow."""
    body = {"model": "tiny", "training_file": training_file, "pantheraml": {"hold": True}}

    def send(_: int) -> httpx.Response:
        with server.http() as http:
            return http.post("/v1/fine_tuning/jobs", json=body, headers={"Idempotency-Key": "at once"})

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(send, range(16)))
    assert [answer.status_code for answer in answers] == [200] * 16, [answer.text[:200] for answer in answers]
    assert len({answer.json()["id"] for answer in answers}) == 1
