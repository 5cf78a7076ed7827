"""Rows that the tokenizer encodes to no tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from pantheraml.base.errors import DataError
from pantheraml.data.prepare import PreparedData


def knows_only(*words: str, **options: Any) -> Any:
    """Return a tokenizer that drops unknown words, like one that was loaded with the wrong class."""
    tokenizer = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options)


ROWS = {
    "text": {"text": "hello there"},
    "prompt": {"prompt": "a", "completion": "hello"},
    "messages": {"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "there"}]},
}


@pytest.mark.parametrize("format", ROWS)
@pytest.mark.parametrize("eos", [{}, {"eos_token": "</s>"}], ids=["no end token", "end token"])
def test_rows_without_tokens_report_the_tokenizer(
    write_jsonl: Callable[..., Path], prepared: Callable[..., PreparedData], format: str, eos: dict[str, str]
) -> None:
    chat = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer = knows_only("</s>", "a", chat_template=chat, **eos)
    with pytest.raises(DataError, match=r"TokenizersBackend|PreTrainedTokenizerFast") as caught:
        prepared(write_jsonl([ROWS[format]] * 3), tokenizer=tokenizer)
    assert "None of the 3 train rows has a token that bears loss" in str(caught.value)
    assert "seq_len" not in str(caught.value)


def test_a_conversation_without_assistant_tokens_reports_the_tokenizer(
    write_jsonl: Callable[..., Path], prepared: Callable[..., PreparedData]
) -> None:
    tokenizer = knows_only("</s>", "a", chat_template="{% for m in messages %}{{ m.content }}{% endfor %}")
    messages = [{"role": "user", "content": "a a"}, {"role": "assistant", "content": "there"}]
    with pytest.raises(DataError, match="produces no tokens for the text to learn"):
        prepared(write_jsonl([{"messages": messages}]), tokenizer=tokenizer)


def test_single_rows_without_tokens_are_skipped_with_a_warning(
    write_jsonl: Callable[..., Path], prepared: Callable[..., PreparedData], events: Any
) -> None:
    tokenizer = knows_only("</s>", "a", eos_token="</s>")
    prepared(write_jsonl([{"text": "a a"}, {"text": "hello"}]), tokenizer=tokenizer)
    (ready,) = events.of("data.ready")
    assert (ready["rows"], ready["skipped_rows"]) == (1, 1)
    assert any("gives no token that bears loss" in event["message"] for event in events.of("warning"))
