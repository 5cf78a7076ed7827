"""Which tokens of a tokenized conversation are responses."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from pantheraml.chat_templates import get_chat_template, train_on_responses_only
from pantheraml.data.chat_templates.markers import TurnMarkers, infer_markers
from pantheraml.data.chat_templates.registry import KNOWN_NAMES, find_format
from pantheraml.data.chat_templates.rendering import render, turns
from pantheraml.data.chat_templates.response_mask import IGNORED, ResponseMask
from tests.unit.data.conftest import make_tokenizer

CONVERSATION = turns("Hi", "Yes", "Bye", "No", system="Sys")
REPLIES = {
    "mistral": " Yes</s> No</s>",
    "llama": " Yes </s> No </s>",
    "vicuna": " Yes</s> No</s>",
    "vicuna_old": " Yes</s> No</s>",
    "starling": " Yes<|end_of_turn|> No<|end_of_turn|>",
    "gpt-oss": "<|channel|>final<|message|>Yes<|end|><|channel|>final<|message|>No<|return|>",
    "qwen-3": "Yes<|im_end|><think>\n\n</think>\n\nNo<|im_end|>",
    "qwen3-thinking": "Yes<|im_end|><think>\n\n</think>\n\nNo<|im_end|>",
}
TEXT_MARKERS = TurnMarkers("User:", "Assistant:", frozenset())


def sentencepiece() -> Any:
    """Return a tokenizer that joins a space to the word after it, as Llama 2's does."""
    words = ["▁Yes", "▁No", "▁Hi", "▁Bye", "[INST]", "[/INST]", "▁[INST]", "▁[/INST]", "Yes"]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    vocabulary = ["<unk>", "<s>", "</s>", *bytes_, *words, *"▁abcdefghijklmnopqrstuvwxyzSHYNB[]/IT<>"]
    scores = [(word, float(len(word))) for word in dict.fromkeys(vocabulary)]
    tokenizer = Tokenizer(models.Unigram(scores, 0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def labeled(tokenizer: Any, text: str, markers: TurnMarkers, **settings: Any) -> str:
    """Return the text of the tokens that are responses."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids).replace(" ", "") == text.replace(" ", "")
    mask = ResponseMask(tokenizer, markers, **settings)(ids)
    decoded: str = tokenizer.decode([each for each, keep in zip(ids, mask, strict=True) if keep])
    return decoded


@pytest.mark.parametrize("name", KNOWN_NAMES)
def test_responses_and_their_end_tokens_in_every_format(name: str) -> None:
    end = find_format(name).end_of_turn or "</s>"
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([end, "<|end|>"], special_tokens=True)
    get_chat_template(tokenizer, name)
    text = render(tokenizer, CONVERSATION)
    assert labeled(tokenizer, text, infer_markers(tokenizer)) == REPLIES.get(name, f"Yes{end}No{end}")


def test_a_space_that_belongs_to_the_first_word_is_no_obstacle() -> None:
    tokenizer = get_chat_template(sentencepiece(), "mistral")
    text = render(tokenizer, turns("Hi", "Yes", "Bye", "No"))
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert "▁Yes" in tokenizer.convert_ids_to_tokens(ids)
    mask = ResponseMask(tokenizer, infer_markers(tokenizer))(ids)
    kept = [token for token, keep in zip(tokenizer.convert_ids_to_tokens(ids), mask, strict=True) if keep]
    assert kept == ["▁Yes", "</s>", "▁No", "</s>"]


def test_a_newline_that_merges_with_the_response_bears_loss() -> None:
    tokenizer = make_tokenizer(bos=False)
    tokenizer.add_tokens(["\n\n"])
    get_chat_template(tokenizer, "chatml")
    text = render(tokenizer, turns("Hi", "\nYes"))
    assert labeled(tokenizer, text, infer_markers(tokenizer)) == "\n\nYes<|im_end|>"


def test_plain_text_markers() -> None:
    tokenizer = make_tokenizer(bos=False)
    unclosed = "User: Hi\nAssistant: Yes\nUser: Bye\nAssistant: No</s>"
    assert labeled(tokenizer, unclosed, TEXT_MARKERS) == " Yes\n No</s>"
    closed = "User: Hi\nAssistant: a User: field</s>User: Bye\nAssistant: No"
    assert labeled(tokenizer, closed, TEXT_MARKERS) == " a User: field</s> No"
    assert labeled(tokenizer, "User: Hi", TEXT_MARKERS) == ""


def test_other_roles_after_a_response_bear_no_loss() -> None:
    tokenizer = get_chat_template(make_tokenizer(bos=False), "chatml")
    messages = [*turns("Hi", "Yes"), {"role": "tool", "content": "7"}, {"role": "assistant", "content": "No"}]
    assert labeled(tokenizer, render(tokenizer, messages), infer_markers(tokenizer)) == "Yes<|im_end|>No<|im_end|>"


def test_characters_that_are_split_into_several_tokens() -> None:
    tokenizer = make_tokenizer(bos=False)
    markers = TurnMarkers("用户：", "助手：", frozenset())
    text = "用户：🙂 问题\n助手：🙂 好的🙂\n用户：再见\n助手：再见"
    assert labeled(tokenizer, text, markers) == "🙂 好的🙂\n再见"


def test_an_eos_token_after_the_end_of_turn_bears_loss_too() -> None:
    tokenizer = get_chat_template(make_tokenizer(bos=False), "chatml", map_eos_token=False)
    text = render(tokenizer, turns("Hi", "Yes"))
    assert labeled(tokenizer, text + "</s>", infer_markers(tokenizer)) == "Yes<|im_end|>\n</s>"
    # but not the second of two of the same, which TRL adds
    get_chat_template(tokenizer, "chatml")
    assert labeled(tokenizer, text + "<|im_end|>", infer_markers(tokenizer)) == "Yes<|im_end|>"


def test_only_the_last_response() -> None:
    tokenizer = get_chat_template(make_tokenizer(bos=False), "chatml")
    text = render(tokenizer, CONVERSATION)
    assert labeled(tokenizer, text, infer_markers(tokenizer), last_only=True) == "No<|im_end|>"


def test_responses_end_with_their_document_in_a_packed_row() -> None:
    tokenizer = make_tokenizer(bos=False)
    first, second = ([*tokenizer(text)["input_ids"]] for text in ("Assistant: cut", "Sys User: Hi Assistant: Yes"))
    mask = ResponseMask(tokenizer, TEXT_MARKERS)
    row, lengths = first + second, [len(first), len(second)]
    kept = [each for each, keep in zip(row, mask(row, lengths), strict=True) if keep]
    assert tokenizer.decode(kept) == " cut Yes"
    assert mask(row).sum() > len(kept)  # without the lengths, `Sys` seems to continue the first response


def test_labels_that_were_masked_before_stay_masked() -> None:
    tokenizer = get_chat_template(make_tokenizer(bos=False), "chatml")
    ids = tokenizer(render(tokenizer, CONVERSATION))["input_ids"]
    make = train_on_responses_only(None, tokenizer=tokenizer, return_function=True)
    (labels,) = make({"input_ids": [ids]})["labels"]
    first = next(at for at, label in enumerate(labels) if label != IGNORED)
    before = [IGNORED if at == first else each for at, each in enumerate(ids)]
    (again,) = make({"input_ids": [ids], "labels": [before]})["labels"]
    assert again == [IGNORED if at == first else label for at, label in enumerate(labels)]
    (padded,) = make({"input_ids": [ids], "attention_mask": [[0] * len(ids)]})["labels"]
    assert set(padded) == {IGNORED}
