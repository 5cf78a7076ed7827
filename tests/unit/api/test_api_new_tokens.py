"""Adapters of a model whose vocabulary has grown: saved by PEFT, and loaded on the base as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from pantheraml import FastLanguageModel
from pantheraml.base.errors import ModelError
from tests import toy

pytestmark = pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`:UserWarning")

TARGETS = ["q_proj", "down_proj"]


def loaded(path: Path, **loading: Any) -> Any:
    model, tokenizer = FastLanguageModel.from_pretrained(
        str(path), device_map="cpu", **{"load_in_4bit": False, **loading}
    )
    return model, tokenizer


def saved(base: Path, output: Path, trained: list[str] | None, **saving: Any) -> Any:
    """Add tokens, train nothing but change every trainable weight, and save; return model and tokenizer."""
    torch.manual_seed(0)
    model, _ = loaded(base)
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<tool>", "</tool>"]})
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    model = FastLanguageModel.get_peft_model(model, r=4, target_modules=TARGETS, modules_to_save=trained)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(output, **saving)
    tokenizer.save_pretrained(output)
    return model.eval(), tokenizer


def logits(model: Any, tokenizer: Any) -> torch.Tensor:
    tokens = tokenizer("<tool>1+2</tool>3", return_tensors="pt")
    assert tokens["input_ids"].max() == len(tokenizer) - 1
    with torch.no_grad():
        found: torch.Tensor = model.eval()(tokens["input_ids"]).logits
    return found


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("trained", [None, ["embed_tokens"], ["embed_tokens", "lm_head"]])
def test_an_adapter_with_new_tokens_is_loaded(tied: bool, trained: list[str] | None, tmp_path: Path) -> None:
    if tied and trained is not None and "lm_head" in trained:
        trained = ["embed_tokens"]
    base = toy.write_llama(tmp_path / "base", tie_word_embeddings=tied)
    model, tokenizer = saved(base, tmp_path / "adapter", trained)
    again, its_tokenizer = loaded(tmp_path / "adapter")
    assert len(its_tokenizer) == len(tokenizer)
    torch.testing.assert_close(logits(again, its_tokenizer), logits(model, tokenizer), rtol=1e-5, atol=1e-6)
    again.save_pretrained(tmp_path / "again")
    third, _ = loaded(tmp_path / "again")
    torch.testing.assert_close(logits(third, tokenizer), logits(model, tokenizer), rtol=1e-5, atol=1e-6)


def test_what_was_not_saved_is_an_error(tmp_path: Path) -> None:
    """The rows of new tokens in a head that nobody saved are random numbers that are gone."""
    base = toy.write_llama(tmp_path / "base")
    saved(base, tmp_path / "adapter", ["embed_tokens"])
    file = tmp_path / "adapter/adapter_model.safetensors"
    save_file({name: w for name, w in load_file(file).items() if "lm_head" not in name}, file)
    with pytest.raises(ModelError, match="lacks lm_head in that size") as caught:
        loaded(tmp_path / "adapter")
    assert "save_embedding_layers=True" in str(caught.value)


def test_a_base_of_other_width_is_an_error(tmp_path: Path) -> None:
    saved(toy.write_llama(tmp_path / "base"), tmp_path / "adapter", None)
    toy.write_llama(tmp_path / "base", hidden_size=64)
    with pytest.raises(ModelError):
        loaded(tmp_path / "adapter")


@pytest.mark.parametrize("loading", ["load_in_4bit", "load_in_8bit", "load_in_fp8"])
def test_over_a_quantized_base(loading: str, tmp_path: Path) -> None:
    base = toy.write_llama(tmp_path / "base")
    model, tokenizer = saved(base, tmp_path / "adapter", None)
    again, _ = loaded(tmp_path / "adapter", **{loading: True})
    torch.testing.assert_close(logits(again, tokenizer), logits(model, tokenizer), rtol=0.1, atol=0.05)
