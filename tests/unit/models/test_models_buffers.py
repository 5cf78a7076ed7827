"""Buffers of a streamed model that are in no file get transformers' values."""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

from pantheraml.models.checkpoint_mapping import CannotStream
from pantheraml.models.stream import stream_model
from pantheraml.models.weight_reader import WeightPlacement
from tests.unit.models.tiny_families import tiny_configs

pytestmark = pytest.mark.extended

PLAIN = WeightPlacement(None, None, torch.float32, torch.device("cpu"))


def streamed(folder: Path, attention: str, place: WeightPlacement = PLAIN) -> Any:
    return stream_model(AutoConfig.from_pretrained(folder), [folder / "model.safetensors"], attention, place)


def differing(model: nn.Module, expected: nn.Module) -> list[str]:
    """Return the names of buffers that differ from `expected`; NaN equals NaN."""
    theirs = dict(expected.named_buffers())
    ours = dict(model.named_buffers())
    assert ours.keys() == theirs.keys()
    return [
        name
        for name, buffer in ours.items()
        if buffer.dtype != theirs[name].dtype
        or not torch.allclose(buffer.double(), theirs[name].double(), rtol=0, atol=0, equal_nan=True)
    ]


def dirty_memory() -> None:
    """Fill the memory that the next small allocations are likely to reuse, so that unwritten buffers are not zero."""
    filled = [torch.full((size,), torch.nan) for size in itertools.chain(range(1, 65), (128, 512, 2048, 8192))]
    del filled


def test_buffers_of_every_family_match_transformers(tmp_path: Path) -> None:
    compared, wrong = [], {}
    for family, config in tiny_configs():
        folder = tmp_path / family
        expected: Any = nn.Module()
        with contextlib.suppress(Exception):  # transformers itself cannot save or reload some
            AutoModelForCausalLM.from_config(config).save_pretrained(folder)
            expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        if not list(expected.buffers()):
            continue
        dirty_memory()
        try:
            model = streamed(folder, expected.config._attn_implementation)
        except CannotStream:
            continue  # loaded by transformers instead
        compared.append(family)
        if names := differing(model, expected):
            wrong[family] = names
    assert not wrong
    assert {"falcon_h1", "llama", "gemma3_text", "gpt_bigcode", "gpt_oss", "lfm2"} <= set(compared)
    assert len(compared) >= 80


def test_buffers_filled_by_a_parent_with_quantized_layers(tmp_path: Path) -> None:
    (config,) = [config for family, config in tiny_configs() if family == "falcon_h1"]
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    expected = dict(AutoModelForCausalLM.from_pretrained(tmp_path).named_buffers())
    dirty_memory()
    packed = dict(streamed(tmp_path, "sdpa", replace(PLAIN, target="nf4")).named_buffers())
    assert [name for name in expected if not torch.equal(packed[name], expected[name])] == []


def test_a_buffer_that_nothing_fills_is_loaded_by_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = AutoConfig.for_model(
        "llama", hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, vocab_size=264
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    made = LlamaForCausalLM.__init__

    def with_table(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        self.model.register_buffer("table", torch.arange(4.0), persistent=False)

    monkeypatch.setattr(LlamaForCausalLM, "__init__", with_table)
    with pytest.raises(CannotStream, match=r"model\.table"):
        streamed(tmp_path, "sdpa")
