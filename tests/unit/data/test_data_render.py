from __future__ import annotations

import resource
import signal
import time
from typing import Any

import pytest

from pantheraml.base.errors import ModelError, WorkerError
from pantheraml.data import render
from pantheraml.data.chat import ChatEncoder
from pantheraml.data.rows import RowError
from pantheraml.data.worker_pool import ordered_map

CONVERSATION = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]
LOOP = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3


def with_template(tokenizer: Any, template: str) -> Any:
    return type(tokenizer)(tokenizer_object=tokenizer.backend_tokenizer, eos_token="</s>", chat_template=template)


def encode(tokenizer: Any, template: str) -> Any:
    return ChatEncoder(with_template(tokenizer, template)).encode([{"messages": CONVERSATION}])[0]


def limits() -> list[Any]:
    return [
        resource.getrlimit(resource.RLIMIT_AS),
        resource.getrlimit(resource.RLIMIT_CPU),
        signal.getsignal(signal.SIGVTALRM),
        signal.getitimer(signal.ITIMER_VIRTUAL),
    ]


def test_an_endless_template_is_stopped(chat_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render, "RENDER_SECONDS", 0)
    before = limits()
    with pytest.raises(ModelError, match="more than 0 seconds for one conversation"):
        encode(chat_tokenizer, LOOP)
    assert limits() == before


def test_an_endless_template_is_stopped_in_generation(chat_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render, "RENDER_SECONDS", 0)
    with pytest.raises(ModelError, match="for one conversation"):
        ChatEncoder(with_template(chat_tokenizer, LOOP)).prompt(CONVERSATION[:1])


def test_a_template_that_is_slow_to_compile_is_stopped(chat_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jinja folds constants while it compiles, and swallows any Exception that this raises."""
    monkeypatch.setattr(render, "RENDER_SECONDS", 0)
    begin = time.process_time()
    with pytest.raises(ModelError, match="more than 0 seconds for one conversation"):
        encode(chat_tokenizer, "".join(f"{{{{ (7**1500000 > {n}) }}}}" for n in range(100)))
    assert time.process_time() - begin < 5


def test_the_cpu_limit_is_not_extended_after_the_timeout(chat_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    extended: list[Any] = []
    monkeypatch.setattr(render, "_extend_cpu_limit", extended.append)
    renderer = render.Renderer(chat_tokenizer)
    renderer._check_time()
    assert len(extended) == 1
    renderer._started = time.process_time() - render.RENDER_SECONDS - 1
    with pytest.raises(render._RenderTimeout):
        renderer._check_time()
    assert len(extended) == 1


def test_a_template_over_the_memory_limit_is_stopped(chat_tokenizer: Any) -> None:
    before = limits()
    with pytest.raises(ModelError, match="more than 2048 MiB"):
        encode(chat_tokenizer, "{{ 'x' * 100000000000 }}")
    assert limits() == before


def test_a_template_with_excessive_output_is_stopped(chat_tokenizer: Any) -> None:
    with pytest.raises(ModelError, match=r"1000000 characters from a conversation of \d+; the maximum is 26\d{4}"):
        encode(chat_tokenizer, "{{ 'x' * 1000000 }}")


def test_a_process_that_no_signal_reaches_is_killed(chat_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render, "STUCK_SECONDS", 2)
    # a single bytecode, during which no signal handler runs
    monkeypatch.setattr(render, "render_jinja_template", lambda **options: sum(range(10**13)))
    encoder = ChatEncoder(chat_tokenizer)
    with pytest.raises(WorkerError, match="stuck, most likely in the chat template"):
        list(ordered_map(encoder.encode, [[{"messages": CONVERSATION}]], workers=2))


@pytest.mark.parametrize(
    "template", ["{{ 1 / 0 }}", "{{ messages.nothing.more }}", "{% for %}", "{{" + "(" * 5000 + ")" * 5000 + "}}"]
)
def test_a_template_that_fails_makes_a_bad_row(chat_tokenizer: Any, template: str) -> None:
    assert isinstance(encode(chat_tokenizer, template), RowError)


def test_a_template_over_the_length_limit_is_rejected(chat_tokenizer: Any) -> None:
    with pytest.raises(ModelError, match="the maximum is 1048576"):
        ChatEncoder(with_template(chat_tokenizer, "x" * (render.TEMPLATE_CHARACTERS + 1)))


def test_a_lone_surrogate_anywhere_makes_a_bad_row(chat_tokenizer: Any) -> None:
    encoder = ChatEncoder(with_template(chat_tokenizer, "{{ messages[0].name }}"))
    (found,) = encoder.encode([{"messages": [CONVERSATION[0] | {"name": "\ud83d"}, CONVERSATION[1]]}])
    assert "surrogate" in str(found)
