"""Chat completions with base and tuned models, by the unmodified `openai` client, sync and async."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from tests.service.conftest import Server
from tests.service.test_service_security import keys

ASK: Any = [{"role": "user", "content": "1+2="}]
IMAGE = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}


def answer(client: OpenAI, **changes: Any) -> Any:
    settings = {"model": "tiny", "messages": ASK, "temperature": 0, "max_tokens": 12}
    return client.chat.completions.create(**{**settings, **changes})


@pytest.fixture(scope="module", autouse=True)
def started(server: Server) -> None:
    """The worker outlives the test that starts it."""
    with server.client() as client:
        answer(client)


def test_a_base_model_answers(client: OpenAI) -> None:
    done = answer(client)
    (choice,) = done.choices
    assert (done.object, done.model, choice.index, choice.message.role) == ("chat.completion", "tiny", 0, "assistant")
    assert choice.message.content
    assert choice.finish_reason == "length"
    assert (done.usage.prompt_tokens > 3, done.usage.completion_tokens) == (True, 12)
    assert done.usage.total_tokens == done.usage.prompt_tokens + 12
    assert answer(client).choices[0].message.content == choice.message.content, "greedy decoding repeats itself"


def test_a_stream_is_the_same_text(client: OpenAI) -> None:
    whole = answer(client, max_completion_tokens=12, max_tokens=None)
    chunks = list(answer(client, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == whole.choices[0].message.content
    assert len(chunks) > 5, "it comes token by token"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["length"]
    assert (chunks[-1].choices, chunks[-1].usage) == ([], whole.usage)
    assert len({chunk.id for chunk in chunks}) == 1
    assert not any(chunk.usage for chunk in answer(client, stream=True))


def test_the_asynchronous_client(server: Server) -> None:
    async def ask() -> str:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
            stream = await client.chat.completions.create(
                model="tiny", messages=ASK, temperature=0, max_tokens=12, stream=True
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    with server.client() as client:
        assert anyio.run(ask) == answer(client).choices[0].message.content


def test_the_end_of_the_wire(server: Server) -> None:
    body = {"model": "tiny", "messages": ASK, "max_tokens": 2, "stream": True}
    with server.http() as http, http.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.read().decode().endswith("\n\ndata: [DONE]\n\n")


def test_settings_of_the_answer(client: OpenAI) -> None:
    text = answer(client).choices[0].message.content
    stopped = answer(client, stop=text[3:6]).choices[0]
    assert (stopped.message.content, stopped.finish_reason) == (text[: text.find(text[3:6])], "stop")
    one, again, other = (answer(client, temperature=1.8, seed=seed).choices[0].message.content for seed in (1, 1, 2))
    assert one == again != other
    parts = [{"type": "text", "text": "1+"}, {"type": "text", "text": "2="}]
    assert answer(client, messages=[{"role": "user", "content": parts}]).choices[0].message.content == text


def test_an_answer_may_be_sent_back(client: OpenAI) -> None:
    first = answer(client)
    more: Any = [*ASK, first.choices[0].message, {"role": "user", "content": "3+4="}]
    second = answer(client, messages=more, response_format={"type": "text"}, tools=[], user="ann")
    assert second.usage.prompt_tokens > first.usage.total_tokens
    system: Any = [{"role": "developer", "content": "Add."}, *ASK]
    assert answer(client, messages=system).usage.prompt_tokens > first.usage.prompt_tokens


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"n": 2}, "`n` must be 1"),
        ({"logprobs": True}, "logprobs"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "a", "tool_call_id": "b"}]}, "role"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "parts other",
        ),
        ({"temperature": 3}, "temperature"),
        ({"max_tokens": 100_000}, "256 positions"),
        ({"stream": True, "max_tokens": 100_000}, "256 positions"),
        ({"messages": [{"role": "user", "content": "1+" * 400}]}, "256 positions"),
    ],
)
def test_what_cannot_be_done_is_refused(client: OpenAI, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(openai.BadRequestError, match=words):
        answer(client, **changes)


def test_a_body_that_is_no_json(server: Server) -> None:
    with server.http() as http:
        answered = http.post("/v1/chat/completions", content=b"{bad", headers={"content-type": "application/json"})
    assert (answered.status_code, answered.json()["error"]["message"]) == (400, "The body is not valid JSON.")


def test_a_body_whose_kind_is_not_told(server: Server) -> None:
    """As curl sends one without the header."""
    with server.http() as http:
        answers = [
            http.post(path, content=b'{"model": "tiny"}', headers={"content-type": "application/x-www-form-urlencoded"})
            for path in ("/v1/chat/completions", "/v1/fine_tuning/jobs", "/multigpu/training/auto", "/multigpu/config")
        ]
        empty = http.post("/v1/fine_tuning/jobs")
    assert [answer.status_code for answer in answers] == [415] * 4
    assert all("Content-Type: application/json" in answer.json()["error"]["message"] for answer in answers)
    assert (empty.status_code, empty.json()["error"]["message"]) == (400, "The request has no body; send JSON.")


def test_unknown_models(client: OpenAI) -> None:
    for name in ("none", "../tiny", "ft:tiny:local::00000000"):
        with pytest.raises(openai.NotFoundError) as caught:
            answer(client, model=name)
        assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError, match="Checkpoints are what a job continues from"):
        answer(client, model="ft:tiny:local::00000000:ckpt-step-6")


def test_another_server_may_answer(server: Server, own_server: Callable[..., Server]) -> None:
    """The one that is asked hands the body on, and nothing else: without a key of its own it is refused."""
    front = own_server("--inference-url", f"{server.url}/v1").client("secret-of-the-user")
    with server.client() as client:
        direct = answer(client)
    assert answer(front).choices[0].message.content == direct.choices[0].message.content
    chunks = list(answer(front, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == direct.choices[0].message.content
    assert chunks[-1].usage == direct.usage
    with pytest.raises(openai.BadRequestError, match="`n` must be 1"):
        answer(front, n=2)
    with pytest.raises(openai.NotFoundError):
        answer(front, model="none")


@pytest.mark.extended
def test_the_other_server_gets_its_own_key_alone(
    own_server: Callable[..., Server], models: Path, tmp_path: Path
) -> None:
    key = keys(tmp_path / "behind", "create", "front", "--scope", "submit")["key"]
    behind = own_server("--cpu-slots", "1", data=tmp_path / "behind")
    front = Server(tmp_path / "front", models, ("--inference-url", f"{behind.url}/v1"))
    try:
        with pytest.raises(openai.APIStatusError) as caught:
            answer(front.start().client("of-the-user"))
        assert (caught.value.status_code, caught.value.code) == (503, "unavailable")
        assert "refuses requests of this service" in caught.value.message
        front.stop()
        front.environment = {"PANTHERAML_INFERENCE_KEY": key}
        client = front.start().client("of-the-user")
        assert answer(client).choices[0].message.content
        behind.stop()
        with pytest.raises(openai.APIStatusError, match="does not answer") as caught:
            answer(client)
        assert caught.value.response.headers["retry-after"] == "10"
    finally:
        front.clean_up()
