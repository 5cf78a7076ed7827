"""The chat worker: exact switching of adapters on one base, and its replies to a request, in order."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pantheraml.base.errors import ModelError
from pantheraml.models.adapters import TrainedWeights, apply_method, save_trained
from pantheraml.models.load_finetuned import load_finetuned_model
from pantheraml.models.loader import load_model, load_tokenizer
from pantheraml.specs.chat import (
    ChatCancel,
    ChatDone,
    ChatFailed,
    ChatLoaded,
    ChatModel,
    ChatReply,
    ChatRequest,
    ChatText,
)
from pantheraml.specs.train import MethodConfig, ModelConfig
from pantheraml.worker.chat import ChatWorker, Inbox, LoadedModel
from tests import toy

CPU = torch.device("cpu")
IDS = torch.tensor([[5, 6, 7, 8]])


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return ModelConfig(path=str(toy.write_llama(tmp_path_factory.mktemp("models") / "base")))


@pytest.fixture(scope="module")
def adapted(base: ModelConfig, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., ChatModel]:
    """Makes adapters of which one can see the effect."""

    def make(seed: int, kind: Any = "lora") -> ChatModel:
        method = MethodConfig(kind=kind, rank=4)
        quantize: Any = "nf4" if kind == "qlora" else None
        loaded = load_model(base, dtype=torch.float32, device=CPU, quantize=quantize)
        model = apply_method(loaded, method, seed=seed)
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2
        folder = tmp_path_factory.mktemp("runs") / "adapter"
        save_trained(TrainedWeights.of(model), folder, method=method, model_config=base, tokenizer=load_tokenizer(base))
        return ChatModel(model=base, method=method, trained=folder)

    return make


def logits(loaded: LoadedModel, wanted: ChatModel) -> torch.Tensor:
    with torch.no_grad():
        out: torch.Tensor = loaded.model(wanted)(input_ids=IDS).logits
    return out


def test_adapters_come_and_go(base: ModelConfig, adapted: Callable[..., ChatModel]) -> None:
    plain, one, other = ChatModel(model=base), adapted(1), adapted(2)
    loaded = LoadedModel(torch.float32, CPU)
    first, of_one, of_other = (logits(loaded, each) for each in (plain, one, other))
    assert not torch.allclose(first, of_one, atol=1e-3)
    assert not torch.allclose(of_one, of_other, atol=1e-3)
    for wanted, expected in ((one, of_one), (plain, first), (other, of_other), (one, of_one), (plain, first)):
        assert torch.equal(logits(loaded, wanted), expected)
    assert loaded.base_loads == 1


def test_an_adapter_over_nf4_gets_its_base(base: ModelConfig, adapted: Callable[..., ChatModel]) -> None:
    plain, quantized = ChatModel(model=base), adapted(3, kind="qlora")
    loaded = LoadedModel(torch.float32, CPU)
    first = logits(loaded, plain)
    assert not torch.allclose(logits(loaded, quantized), first, atol=1e-3)
    assert torch.equal(logits(loaded, plain), first)
    assert loaded.base_loads == 3


def test_another_base_is_refused(adapted: Callable[..., ChatModel], tmp_path: Path) -> None:
    other = ModelConfig(path=str(toy.write_llama(tmp_path / "other", seed=9)))
    wrong = adapted(1).model_copy(update={"model": other})
    with pytest.raises(ModelError, match="not the one the adapter was trained on"):
        LoadedModel(torch.float32, CPU).model(wrong)


def test_an_adapter_computes_as_in_training(base: ModelConfig, adapted: Callable[..., ChatModel]) -> None:
    """On a base in bf16 it stays in float32, as `pantheraml generate` has it."""
    one = adapted(1)
    assert one.trained is not None
    expected = load_finetuned_model(base, one.method, one.trained, dtype=torch.bfloat16, device=CPU)
    with torch.no_grad():
        assert torch.equal(logits(LoadedModel(torch.bfloat16, CPU), one), expected(input_ids=IDS).logits)


class Lines:
    """What the service writes, as an iterable that the test feeds."""

    def __init__(self) -> None:
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self.ended = False

    def put(self, message: Any) -> None:
        self._lines.put(None if message is None else message.model_dump_json())

    def __iter__(self) -> Iterator[str]:
        while (line := self._lines.get()) is not None:
            yield line


class Stop(BaseException):
    pass


def talk(messages: list[Any], count: int) -> list[ChatReply]:
    """Replies to these messages, up to that many which end an answer."""
    lines, replies = Lines(), list[ChatReply]()

    def send(reply: ChatReply) -> None:
        replies.append(reply)
        if sum(isinstance(each, ChatDone | ChatFailed) for each in replies) == count:
            raise Stop

    for message in messages:
        lines.put(message)
    inbox = Inbox(lines, on_end=lambda: None)
    try:
        ChatWorker(inbox, send, dtype=torch.float32, device=CPU).run()
    except Stop:
        lines.put(None)
    return replies


def request(number: int, model: ModelConfig, **changes: Any) -> ChatRequest:
    settings = {"max_tokens": 8, "default_tokens": 4, "temperature": 0, "top_p": 1, "stop": [], "seed": None}
    messages = [{"role": "user", "content": "1+2="}]
    return ChatRequest(id=number, model=ChatModel(model=model), messages=messages, **{**settings, **changes})


def test_what_it_says(base: ModelConfig) -> None:
    replies = talk([request(1, base)], 1)
    assert [type(reply) for reply in replies] == [ChatLoaded, *[ChatText] * (len(replies) - 2), ChatDone]
    done = replies[-1]
    assert isinstance(done, ChatDone)
    assert (done.finish_reason, done.completion_tokens) == ("length", 8)


def test_a_failure_does_not_end_it(base: ModelConfig, tmp_path: Path) -> None:
    plain = toy.write_llama(tmp_path / "plain")
    (plain / "chat_template.jinja").unlink(missing_ok=True)
    toy.write_tokenizer(plain)
    wanted = [
        request(1, ModelConfig(path=str(plain))),
        request(2, ModelConfig(path=str(tmp_path / "none"))),
        request(3, base, max_tokens=10_000),
        request(4, base),
    ]
    replies = {reply.id: reply for reply in talk(wanted, 4)}
    failed = [replies[number] for number in (1, 2, 3)]
    assert all(isinstance(reply, ChatFailed) and not reply.unexpected for reply in failed)
    assert [reply.error for reply in failed if isinstance(reply, ChatFailed)][::2] == ["ModelError", "DataError"]
    assert "no chat template" in failed[0].what  # type: ignore[union-attr]
    assert isinstance(replies[4], ChatDone)


def test_a_request_that_was_cancelled(base: ModelConfig) -> None:
    lines = [request(1, base, max_tokens=200), ChatCancel(id=1), request(2, base)]
    replies = talk(lines, 2)
    first, second = (reply for reply in replies if isinstance(reply, ChatDone))
    assert (first.finish_reason, second.finish_reason) == ("cancelled", "length")
    assert first.completion_tokens < 200
