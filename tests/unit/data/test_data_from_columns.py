"""`to_sharegpt` and `apply_chat_template`: columns to conversations, and a template from an example."""

from __future__ import annotations

from typing import Any

import pytest
from datasets import Dataset

from pantheraml.base.errors import ConfigError, DataError
from pantheraml.chat_templates import apply_chat_template, standardize_sharegpt, to_sharegpt
from tests.unit.data.conftest import make_tokenizer

ROWS = [
    {"instruction": f"do {n}", "input": f"with {n}" if n % 2 else "", "output": f"done {n}"} for n in range(8)
]  # fmt: skip
ONE = "Some tasks.\n\n### Instruction:\n{INPUT}\n\n### Response:\n{OUTPUT}"


def conversations(extension: int = 1) -> Dataset:
    data = to_sharegpt(
        Dataset.from_list(ROWS), merged_prompt="{instruction}[[\nInput:\n{input}]]", conversation_extension=extension
    )
    return standardize_sharegpt(data)


@pytest.fixture
def tokenizer() -> Any:
    return make_tokenizer()  # one per test: the template is set on it


def test_optional_parts_of_the_prompt() -> None:
    data = conversations()
    assert data.column_names == ["conversations"]
    assert data[2]["conversations"] == [{"role": "user", "content": "do 2"}, {"role": "assistant", "content": "done 2"}]
    assert data[3]["conversations"][0]["content"] == "do 3\nInput:\nwith 3"


def test_extension_joins_rows() -> None:
    data = conversations(extension=3)
    assert all(len(row["conversations"]) == 6 for row in data)
    for turn in (0, 2, 4):  # each row is used once in each place
        assert sorted(row["conversations"][turn + 1]["content"] for row in data) == [f"done {n}" for n in range(8)]
    assert [row["conversations"][1]["content"] for row in data] == [f"done {n}" for n in range(8)]
    assert conversations(extension=3)[0] == data[0]


def test_missing_column() -> None:
    with pytest.raises(DataError, match="context"):
        to_sharegpt(Dataset.from_list(ROWS), merged_prompt="{instruction} {context}")


@pytest.mark.parametrize("example", [ONE, f"{ONE}</s>\n\n### Instruction:\n{{INPUT}}\n\n### Response:\n{{OUTPUT}}</s>"])
def test_template_from_an_example(tokenizer: Any, example: str) -> None:
    eos = tokenizer.eos_token
    example = example.replace("</s>", eos)
    data = apply_chat_template(conversations(extension=2), tokenizer=tokenizer, chat_template=example)
    first, second = (data[0]["conversations"][i : i + 2] for i in (0, 2))
    turns = [
        f"\n\n### Instruction:\n{user['content']}\n\n### Response:\n{answer['content']}{eos}"
        for user, answer in (first, second)
    ]
    assert data[0]["text"] == "Some tasks." + "".join(turns)
    prompt = tokenizer.apply_chat_template(first[:1], tokenize=False, add_generation_prompt=True)
    bos = tokenizer.bos_token or ""
    assert prompt == f"{bos}Some tasks.\n\n### Instruction:\n{first[0]['content']}\n\n### Response:\n"
    system = [{"role": "system", "content": "Be brief."}, *first]
    assert tokenizer.apply_chat_template(system, tokenize=False) == f"{bos}Be brief.{turns[0]}"


def test_system_slot(tokenizer: Any) -> None:
    apply_chat_template(
        conversations(), tokenizer, "[{SYSTEM}]\n\nQ: {INPUT}\nA: {OUTPUT}", default_system_message="Help."
    )
    bos, eos = tokenizer.bos_token or "", tokenizer.eos_token
    chat = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == f"{bos}[Help.]\n\nQ: x\nA: y{eos}"
    chat.insert(0, {"role": "system", "content": "S"})
    assert tokenizer.apply_chat_template(chat, tokenize=False) == f"{bos}[S]\n\nQ: x\nA: y{eos}"


@pytest.mark.parametrize("example", ["", "{OUTPUT} {INPUT}", "{INPUT}", "a {INPUT} b {OUTPUT} c {INPUT} d {OUTPUT}"])
def test_examples_that_show_no_format(tokenizer: Any, example: str) -> None:
    with pytest.raises(ConfigError):
        apply_chat_template(conversations(), tokenizer, example)
