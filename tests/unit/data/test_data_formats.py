from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tokenizers import processors

from pantheraml.data import row_formats
from pantheraml.data.documents import loss_mask
from pantheraml.data.formats import Encoder, prompt_ids, render_prompt, special_prefix
from pantheraml.data.row_formats import detect, validate_row
from pantheraml.data.rows import Row, RowError


def encode(format: str, row: dict[str, Any], tokenizer: Any) -> tuple[list[int], str]:
    """Return the tokens of a row and the text of those that bear loss."""
    (document,) = Encoder(format, tokenizer).encode([validate_row(format, row)])
    assert not isinstance(document, RowError), document
    tokens, runs = document
    return tokens.tolist(), tokenizer.decode(tokens[loss_mask(runs, len(tokens))])


@pytest.mark.parametrize(
    ("columns", "format"),
    [
        (["text"], "text"),
        (["completion", "prompt", "id"], "prompt"),
        (["instruction", "input", "output", "text"], "instruction"),
        (["instruction", "output"], "instruction"),
        (["messages", "text", "prompt", "completion"], "messages"),
        (["prompt"], None),
        (["Text"], None),
        ([], None),
    ],
)
def test_detection_by_columns(columns: list[str], format: str | None) -> None:
    assert detect(columns) == format


def test_text_bears_loss_including_its_end_token(tokenizer: Any) -> None:
    tokens, targets = encode("text", {"text": "hello there"}, tokenizer)
    assert tokenizer.decode(tokens) == "<s>hello there</s>"
    assert targets == "hello there</s>"


def test_only_the_completion_bears_loss(tokenizer: Any) -> None:
    tokens, targets = encode("prompt", {"prompt": "2+2=", "completion": "4"}, tokenizer)
    assert tokenizer.decode(tokens) == "<s>2+2=4</s>"
    assert targets == "4</s>"


def test_the_instruction_template(tokenizer: Any) -> None:
    row = {"instruction": "Add.", "input": "1 2", "output": "3"}
    tokens, targets = encode("instruction", row, tokenizer)
    assert tokenizer.decode(tokens) == ("<s>### Instruction:\nAdd.\n\n### Input:\n1 2\n\n### Response:\n3</s>")
    assert targets == "3</s>"


@pytest.mark.parametrize("nothing", [{}, {"input": ""}, {"input": None}])
def test_the_template_drops_an_empty_input(tokenizer: Any, nothing: dict[str, Any]) -> None:
    tokens, _ = encode("instruction", {"instruction": "Go.", "output": "ok", **nothing}, tokenizer)
    assert tokenizer.decode(tokens) == "<s>### Instruction:\nGo.\n\n### Response:\nok</s>"


def test_special_tokens_in_the_text_are_not_doubled(tokenizer: Any) -> None:
    tokens, targets = encode("text", {"text": "<s>hello</s>"}, tokenizer)
    assert tokenizer.decode(tokens) == "<s>hello</s>"
    assert targets == "hello</s>"


def test_without_bos_the_first_token_of_the_text_bears_no_loss(chat_tokenizer: Any) -> None:
    tokens, targets = encode("text", {"text": "xyz"}, chat_tokenizer)
    assert chat_tokenizer.decode(tokens) == "xyz</s>"
    assert targets == "yz</s>"


def test_a_prompt_does_not_get_the_tokenizer_suffix(tokenizer: Any) -> None:
    closing = type(tokenizer)(tokenizer_object=tokenizer.backend_tokenizer, bos_token="<s>", eos_token="</s>")
    closing.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    assert special_prefix(closing) == [0]
    tokens, _ = encode("prompt", {"prompt": "a", "completion": "b"}, closing)
    assert closing.decode(tokens) == "<s>ab</s>"


@pytest.mark.parametrize(
    ("format", "row", "field", "problem"),
    [
        ("text", {"txt": "a"}, "text", "expected the field `text`, found only txt"),
        ("text", {"text": None}, "text", "expected a string, found null"),
        ("text", {"text": " \n"}, "text", "expected text, found the string"),
        ("text", {"text": ""}, "text", "expected text, found nothing"),
        ("text", {"text": "\ud83d"}, "text", r"half a surrogate pair \(\\ud83d\)"),
        ("prompt", {"prompt": "a", "completion": 3}, "completion", "expected a string, found the number 3"),
        ("prompt", {"prompt": "a", "completion": True}, "completion", "found the boolean true"),
        ("instruction", {"instruction": "a", "output": ["b"]}, "output", r"found the list \['b'\]"),
        ("instruction", {"instruction": "a", "input": 1, "output": "b"}, "input", "found the number 1"),
        ("messages", {"messages": "hi"}, "messages", "expected a list .* found the string 'hi'"),
        ("messages", {"messages": []}, "messages", "expected a list"),
        ("messages", {"messages": ["hi"]}, "messages[0]", "expected a {role, content} object"),
        ("messages", {"messages": [{"role": "user"}]}, "messages[0].content", "expected a string, found null"),
        ("messages", {"messages": [{"content": "x"}]}, "messages[0].role", "expected a string, found null"),
        ("messages", {"messages": [{"role": "user", "content": "x"}]}, "messages", "role `assistant`"),
    ],
)
def test_a_bad_row_reports_its_field_and_what_was_expected(
    format: str, row: dict[str, Any], field: str, problem: str
) -> None:
    with pytest.raises(RowError, match=problem) as caught:
        validate_row(format, row)
    assert caught.value.field == field


def test_a_long_value_is_shortened() -> None:
    with pytest.raises(RowError) as caught:
        validate_row("text", {"text": ["word"] * 10_000})
    assert len(caught.value.problem) < 150


@pytest.mark.parametrize(
    ("format", "row"),
    [
        ("prompt", {"prompt": "2+2=", "completion": "4"}),
        ("instruction", {"instruction": "2+2=", "output": "4"}),
    ],
)
def test_a_prompt_has_the_same_tokens_in_generation_as_in_training(
    tokenizer: Any, format: str, row: dict[str, Any]
) -> None:
    tokens, _ = encode(format, row, tokenizer)
    prompt = render_prompt(format, "2+2=", tokenizer)
    assert tokens[: len(prompt)] == prompt
    assert tokenizer.decode(tokens[len(prompt) :]) == "4</s>"


def test_a_text_prompt_gets_no_end_token(tokenizer: Any) -> None:
    assert tokenizer.decode(render_prompt("text", "hello", tokenizer)) == "<s>hello"


def test_rows_are_encoded_in_their_order(tokenizer: Any) -> None:
    rows = [{"prompt": f"p{i}" * i, "completion": f"c{i}"} for i in range(1, 30)]
    texts = [tokenizer.decode(np.asarray(document[0])) for document in Encoder("prompt", tokenizer).encode(rows)]
    assert texts == [f"<s>{row['prompt']}{row['completion']}</s>" for row in rows]


SPLIT: list[tuple[str, Row, str, str]] = [
    ("prompt", {"prompt": "1+1=", "completion": "2"}, "1+1=", "2"),
    (
        "instruction",
        {"instruction": "Add", "input": "1, 1", "output": "2", "system": "Be short.", "history": [["a", "b"]]},
        "Be short.\n\nAdd\n\n1, 1",
        "2",
    ),
    (
        "messages",
        {"messages": [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]},
        "1+1=",
        "2",
    ),
    (
        "messages",
        {
            "messages": [
                {"role": "system", "content": "Be short."},
                {"role": "user", "content": "1+1="},
                {"role": "assistant", "content": "2"},
                {"role": "user", "content": "?"},
            ]
        },
        "system: Be short.\n\nuser: 1+1=",
        "2",
    ),
]


@pytest.mark.parametrize(("format", "row", "shown", "expected"), SPLIT)
def test_a_row_without_its_answer_has_the_tokens_before_it(
    tokenizer: Any, chat_tokenizer: Any, format: str, row: Row, shown: str, expected: str
) -> None:
    row = row_formats.validate_row(format, row)
    rest, prompt, answer = row_formats.split_row(format, row)
    assert (prompt, answer) == (shown, expected)
    tokenizer = chat_tokenizer if format == "messages" else tokenizer
    [(tokens, runs)] = Encoder(format, tokenizer).encode([row])  # type: ignore[misc]
    assert prompt_ids(format, rest, tokenizer) == list(tokens[: runs[-2]])


def test_half_of_a_text_is_its_prompt() -> None:
    assert row_formats.split_row("text", {"text": "a b  c d e"}) == ({"text": "a b"}, "a b", "c d e")
    long = " ".join(map(str, range(1000)))
    assert row_formats.split_row("text", {"text": long})[1] == " ".join(map(str, range(row_formats.TEXT_WORDS)))
    assert row_formats.split_row("text", {"text": "one"})[1:] == ("one", "")


def test_a_row_that_begins_with_the_answer_has_no_prompt() -> None:
    with pytest.raises(RowError, match="before the assistant"):
        row_formats.split_row("messages", {"messages": [{"role": "assistant", "content": "hi"}]})
