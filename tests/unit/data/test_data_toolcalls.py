from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from pantheraml.base.errors import DataError
from pantheraml.data import columnar
from pantheraml.data.chat import ChatEncoder
from pantheraml.data.documents import loss_mask
from pantheraml.data.row_formats import validate_row
from pantheraml.data.rows import RowError
from tests import toy

# The relevant parts of each family's own template.
QWEN25 = (
    "{% if tools %}{{ '<|im_start|>system\\n# Tools' }}{% for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}"
    "{{ '<|im_end|>\\n' }}{% endif %}"
    "{% for message in messages %}"
    "{% if message.role == 'assistant' %}{{ '<|im_start|>assistant' }}"
    "{% if message.content %}{{ '\\n' + message.content }}{% endif %}"
    "{% for call in message.tool_calls %}{% if call.function is defined %}{% set call = call.function %}{% endif %}"
    '{{ \'\\n<tool_call>\\n{"name": "\' + call.name + \'", "arguments": \' }}{{ call.arguments | tojson }}'
    "{{ '}\\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\\n' }}"
    "{% elif message.role == 'tool' %}{{ '<|im_start|>user\\n<tool_response>\\n' }}{{ message.content }}"
    "{{ '\\n</tool_response><|im_end|>\\n' }}"
    "{% else %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# renders an empty thinking block in the last turn only
QWEN3 = (
    "{% for message in messages %}"
    "{% if message.role == 'assistant' %}{{ '<|im_start|>assistant\\n' }}"
    "{% if loop.last %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
    "{% if message.content is string %}{{ message.content }}{% endif %}"
    "{% for call in message.tool_calls %}{% if call.function %}{% set call = call.function %}{% endif %}"
    '{{ \'<tool_call>\\n{"name": "\' + call.name + \'", "arguments": \' }}'
    "{% if call.arguments is string %}{{ call.arguments }}{% else %}{{ call.arguments | tojson }}{% endif %}"
    "{{ '}\\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\\n' }}"
    "{% else %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA3 = """
{%- for message in messages %}
{%- if 'tool_calls' in message %}
{%- if message.tool_calls | length != 1 %}{{ raise_exception("single tool-calls only") }}{% endif %}
{%- set tool_call = message.tool_calls[0].function %}<|start|>assistant<|end|>

{"name": "{{ tool_call.name }}", "parameters": {{ tool_call.arguments | tojson }}}<|eot|>
{%- elif message.role == "tool" %}<|start|>ipython<|end|>

{{ message.content }}<|eot|>
{%- else %}<|start|>{{ message.role }}<|end|>

{{ message.content | trim }}<|eot|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant<|end|>

{% endif %}"""
# tests for null content to detect a tool call, and concatenates the arguments with strings
DEEPSEEK = """
{%- for message in messages %}
{%- if message['role'] == 'assistant' and message['content'] is none %}<A>
{%- for call in message['tool_calls'] %}{{ '<call>' + call['function']['name'] + ':' + call['function']['arguments'] }}
{%- endfor %}<E>
{%- elif message['role'] == 'assistant' %}<A>{{ message['content'] }}<E>
{%- else %}<U>{{ message['content'] }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}<A>{% endif %}"""
# prints the content, whatever it is, and the calls as they are
PRINTING = """
{%- for message in messages %}<{{ message.role }}>{{ message['content'] | trim }}
{%- for call in message.tool_calls %}[{{ call.function.name }} {{ call.function.arguments }}]{% endfor %}<E>
{%- endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""
TEMPLATES = {"qwen2.5": QWEN25, "qwen3": QWEN3, "llama3": LLAMA3, "deepseek": DEEPSEEK, "printing": PRINTING}

ARGUMENTS = {"city": "Köln", "unit": None}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"city": "string"}}}]


def conversation(arguments: Any, **content: Any) -> list[dict[str, Any]]:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    return [
        {"role": "user", "content": "How is it in Köln?"},
        {"role": "assistant", "tool_calls": [call], **content},
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
        {"role": "assistant", "content": "It rains."},
    ]


def encode(tokenizer: Any, template: str, row: dict[str, Any]) -> tuple[str, str]:
    """Return the rendered conversation and the part that bears loss."""
    made = type(tokenizer)(tokenizer_object=tokenizer.backend_tokenizer, eos_token="</s>", chat_template=template)
    (document,) = ChatEncoder(made).encode([validate_row("messages", row)])
    if isinstance(document, RowError):
        raise document
    tokens, runs = document
    return made.decode(tokens), made.decode(tokens[loss_mask(runs, len(tokens))])


@pytest.mark.parametrize("content", [{"content": None}, {}, {"content": ""}], ids=["null", "missing", "empty"])
@pytest.mark.parametrize("form", ["text", "object"])
@pytest.mark.parametrize("family", TEMPLATES)
def test_a_turn_with_only_a_tool_call_is_rendered_and_bears_loss(
    chat_tokenizer: Any, family: str, form: str, content: dict[str, Any]
) -> None:
    arguments = json.dumps(ARGUMENTS, ensure_ascii=False) if form == "text" else ARGUMENTS
    whole, targets = encode(chat_tokenizer, TEMPLATES[family], {"messages": conversation(arguments, **content)})
    assert "None" not in whole
    called = json.dumps(ARGUMENTS, ensure_ascii=False)
    assert whole.count(called) == 1, whole
    assert called in targets
    assert "weather" in targets
    assert targets.count("It rains.") == 1
    assert "Köln?" not in targets
    assert "rain" not in targets.replace("It rains.", "")


def test_content_next_to_tool_calls_is_kept(chat_tokenizer: Any) -> None:
    messages = conversation(ARGUMENTS, content="Let me look: None")
    whole, targets = encode(chat_tokenizer, QWEN25, {"messages": messages})
    assert "Let me look: None" in targets
    assert whole.count("None") == 1


def test_an_empty_tool_result_is_accepted(chat_tokenizer: Any) -> None:
    messages = conversation(ARGUMENTS, content=None)
    messages[2]["content"] = None
    whole, _ = encode(chat_tokenizer, QWEN25, {"messages": messages})
    assert "<tool_response>\n\n</tool_response>" in whole


def test_a_template_that_drops_tool_calls_is_rejected(chat_tokenizer: Any) -> None:
    with pytest.raises(RowError, match="drops a call of `weather`"):
        encode(
            chat_tokenizer,
            "{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}",
            {"messages": conversation(ARGUMENTS, content=None)},
        )


FIRST_CALL_ONLY = """
{%- for message in messages %}<{{ message.role }}>{{ message.content or '' }}
{%- if message.tool_calls %}[{{ message.tool_calls[0].function.name }} {{ message.tool_calls[0].function.arguments }}]
{%- endif %}<E>{%- endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""


def test_a_name_in_the_text_of_a_message_is_not_a_call(chat_tokenizer: Any) -> None:
    messages = conversation("{}", content=None)
    messages[0]["content"] = "Ask for the weather in Köln."
    with pytest.raises(RowError, match="drops a call of `weather`") as caught:
        encode(chat_tokenizer, toy.TEMPLATE, {"messages": messages, "tools": TOOLS})
    assert "whose chat template renders tool calls" in str(caught.value.fix)


def test_every_call_must_be_rendered(chat_tokenizer: Any) -> None:
    messages = conversation("{}", content=None)
    encode(chat_tokenizer, FIRST_CALL_ONLY, {"messages": messages})
    messages[1]["tool_calls"] *= 2
    with pytest.raises(RowError, match="drops a call of `weather`"):
        encode(chat_tokenizer, FIRST_CALL_ONLY, {"messages": messages})


def test_the_older_form_of_a_call_must_be_rendered(chat_tokenizer: Any) -> None:
    messages = conversation("{}", content=None)
    messages[1]["function_call"] = messages[1].pop("tool_calls")[0]["function"]
    messages[0]["content"] = "Ask for the weather in Köln."
    with pytest.raises(RowError, match="drops a call of `weather`"):
        encode(chat_tokenizer, toy.TEMPLATE, {"messages": messages})


def test_the_error_asks_for_a_tokenizer_that_renders_calls(
    write_jsonl: Callable[..., Path], prepared: Callable[..., Any], chat_tokenizer: Any
) -> None:
    path = write_jsonl([{"messages": conversation("{}", content=None)}])
    with pytest.raises(DataError, match="whose chat template renders tool calls") as caught:
        prepared(path, tokenizer=chat_tokenizer)
    assert "on_bad_row" not in str(caught.value)


@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS), [json.dumps(TOOLS[0])]], ids=["list", "text", "texts"])
def test_tools_reach_the_template(chat_tokenizer: Any, tools: Any) -> None:
    row = {"messages": conversation(ARGUMENTS, content=None), "tools": tools}
    whole, targets = encode(chat_tokenizer, QWEN25, row)
    assert whole.startswith("<|im_start|>system\n# Tools\n" + json.dumps(TOOLS[0]))
    assert "# Tools" not in targets


@pytest.mark.parametrize("tools", [None, [], "", "null", "[]"])
def test_empty_tools_are_dropped(tools: Any) -> None:
    row = {"messages": [{"role": "assistant", "content": "a"}], "tools": tools}
    assert validate_row("messages", row) == {"messages": row["messages"]}


@pytest.mark.parametrize(
    ("row", "field", "problem"),
    [
        ({"messages": [{"role": "assistant", "content": None}]}, "messages[0].content", "or null with `tool_calls`"),
        ({"messages": [{"role": "assistant", "tool_calls": []}]}, "messages[0].content", "found null"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "expected a string, found null"),
        ({"messages": [{"role": "assistant", "tool_calls": [3]}]}, "messages[0].tool_calls", "the number 3"),
        ({"messages": [{"role": "assistant", "content": "a"}], "tools": "hammer"}, "tools", "expected JSON"),
        ({"messages": [{"role": "assistant", "content": "a"}], "tools": {"a": 1}}, "tools", "list of objects"),
        ({"messages": [{"role": "assistant", "content": "a"}], "tools": "[" * 90 + "]" * 90}, "tools", "64 levels"),
        ({"messages": [{"role": "assistant", "content": "a"}], "tools": "[" * 9999}, "tools", "expected JSON"),
    ],
)
def test_invalid_messages_and_tools_are_reported(row: dict[str, Any], field: str, problem: str) -> None:
    with pytest.raises(RowError, match=problem) as caught:
        validate_row("messages", row)
    assert caught.value.field == field


def test_parquet_tool_calls_keep_only_their_own_arguments(chat_tokenizer: Any, tmp_path: Path) -> None:
    """Arrow gives every object of a column the keys of all others, filled with null."""
    rows = [
        {"messages": conversation({"city": "Köln"}, content=None)},
        {"messages": conversation({"id": 3}, content=None)},
    ]
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    read = [row for chunk in columnar.read_parquet(tmp_path / "a.parquet") for _, row in chunk.rows()]
    wholes = [encode(chat_tokenizer, QWEN25, row)[0] for row in read]
    assert '"arguments": {"city": "Köln"}}' in wholes[0]
    assert '"arguments": {"id": 3}}' in wholes[1]
