from __future__ import annotations

from typing import Any

import pytest

from pantheraml.base.errors import ModelError
from pantheraml.data.chat import ChatEncoder
from pantheraml.data.documents import loss_mask
from pantheraml.data.formats import render_prompt
from pantheraml.data.row_formats import validate_row
from pantheraml.data.rows import RowError

CONVERSATION = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "hello and good day"},
    {"role": "user", "content": "bye"},
    {"role": "assistant", "content": "so soon?"},
]
MARKED = (
    "{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
# renders an empty thinking block in the last assistant turn, like Qwen3's template
THOUGHTFUL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# numbers the turns from the end, so that every turn changes when another one follows
BACKWARDS = "{% for m in messages %}{{ messages | length - loop.index }}: {{ m.content }}\n{% endfor %}"
ALTERNATING = "{% if messages[0].role != 'user' %}{{ raise_exception('user must begin') }}{% endif %}x"


def with_template(tokenizer: Any, template: str | None) -> Any:
    return type(tokenizer)(
        tokenizer_object=tokenizer.backend_tokenizer, eos_token="</s>", bos_token=None, chat_template=template
    )


def encode(tokenizer: Any, messages: list[dict[str, str]]) -> tuple[str, str]:
    """Return the rendered conversation and the part that bears loss."""
    (document,) = ChatEncoder(tokenizer).encode([validate_row("messages", {"messages": messages})])
    if isinstance(document, RowError):
        raise document
    tokens, runs = document
    return tokenizer.decode(tokens), tokenizer.decode(tokens[loss_mask(runs, len(tokens))])


def test_loss_is_on_assistant_turns_and_their_end_tokens_only(chat_tokenizer: Any) -> None:
    whole, targets = encode(chat_tokenizer, CONVERSATION)
    assert whole == chat_tokenizer.apply_chat_template(CONVERSATION, tokenize=False)
    assert targets == "hello and good day<|im_end|>\nso soon?<|im_end|>\n"


def test_generation_marks_take_precedence(chat_tokenizer: Any) -> None:
    _, targets = encode(with_template(chat_tokenizer, MARKED), CONVERSATION)
    assert targets == "hello and good day<|im_end|>so soon?<|im_end|>"


def test_a_template_that_renders_the_last_turn_differently(chat_tokenizer: Any) -> None:
    _, targets = encode(with_template(chat_tokenizer, THOUGHTFUL), CONVERSATION)
    assert targets == "hello and good day<|im_end|>\n<think>\n\n</think>\n\nso soon?<|im_end|>\n"


def test_turns_that_cannot_be_located_are_rejected(chat_tokenizer: Any) -> None:
    with pytest.raises(RowError, match="generation") as caught:
        encode(with_template(chat_tokenizer, BACKWARDS), CONVERSATION)
    assert caught.value.field == "messages[2]"


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        (ALTERNATING, "user must begin"),
        ("{{ messages[0].content + 1 }}", "str"),
        ("{{ messages[0].a.b }}", "no attribute"),
    ],
)
def test_a_template_error_makes_a_bad_row(chat_tokenizer: Any, template: str, problem: str) -> None:
    with pytest.raises(RowError, match=problem):
        encode(with_template(chat_tokenizer, template), CONVERSATION)


def test_an_empty_assistant_turn_still_has_its_end_token(chat_tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "hush"}, {"role": "assistant", "content": ""}]
    assert encode(chat_tokenizer, messages)[1] == "<|im_end|>\n"


def test_repeated_content_is_masked_correctly(chat_tokenizer: Any) -> None:
    messages = [
        {"role": "user", "content": "same"},
        {"role": "assistant", "content": "same"},
        {"role": "user", "content": "same"},
        {"role": "assistant", "content": "same"},
    ]
    for template in (None, THOUGHTFUL):
        tokenizer = with_template(chat_tokenizer, template) if template else chat_tokenizer
        _, targets = encode(tokenizer, messages)
        assert targets.replace("<think>\n\n</think>\n\n", "") == "same<|im_end|>\nsame<|im_end|>\n"


def test_no_first_token_bears_loss(chat_tokenizer: Any) -> None:
    template = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    assert encode(with_template(chat_tokenizer, template), [{"role": "assistant", "content": "xyz"}])[1] == "yz"


def test_an_assistant_first_conversation_needs_generation_marks(chat_tokenizer: Any) -> None:
    with pytest.raises(RowError, match="before the assistant's first"):
        encode(chat_tokenizer, [{"role": "assistant", "content": "xyz"}])


def test_keys_that_arrow_filled_with_null_are_dropped() -> None:
    row = {"messages": [{"role": "assistant", "content": "a", "name": None}]}
    assert validate_row("messages", row) == {"messages": [{"role": "assistant", "content": "a"}]}


def test_a_tokenizer_without_template_suggests_a_fix(chat_tokenizer: Any) -> None:
    with pytest.raises(ModelError, match="no chat template") as caught:
        ChatEncoder(with_template(chat_tokenizer, None))
    assert "model.tokenizer" in str(caught.value.fix)


def test_a_prompt_becomes_a_user_turn_and_the_generation_prompt(chat_tokenizer: Any) -> None:
    ids = render_prompt("messages", "hello", chat_tokenizer)
    assert chat_tokenizer.decode(ids) == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
