"""Fixtures: a small byte-level BPE tokenizer, an event recorder, and `prepare` with a cache per test."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from pantheraml.data.prepare import PreparedData, prepare
from pantheraml.specs.train import DataConfig
from tests.event_log import EventLog

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer(*, bos: bool = True, eos: bool = True, chat_template: str | None = None) -> Any:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<s>", "</s>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the user said hello and the assistant answered"] * 20, trainer)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    names = {"bos_token": "<s>"} if bos else {}
    if eos:
        names["eos_token"] = "</s>"
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=chat_template, **names)


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return make_tokenizer()


@pytest.fixture(scope="session")
def chat_tokenizer() -> Any:
    return make_tokenizer(bos=False, chat_template=CHATML)


@pytest.fixture
def events() -> EventLog:
    return EventLog()


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[..., Path]:
    def write(rows: Iterable[Any], name: str = "data.jsonl") -> Path:
        path = tmp_path / name
        lines = (row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows)
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        return path

    return write


@pytest.fixture
def prepared(tmp_path: Path, tokenizer: Any, events: EventLog) -> Callable[..., PreparedData]:
    """Return prepare(path, **settings) with a cache per test and short sequences."""

    def run(path: Path, *, tokenizer: Any = tokenizer, **settings: Any) -> PreparedData:
        values = {"cache_dir": str(tmp_path / "cache"), "seq_len": 64, **settings}
        return prepare(DataConfig(path=str(path), **values), tokenizer=tokenizer, emit=events)

    return run
