"""The texts that SFTTrainer trains on: those that the script names, with one BOS token."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trl
from datasets import Dataset, IterableDataset
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from pantheraml.base.errors import DataError
from pantheraml.hooks import trl as hooks
from pantheraml.hooks.sft_texts import _row_wise

_MESSAGES = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
_SHAREGPT = [{"from": "human", "value": "question"}, {"from": "gpt", "value": "answer"}]


@pytest.fixture(autouse=True)
def patched() -> Iterator[None]:
    hooks.apply()
    yield
    hooks.revert()


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    names = ("<bos>", "<eos>", "<unk>", "one", "two", "question", "answer")
    words = {word: number for number, word in enumerate(names)}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>", pad_token="<eos>", unk_token="<unk>"
    )
    made.chat_template = "{{ bos_token }}{% for message in messages %}{{ message.content }} {% endfor %}"
    return made


@pytest.fixture
def rows_of(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> Callable[..., list[str]]:
    """Return a function that gives the text of the first row, as the trainer has tokenized it."""

    def prepared(dataset: Any, formatting_func: Any = None, **config: Any) -> list[str]:
        sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=8, **sizes))
        args = trl.SFTConfig(output_dir=str(tmp_path), report_to="none", use_cpu=True, bf16=False, **config)
        trainer = trl.SFTTrainer(
            model=model, args=args, processing_class=tokenizer, train_dataset=dataset, formatting_func=formatting_func
        )
        return tokenizer.convert_ids_to_tokens(next(iter(trainer.train_dataset))["input_ids"])

    return prepared


@pytest.mark.parametrize("other", [{"messages": _MESSAGES}, {"prompt": "question"}, {"conversations": _SHAREGPT}])
def test_named_text_comes_before_other_columns(
    other: dict[str, Any], rows_of: Callable[..., list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    row = {"text": "one two", **other}
    with caplog.at_level(logging.WARNING):
        assert rows_of(Dataset.from_list([row]), dataset_text_field="text") == ["<bos>", "one", "two", "<eos>"]
    assert f"not on {next(iter(other))!r}" in caplog.text
    streamed = IterableDataset.from_generator(lambda: iter([row]))
    assert rows_of(streamed, dataset_text_field="text", max_steps=1) == ["<bos>", "one", "two", "<eos>"]


def test_without_a_named_text_the_messages_are_read(
    rows_of: Callable[..., list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    data = Dataset.from_list([{"text": "one two", "messages": _MESSAGES}])
    with caplog.at_level(logging.WARNING):
        assert rows_of(data) == ["<bos>", "question", "answer"]
    assert "set dataset_text_field='text'" in caplog.text


def test_formatted_text_comes_before_other_columns(
    rows_of: Callable[..., list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    data = Dataset.from_list([{"messages": _MESSAGES}])
    with caplog.at_level(logging.WARNING):
        assert rows_of(data, lambda row: f"<bos>{row['messages'][1]['content']}") == ["<bos>", "answer", "<eos>"]
    assert "what formatting_func returns" in caplog.text


def test_one_bos(rows_of: Callable[..., list[str]], caplog: pytest.LogCaptureFixture) -> None:
    data = Dataset.from_list([{"text": "<bos>one"}, {"text": "two"}])
    with caplog.at_level(logging.WARNING):
        assert rows_of(data) == ["<bos>", "one", "<eos>"]
        assert rows_of(data, lambda row: row["text"]) == ["<bos>", "one", "<eos>"]
    assert caplog.text.count("one of the two is left out") == 2


def test_a_text_alone_is_left_as_it_is(rows_of: Callable[..., list[str]], caplog: pytest.LogCaptureFixture) -> None:
    data = Dataset.from_list([{"text": "one", "conversations": _MESSAGES}])
    with caplog.at_level(logging.WARNING, logger="pantheraml"):
        assert rows_of(data, dataset_text_field="text") == ["<bos>", "one", "<eos>"]
    assert not [record for record in caplog.records if record.name.startswith("pantheraml")]


def test_formatting_of_batches() -> None:
    def batched(rows: dict[str, Any]) -> list[str]:
        return [f"{rows['a'][i]}-{rows['b'][i]}" for i in range(len(rows["a"]))]

    def single(row: dict[str, Any]) -> str:
        return f"{row['a']}-{row['b']}"

    row = {"a": "long text", "b": "x"}
    assert _row_wise(batched, row)({"a": "one", "b": "two"}) == "one-two"
    assert _row_wise(single, row) is single
    broken: Any = lambda _: 1 / 0  # noqa: E731
    assert _row_wise(broken, row) is broken


@pytest.mark.parametrize("stream", [False, True])
def test_data_that_cannot_be_trained_on(rows_of: Callable[..., list[str]], stream: bool) -> None:
    for rows, message in (
        ({"text": []}, "The train data set has no rows"),
        (
            {"question": ["one"], "answer": ["two"]},
            r"no column to train on: it has 'question', 'answer'(?s:.*)text_field",
        ),
    ):
        dataset = Dataset.from_dict(rows)
        with pytest.raises(DataError, match=message):
            rows_of(IterableDataset.from_generator(dataset.__iter__) if stream else dataset)
