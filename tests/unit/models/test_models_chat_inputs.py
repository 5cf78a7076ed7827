"""Chat templates: the result is used as token ids, as in transformers 4, and as a mapping, as in transformers 5."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM

from pantheraml.engine.memory.checkpointing import apply_checkpointing
from pantheraml.models.causal_lm import make_fast
from pantheraml.models.chat_inputs import accept_both_forms
from pantheraml.models.loader import load_model, load_tokenizer
from pantheraml.specs.train import ModelConfig

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}>{% endif %}"
)
CHAT = [{"role": "user", "content": "Hello"}]
TEXT = "user: Hello\n>"


@pytest.fixture(scope="module")
def model_and_tokenizer(tiny_model: Callable[..., Path]) -> tuple[Any, Any]:
    config = ModelConfig(path=str(tiny_model("llama")))
    model = make_fast(load_model(config, dtype=torch.float32, device=torch.device("cpu")))
    tokenizer = load_tokenizer(config)
    tokenizer.chat_template = TEMPLATE
    return model, accept_both_forms(tokenizer)


@pytest.fixture
def ids(model_and_tokenizer: tuple[Any, Any]) -> list[int]:
    return list(model_and_tokenizer[1](TEXT, add_special_tokens=False)["input_ids"])


def test_without_tensors_it_is_a_list_and_a_mapping(model_and_tokenizer: tuple[Any, Any], ids: list[int]) -> None:
    _, tokenizer = model_and_tokenizer
    result = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True)
    assert isinstance(result, list)
    assert result == ids
    assert len(result) == len(ids) > 2
    assert tokenizer.decode(result) == TEXT
    assert result["input_ids"] == result.input_ids == ids
    assert dict(**result) == {"input_ids": ids, "attention_mask": [1] * len(ids)}
    assert copy.deepcopy(result) == ids
    assert pickle.loads(pickle.dumps(result))["input_ids"] == ids


def test_a_dataset_column_has_the_ids(model_and_tokenizer: tuple[Any, Any], ids: list[int]) -> None:
    _, tokenizer = model_and_tokenizer
    rows = Dataset.from_dict({"prompt": [CHAT, CHAT]})
    mapped = rows.map(
        lambda x: {"tokens": tokenizer.apply_chat_template(x["prompt"], add_generation_prompt=True, tokenize=True)},
        batched=True,
    )
    assert mapped[0]["tokens"] == ids
    assert mapped.map(lambda x: {"L": len(x["tokens"])})["L"] == [len(ids)] * 2


def test_with_tensors_it_is_a_mapping_and_answers_as_its_ids(
    model_and_tokenizer: tuple[Any, Any], ids: list[int]
) -> None:
    _, tokenizer = model_and_tokenizer
    result = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_tensors="pt").to("cpu")
    assert isinstance(result, Mapping)
    assert set(result) == set(result.keys()) == {"input_ids", "attention_mask"}
    assert result.shape == (1, len(ids))
    assert len(result) == 1
    assert result[0].tolist() == ids
    assert tokenizer.decode(result[0]) == TEXT
    assert result["input_ids"].tolist() == result.tolist() == [ids]
    assert pickle.loads(pickle.dumps(result)).input_ids.tolist() == [ids]
    with pytest.raises(AttributeError):
        _ = result.nothing


def test_explicit_return_dict_is_left_to_transformers(model_and_tokenizer: tuple[Any, Any]) -> None:
    _, tokenizer = model_and_tokenizer
    result = tokenizer.apply_chat_template(CHAT, return_dict=True)
    assert len(result) == 2
    assert not isinstance(result, list)
    assert type(tokenizer.apply_chat_template(CHAT, return_dict=False)) is list
    assert tokenizer.apply_chat_template(CHAT, tokenize=False) == "user: Hello\n"


def test_copies_and_saved_tokenizers(model_and_tokenizer: tuple[Any, Any], ids: list[int], tmp_path: Path) -> None:
    _, tokenizer = model_and_tokenizer
    for other in (copy.deepcopy(tokenizer), pickle.loads(pickle.dumps(tokenizer)), accept_both_forms(tokenizer)):
        assert type(other) is type(tokenizer)
        assert other.apply_chat_template(CHAT, add_generation_prompt=True) == ids
    tokenizer.save_pretrained(tmp_path)
    plain = load_tokenizer(ModelConfig(path="unused", tokenizer=str(tmp_path)))
    assert type(plain) in type(tokenizer).__mro__
    assert len(plain.apply_chat_template(CHAT)) == 2  # transformers 5: a mapping


def test_generate_accepts_every_form(model_and_tokenizer: tuple[Any, Any], ids: list[int]) -> None:
    model, tokenizer = model_and_tokenizer
    settings: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False}
    expected = model.generate(input_ids=torch.tensor([ids]), **settings)
    inputs = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_tensors="pt")
    by_transformers = tokenizer.apply_chat_template(
        CHAT, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    for given in (inputs, by_transformers, dict(by_transformers)):
        assert torch.equal(model.generate(given, **settings), expected)
        assert torch.equal(model.generate(input_ids=given, **settings), expected)
        assert torch.equal(model.generate(input_ids=given, attention_mask=None, **settings), expected)
        assert torch.equal(model.generate(**given, **settings), expected)


@pytest.mark.parametrize("mode", ["trainer's", "full", "offload"])
def test_generate_needs_no_eval_mode(tiny_model: Callable[..., Path], mode: Any) -> None:
    """As after `trainer.train()`: checkpointed layers would drop the key/value cache."""
    config = ModelConfig(path=str(tiny_model("llama")))
    model = make_fast(load_model(config, dtype=torch.float32, device=torch.device("cpu")))
    settings: dict[str, Any] = {"input_ids": torch.arange(3, 15)[None], "max_new_tokens": 8, "do_sample": False}
    expected = model.eval().generate(**settings)
    if mode == "trainer's":
        model.gradient_checkpointing_enable()
    else:
        apply_checkpointing(model, mode)
    layers = [m for m in model.modules() if getattr(m, "gradient_checkpointing", False)]
    assert layers
    assert torch.equal(model.train().generate(**settings), expected)
    assert model.training
    assert all(layer.gradient_checkpointing for layer in layers)


def test_torch_and_forward_passes_compute_with_the_ids(
    model_and_tokenizer: tuple[Any, Any], ids: list[int], tiny_model: Callable[..., Path]
) -> None:
    model, tokenizer = model_and_tokenizer
    inputs = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_tensors="pt")
    row = torch.tensor([ids])
    assert torch.equal(torch.cat([inputs, row], dim=-1), torch.cat([row, row], dim=-1))
    assert torch.isin(row, inputs).all()
    plain = AutoModelForCausalLM.from_pretrained(tiny_model("llama"), dtype=torch.float32)
    for each in (model.eval(), plain):
        assert torch.equal(each(inputs).logits, each(row).logits)
        assert torch.equal(each(input_ids=inputs).logits, each(row).logits)
    assert tokenizer.batch_decode(inputs) == tokenizer.decode(inputs) == [TEXT]


def test_the_mask_of_the_mapping_is_used(model_and_tokenizer: tuple[Any, Any]) -> None:
    model, tokenizer = model_and_tokenizer
    tokenizer.padding_side = "left"
    chats = [CHAT, [{"role": "user", "content": "A longer question"}]]
    inputs = tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_tensors="pt", padding=True)
    settings: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    expected = model.generate(**inputs, **settings)
    assert torch.equal(model.generate(input_ids=inputs, **settings), expected)
    own = {**inputs, "attention_mask": torch.ones_like(inputs["attention_mask"])}
    given = model.generate(input_ids=inputs, attention_mask=own["attention_mask"], **settings)
    assert torch.equal(given, model.generate(**own, **settings))
    assert not torch.equal(given, expected)
