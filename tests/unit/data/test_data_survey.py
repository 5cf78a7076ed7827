from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pantheraml.data.dataset import TokenDataset
from pantheraml.data.fingerprint import tokenizer_digest
from pantheraml.data.prepare import PreparedData
from pantheraml.data.row_formats import unused_columns, validate_row
from pantheraml.data.rows import RowError

Prepared = Callable[..., PreparedData]
Write = Callable[..., Path]

TURNS = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]
MARKED = (
    "{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}INSIDE{% endgeneration %}OUTSIDE{% else %}{{ m.content }}{% endif %}{% endfor %}"
)


def with_template(tokenizer: Any, template: Any) -> Any:
    return type(tokenizer)(tokenizer_object=tokenizer.backend_tokenizer, eos_token="</s>", chat_template=template)


def messages_of(events: Any, kind: str) -> str:
    return "\n".join(event["message"] for event in events.of(kind))


def text_of(folder: Path, tokenizer: Any) -> str:
    return str(tokenizer.decode(np.concatenate([TokenDataset.open(folder).sequence(0).input_ids])))


def test_system_and_history_precede_the_instruction(
    write_jsonl: Write, prepared: Prepared, tokenizer: Any, events: Any
) -> None:
    row = {
        "system": "Be brief.",
        "history": [["Add 1 1.", "2"], ["Add 1 2.", "3"]],
        "instruction": "Add.",
        "input": "1 3",
        "output": "4",
    }
    result = prepared(write_jsonl([row]), seq_len=512)
    assert text_of(result.train, tokenizer) == (
        "<s>Be brief.\n\n### Instruction:\nAdd 1 1.\n\n### Response:\n2\n\n### Instruction:\nAdd 1 2.\n\n"
        "### Response:\n3\n\n### Instruction:\nAdd.\n\n### Input:\n1 3\n\n### Response:\n4</s>"
    )
    sequence = TokenDataset.open(result.train).sequence(0)
    assert tokenizer.decode(sequence.labels[sequence.labels != -100]) == "4</s>"
    assert messages_of(events, "warning") == ""


@pytest.mark.parametrize("history", [None, [], "", " ", "[]", "null"])
def test_empty_history_is_dropped(history: Any) -> None:
    row = {"instruction": "a", "output": "b", "history": history, "system": None}
    assert validate_row("instruction", row) == {"instruction": "a", "output": "b"}


def test_history_may_be_a_json_string() -> None:
    row = {"instruction": "a", "output": "b", "history": json.dumps([["x", "y"]])}
    assert validate_row("instruction", row)["history"] == [["x", "y"]]


@pytest.mark.parametrize(
    ("history", "field"),
    [("words", "history"), ({"a": 1}, "history"), ([["a"]], "history[0]"), ([[1, "b"]], "history[0]")],
)
def test_history_of_the_wrong_type_is_reported(history: Any, field: str) -> None:
    with pytest.raises(RowError) as caught:
        validate_row("instruction", {"instruction": "a", "output": "b", "history": history})
    assert caught.value.field == field


def test_unused_columns_are_reported_in_every_run(write_jsonl: Write, prepared: Prepared, events: Any) -> None:
    rows = [{"prompt": "a", "completion": "b", "system": "be kind", "topic": "x", "id": 3, "empty": ""}] * 3
    rows += [{"prompt": "a", "completion": "b", "tools": "[]", "late": 1}] * 200
    path = write_jsonl(rows)
    prepared(path)
    assert "does not use `system`" in messages_of(events, "warning")
    assert "unused columns: `topic`" in messages_of(events, "notice")
    assert "`late`" in messages_of(events, "notice")
    assert "`id`" not in messages_of(events, "notice")
    assert "empty" not in messages_of(events, "notice")
    events.events.clear()
    prepared(path)
    assert events.of("data.ready")[0]["cached"]
    assert "does not use `system`" in messages_of(events, "warning")
    assert messages_of(events, "notice").count("`topic`") == 1


def test_an_unused_column_that_appears_late_is_reported(write_jsonl: Write, prepared: Prepared, events: Any) -> None:
    rows: list[dict[str, Any]] = [{"text": f"row {index}"} for index in range(150)]
    path = write_jsonl([*rows, {"text": "last", "system": "be kind"}])
    prepared(path)
    assert "does not use `system`" in messages_of(events, "warning")
    events.events.clear()
    prepared(path)
    assert events.of("data.ready")[0]["cached"]
    assert "does not use `system`" in messages_of(events, "warning")


def test_used_columns_are_not_reported() -> None:
    assert unused_columns("messages", ["messages", "tools", "id"]) == ([], [])
    assert unused_columns("instruction", ["instruction", "input", "output", "system", "history"]) == ([], [])
    assert unused_columns("text", ["text", "history", "label"]) == (["history"], ["label"])


def test_a_template_without_tools_emits_a_warning(
    write_jsonl: Write, prepared: Prepared, chat_tokenizer: Any, events: Any
) -> None:
    path = write_jsonl([{"messages": TURNS, "tools": [{"name": "f"}]}])
    prepared(path, tokenizer=chat_tokenizer)
    assert "does not render tools" in messages_of(events, "warning")


def test_the_tool_template_is_used_if_there_is_one(
    write_jsonl: Write, prepared: Prepared, chat_tokenizer: Any, events: Any
) -> None:
    template = (
        "{% for t in tools or [] %}{{ t.name }} {% endfor %}{% for m in messages %}{{ m.content }}</s>{% endfor %}"
    )
    several = with_template(chat_tokenizer, {"default": "unused", "tool_use": template})
    result = prepared(write_jsonl([{"messages": TURNS, "tools": [{"name": "hammer"}]}]), tokenizer=several)
    assert text_of(result.train, several) == "hammer hello</s>hi</s>"
    assert messages_of(events, "warning") == ""


@pytest.mark.parametrize(
    ("inside", "outside", "warned"),
    [
        ("<|im_end|>", "", False),
        ("</s>", "", False),
        ("<|im_end|>\n", "", False),
        ("", "<|im_end|>", True),
        ("", "", True),
    ],
)
def test_turns_without_an_end_token_emit_a_warning(
    write_jsonl: Write, prepared: Prepared, chat_tokenizer: Any, events: Any, inside: str, outside: str, warned: bool
) -> None:
    template = MARKED.replace("INSIDE", inside).replace("OUTSIDE", outside)
    path = write_jsonl([{"messages": TURNS}])
    for _ in ("fresh", "cached"):
        events.events.clear()
        prepared(path, tokenizer=with_template(chat_tokenizer, template))
        assert ("no end token that bears loss" in messages_of(events, "warning")) == warned


def test_tokenizer_digest_covers_settings_outside_tokenizer_json(chat_tokenizer: Any) -> None:
    plain, splitting = (with_template(chat_tokenizer, "x") for _ in range(2))
    splitting.split_special_tokens = True
    assert tokenizer_digest(plain, with_template=False) != tokenizer_digest(splitting, with_template=False)
    several = [with_template(chat_tokenizer, {"default": "x", "tool_use": use}) for use in ("y", "z")]
    assert len({tokenizer_digest(each, with_template=True) for each in several}) == 2


def test_column_names_are_shortened_and_escaped(write_jsonl: Write, prepared: Prepared, events: Any) -> None:
    strange = {"\x1b[31mred\n": 1, "long" * 100: 2} | {f"column {index}": index for index in range(50)}
    prepared(write_jsonl([{"text": "a"} | strange]))
    notices = messages_of(events, "notice")
    assert "`\\x1b[31mred\\n`" in notices
    assert len(notices) < 500
    with pytest.raises(RowError) as caught:
        validate_row("text", strange)
    assert len(str(caught.value)) < 500
    assert "\x1b" not in str(caught.value)
