"""`get_chat_template`: what each named format renders, and how the tokenizer changes."""

from __future__ import annotations

import datetime
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trl

from pantheraml.base.errors import ConfigError, ModelError
from pantheraml.chat_templates import CHAT_TEMPLATES, get_chat_template
from pantheraml.data.chat_templates.markers import infer_markers
from pantheraml.data.chat_templates.registry import KNOWN_NAMES, find_format
from pantheraml.data.chat_templates.rendering import turns
from tests.unit.data.conftest import make_tokenizer

OFFICIAL = Path(trl.__file__).parent / "chat_templates"
"""Templates as the models' authors ship them."""
SHAREGPT = {"role": "from", "content": "value", "user": "human", "assistant": "gpt"}

_VICUNA = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, detailed, "
    "and polite answers to the user's questions."
)
_VICUNA_OLD = _VICUNA.replace("user", "human")
_ALPACA = "Below is an instruction that describes a task. Write a response that appropriately completes the request."
_DATES = (
    "<s><|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024"
)
_HARMONY = (
    "<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\nKnowledge cutoff: 2024-06\n"
    f"Current date: {datetime.date.today()}\n\nReasoning: medium\n\n# Valid channels: analysis, commentary, final. "
    "Channel must be included for every message.<|end|>"
)

_CHATML_TURNS = (
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYes<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n"
)
_CHATML = (_CHATML_TURNS, "<|im_start|>system\nSys<|im_end|>\n" + _CHATML_TURNS, "<|im_start|>assistant\n")
_LLAMA_TURNS = (
    "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    "Yes<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nBye<|eot_id|>"
)
_LLAMA_3_1 = (
    f"{_DATES}\n\n<|eot_id|>{_LLAMA_TURNS}",
    f"{_DATES}\n\nSys<|eot_id|>{_LLAMA_TURNS}",
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
)
_GEMMA = (
    "<s><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\nYes<end_of_turn>\n"
    "<start_of_turn>user\nBye<end_of_turn>\n",
    "<s><start_of_turn>user\nSys\n\nHi<end_of_turn>\n<start_of_turn>model\nYes<end_of_turn>\n"
    "<start_of_turn>user\nBye<end_of_turn>\n",
    "<start_of_turn>model\n",
)
_GEMMA_4_TURNS = "<|turn>user\nHi<turn|>\n<|turn>model\nYes<turn|>\n<|turn>user\nBye<turn|>\n"
_GEMMA_4 = ("<s>" + _GEMMA_4_TURNS, "<s><|turn>system\nSys<turn|>\n" + _GEMMA_4_TURNS, "<|turn>model\n")
_PHI_3_TURNS = "<|user|>\nHi<|end|>\n<|assistant|>\nYes<|end|>\n<|user|>\nBye<|end|>\n"
_PHI_3 = (_PHI_3_TURNS, "<|system|>\nSys<|end|>\n" + _PHI_3_TURNS, "<|assistant|>\n")
_PHI_4_TURNS = (
    "<|im_start|>user<|im_sep|>Hi<|im_end|><|im_start|>assistant<|im_sep|>Yes<|im_end|>"
    "<|im_start|>user<|im_sep|>Bye<|im_end|>"
)
_ZEPHYR_TURNS = "<|user|>\nHi</s>\n<|assistant|>\nYes</s>\n<|user|>\nBye</s>\n"
_HARMONY_TURNS = (
    "<|start|>user<|message|>Hi<|end|><|start|>assistant<|channel|>final<|message|>Yes<|end|>"
    "<|start|>user<|message|>Bye<|end|>"
)
_OLD_TURNS = "### Human: Hi\n### Assistant: Yes</s>\n### Human: Bye\n"
_ALPACA_TURNS = "### Instruction:\nHi\n\n### Response:\nYes</s>\n\n### Instruction:\nBye\n\n"
_UNSLOTH_TURNS = ">>> User: Hi\n>>> Assistant: Yes</s>\n>>> User: Bye\n"
_STARLING_TURNS = (
    "GPT4 Correct User: Hi<|end_of_turn|>GPT4 Correct Assistant: Yes<|end_of_turn|>"
    "GPT4 Correct User: Bye<|end_of_turn|>"
)

EXPECTED: dict[str, tuple[str, str, str]] = {
    # three turns; the same with a system message; what add_generation_prompt appends
    "chatml": _CHATML,
    "yi-chat": _CHATML,
    "lfm-2": ("<s>" + _CHATML[0], "<s>" + _CHATML[1], _CHATML[2]),
    "lfm-2.5": ("<s>" + _CHATML[0], "<s>" + _CHATML[1], _CHATML[2]),
    "llama-3": (
        "<s>" + _LLAMA_TURNS,
        "<s><|start_header_id|>system<|end_header_id|>\n\nSys<|eot_id|>" + _LLAMA_TURNS,
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "llama-3.1": _LLAMA_3_1,
    "llama-3.2": _LLAMA_3_1,
    "llama-3.3": _LLAMA_3_1,
    "gemma": _GEMMA,
    "gemma-2": _GEMMA,
    "gemma-3": _GEMMA,
    "gemma-3n": _GEMMA,
    "gemma-4": _GEMMA_4,
    "gemma-4-thinking": (*_GEMMA_4[:2], "<|turn>model\n<|channel>thought\n<channel|>"),
    "phi-3": _PHI_3,
    "phi-3.5": _PHI_3,
    "phi-4": (
        _PHI_4_TURNS,
        "<|im_start|>system<|im_sep|>Sys<|im_end|>" + _PHI_4_TURNS,
        "<|im_start|>assistant<|im_sep|>",
    ),
    "qwen-2.5": (
        "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
        + _CHATML[0],
        *_CHATML[1:],
    ),
    "qwen-3": _CHATML,
    "qwen3-instruct": _CHATML,
    "qwen3-thinking": (*_CHATML[:2], "<|im_start|>assistant\n<think>\n"),
    "mistral": (
        "<s>[INST] Hi [/INST] Yes</s>[INST] Bye [/INST]",
        "<s>[INST] Sys\n\nHi [/INST] Yes</s>[INST] Bye [/INST]",
        "",
    ),
    "llama": (
        "<s>[INST] Hi [/INST] Yes </s><s>[INST] Bye [/INST]",
        "<s>[INST] <<SYS>>\nSys\n<</SYS>>\n\nHi [/INST] Yes </s><s>[INST] Bye [/INST]",
        "",
    ),
    "zephyr": (_ZEPHYR_TURNS, "<|system|>\nSys</s>\n" + _ZEPHYR_TURNS, "<|assistant|>\n"),
    "vicuna": (
        f"<s>{_VICUNA} USER: Hi ASSISTANT: Yes</s>USER: Bye ",
        "<s>Sys USER: Hi ASSISTANT: Yes</s>USER: Bye ",
        "ASSISTANT:",
    ),
    "vicuna_old": (f"<s>{_VICUNA_OLD}\n{_OLD_TURNS}", f"<s>Sys\n{_OLD_TURNS}", "### Assistant:"),
    "alpaca": (f"<s>{_ALPACA}\n\n{_ALPACA_TURNS}", f"<s>Sys\n\n{_ALPACA_TURNS}", "### Response:\n"),
    "unsloth": (
        f"<s>You are a helpful assistant to the user\n{_UNSLOTH_TURNS}",
        f"<s>Sys\n{_UNSLOTH_TURNS}",
        ">>> Assistant: ",
    ),
    "starling": (
        f"<s>{_STARLING_TURNS}",
        f"<s>GPT4 Correct System: Sys<|end_of_turn|>{_STARLING_TURNS}",
        "GPT4 Correct Assistant:",
    ),
    "gpt-oss": (
        _HARMONY + _HARMONY_TURNS,
        f"{_HARMONY}<|start|>developer<|message|># Instructions\n\nSys\n\n<|end|>{_HARMONY_TURNS}",
        "<|start|>assistant",
    ),
}


def tokenizer_with(*tokens: str | None, template: str | None = None) -> Any:
    tokenizer = make_tokenizer(chat_template=template)
    tokenizer.add_tokens([token for token in tokens if token], special_tokens=True)
    return tokenizer


def ready(name: str, **settings: Any) -> Any:
    """Return a tokenizer with the format's end-of-turn token and template."""
    return get_chat_template(tokenizer_with(find_format(name).end_of_turn), name, **settings)


def text(tokenizer: Any, messages: list[dict[str, Any]], **settings: Any) -> str:
    rendered: str = tokenizer.apply_chat_template(messages, tokenize=False, **settings)
    return rendered


@pytest.mark.parametrize("name", KNOWN_NAMES)
def test_each_format_renders_its_text(name: str) -> None:
    plain, with_system, prompt = EXPECTED[name]
    tokenizer = ready(name)
    assert text(tokenizer, turns("Hi", "Yes", "Bye")) == plain
    assert text(tokenizer, turns("Hi", "Yes", "Bye"), add_generation_prompt=True) == plain + prompt
    assert text(tokenizer, turns("Hi", "Yes", "Bye", system="Sys")) == with_system
    assert text(tokenizer, turns("Hi", "Yes", "Bye", system="Sys"), add_generation_prompt=True) == with_system + prompt


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("llama-3", "llama3"), ("llama-3.1", "llama3_1"), ("llama-3.2", "llama3_2"), ("gemma-3", "gemma3"),
        ("gemma-4", "gemma4"), ("qwen-2.5", "qwen2_5"), ("qwen-3", "qwen3"),
        ("qwen3-instruct", "qwen3_instruct_2507"), ("lfm-2", "lfm2"), ("gpt-oss", "gptoss"),
    ],
)  # fmt: skip
def test_a_format_equals_the_models_own_template(name: str, file: str) -> None:
    own = (OFFICIAL / f"{file}.jinja").read_text()
    tokenizer = ready(name)
    conversations = [
        turns(" a", "b ", "c", "\nd", system=" s "),
        turns("a", "b", "c"),
        turns("a", "<think>\nhm\n</think>\n\nyes", "c", "<think>\nhm\n</think>\n\nno"),
    ]
    for messages in conversations:
        for prompt in (False, True):
            settings = {"add_generation_prompt": prompt, "date_string": "26 Jul 2024"}
            assert text(tokenizer, messages, **settings) == text(tokenizer, messages, chat_template=own, **settings)


@pytest.mark.parametrize(
    ("name", "file"), [("qwen-2.5", "qwen2_5"), ("qwen-3", "qwen3"), ("qwen3-instruct", "qwen3_instruct_2507")]
)
def test_qwen_renders_tools_as_its_own_template_does(name: str, file: str) -> None:
    own = (OFFICIAL / f"{file}.jinja").read_text()
    calls = [{"type": "function", "function": {"name": each, "arguments": {"x": 1}}} for each in ("f", "g")]
    messages: list[dict[str, Any]] = [
        *turns("a", system="s"),
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "7"},
        {"role": "tool", "content": "8"},
        {"role": "assistant", "content": "15", "tool_calls": calls[:1]},
    ]
    tokenizer = ready(name)
    for tools in (None, [{"type": "function", "function": {"name": "f"}}]):
        for conversation in (messages, messages[1:]):
            expected = text(tokenizer, conversation, chat_template=own, tools=tools)
            assert text(tokenizer, conversation, tools=tools) == expected


def test_thinking_can_be_switched() -> None:
    qwen, gemma = ready("qwen-3"), ready("gemma-4-thinking")
    prompt = {"add_generation_prompt": True}
    assert text(qwen, turns("a"), enable_thinking=False, **prompt).endswith("assistant\n<think>\n\n</think>\n\n")
    assert text(gemma, turns("a"), enable_thinking=True, **prompt) == (
        "<s><|turn>system\n<|think|>\n<turn|>\n<|turn>user\na<turn|>\n<|turn>model\n"
    )


def test_content_may_be_a_list_of_parts() -> None:
    parts = [{"type": "image"}, {"type": "text", "text": " what? "}]
    messages = [{"role": "user", "content": parts}]
    assert text(ready("gemma-3"), messages) == "<s><start_of_turn>user\n<start_of_image>what?<end_of_turn>\n"
    assert text(ready("gemma-4"), messages) == "<s><|turn>user\n<|image|>what?<turn|>\n"
    with pytest.raises(Exception, match="no content of type image"):
        text(ready("chatml"), messages)


@pytest.mark.parametrize("name", ["chatml", "gemma-4", "gpt-oss", "llama-3.1"])
def test_what_a_template_cannot_render_is_an_error(name: str) -> None:
    tokenizer = ready(name)
    with pytest.raises(Exception, match="has no tools"):
        text(tokenizer, turns("a"), tools=[{"type": "function", "function": {"name": "f"}}])
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    with pytest.raises(Exception, match="has no tool calls"):
        text(tokenizer, [*turns("a"), call])


def test_names_are_found_in_any_spelling_and_unknown_ones_list_the_known() -> None:
    assert find_format("Gemma3") == find_format("gemma-3")
    assert find_format("qwen2.5") == find_format("qwen-25") == find_format("qwen-2.5")
    with pytest.raises(ConfigError, match=r"no chat template named 'lama-3\.1'") as raised:
        get_chat_template(tokenizer_with(), "lama-3.1")
    assert "Use one of: llama-3.1, " in str(raised.value)
    assert all(name in str(raised.value) for name in KNOWN_NAMES)


@pytest.mark.parametrize("name", KNOWN_NAMES)
def test_the_table_of_templates_has_each_as_a_pair(name: str) -> None:
    pair = CHAT_TEMPLATES[name]
    by_pair = get_chat_template(tokenizer_with(find_format(name).end_of_turn), pair)
    by_name = ready(name)
    conversation = turns("Hi", "Yes", "Bye", system="Sys")
    assert text(by_pair, conversation) == text(by_name, conversation)
    assert by_pair.eos_token == by_name.eos_token


@pytest.mark.parametrize("name", ["chatml", "llama-3.1", "gemma-3", "qwen-3"])
def test_sharegpt_names_render_like_standard_ones(name: str) -> None:
    tokenizer = ready(name, mapping=SHAREGPT)
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    standard = turns("Hi", "Yes", "Bye", system="Sys")
    sharegpt = [{"from": names[each["role"]], "value": each["content"]} for each in standard]
    assert text(tokenizer, sharegpt) == text(tokenizer, standard) == EXPECTED[name][1]
    # rows of a data set with both forms have null for the other's keys
    mixed = [{**each, "role": None, "content": None} for each in sharegpt]
    assert text(tokenizer, mixed) == EXPECTED[name][1]


def test_an_unknown_key_of_the_mapping_is_an_error() -> None:
    with pytest.raises(ConfigError, match="unknown key 'rolle'"):
        get_chat_template(tokenizer_with(), "zephyr", mapping={"rolle": "from"})


def test_a_system_message_is_used_where_there_is_none() -> None:
    message = 'Say "it\'s" {{ x }}\n'
    for name in ("chatml", "gemma-3", "vicuna"):
        tokenizer = ready(name, system_message=message)
        expected = EXPECTED[name][1]
        shown = expected.replace("Sys", message)
        assert text(tokenizer, turns("Hi", "Yes", "Bye")) == shown
        assert text(tokenizer, turns("Hi", "Yes", "Bye", system="Sys")) == expected


def test_the_end_of_turn_token_becomes_eos() -> None:
    tokenizer = ready("llama-3")
    assert tokenizer.eos_token == "<|eot_id|>"
    assert tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids("<|eot_id|>")
    assert ready("llama-3", map_eos_token=False).eos_token == "</s>"
    assert ready("zephyr").eos_token == "</s>"


def test_without_the_end_of_turn_token_turns_end_with_eos(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        tokenizer = get_chat_template(tokenizer_with(), "phi-3")
    assert text(tokenizer, turns("Hi", "Yes")) == "<|user|>\nHi</s>\n<|assistant|>\nYes</s>\n"
    assert tokenizer.eos_token == "</s>"
    (record,) = caplog.records
    assert "<|end|> is not in the vocabulary, so turns end with the eos token </s>" in record.getMessage()


def test_without_any_end_token_it_is_an_error() -> None:
    with pytest.raises(ModelError, match="no eos token to use instead"):
        get_chat_template(make_tokenizer(eos=False), "phi-3")


def test_chatml_on_gemma_starts_with_bos() -> None:
    tokenizer = get_chat_template(tokenizer_with("<start_of_turn>"), "chatml")
    assert text(tokenizer, turns("Hi")) == "<s><|im_start|>user\nHi<|im_end|>\n"


def test_a_template_that_renders_the_same_is_kept() -> None:
    own = (OFFICIAL / "qwen3.jinja").read_text()
    tokenizer = get_chat_template(tokenizer_with(template=own), "qwen-3")
    assert tokenizer.chat_template == own
    assert tokenizer.eos_token == "<|im_end|>"
    assert get_chat_template(tokenizer, "qwen3-instruct").chat_template != own


def test_a_template_that_rejects_system_messages_is_replaced() -> None:
    own = (OFFICIAL / "gemma.jinja").read_text()
    tokenizer = get_chat_template(tokenizer_with("<end_of_turn>", template=own), "gemma")
    assert text(tokenizer, turns("Hi", "Yes", "Bye", system="Sys")) == EXPECTED["gemma"][1]


def test_custom_templates() -> None:
    template = "\n{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}{{ eos_token }}{% endfor %}"
    tokenizer = get_chat_template(tokenizer_with(), (template, "eos_token"), mapping=SHAREGPT)
    assert text(tokenizer, [{"from": "human", "value": "Hi"}]) == "\n[user] Hi</s>"
    assert get_chat_template(tokenizer_with(), template).chat_template == template
    assert get_chat_template(tokenizer_with(), (template, "<|im_end|>")).eos_token == "<|im_end|>"
    with pytest.raises(ConfigError, match="'<stop>' of the chat template is not in the tokenizer's vocabulary"):
        get_chat_template(tokenizer_with(), (template, "<stop>"))
    with pytest.raises(ConfigError, match="cannot render"):
        get_chat_template(tokenizer_with(), "{% for m in messages %}")
    with pytest.raises(ConfigError, match="chat_template is int"):
        get_chat_template(tokenizer_with(), 3)  # type: ignore[arg-type]


def test_a_processor_and_its_tokenizer_get_the_template() -> None:
    inner = tokenizer_with("<end_of_turn>")
    processor = SimpleNamespace(tokenizer=inner, chat_template=None, apply_chat_template=inner.apply_chat_template)
    assert get_chat_template(processor, "gemma-3") is processor
    assert processor.chat_template == inner.chat_template
    assert inner.eos_token == "<end_of_turn>"


def test_markers_are_read_from_the_template() -> None:
    shown = {name: infer_markers(ready(name)) for name in ("chatml", "qwen3-thinking", "mistral", "gemma-4-thinking")}
    assert {name: (each.instruction, each.response) for name, each in shown.items()} == {
        "chatml": ("<|im_start|>user\n", "<|im_start|>assistant\n"),
        "qwen3-thinking": ("<|im_start|>user\n", "<|im_start|>assistant\n"),
        "mistral": ("[INST] ", "[/INST]"),
        "gemma-4-thinking": ("<|turn>user\n", "<|turn>model\n"),
    }
    with pytest.raises(ConfigError, match="does not show where responses start"):
        infer_markers(tokenizer_with())
