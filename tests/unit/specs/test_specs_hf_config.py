"""Limits on a model's config.json."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import StrictDataclassError
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from pantheraml.base.errors import ModelError
from pantheraml.specs.hf_config import MAX_BYTES, read_hf_config


def folder(tmp_path: Path, text: str) -> Path:
    (tmp_path / "config.json").write_text(text)
    return tmp_path


def test_values_are_returned(tmp_path: Path) -> None:
    values: dict[str, Any] = {"num_hidden_layers": 126, "vocab_size": 262_144, "text_config": {"hidden_size": 16_384}}
    assert read_hf_config(folder(tmp_path, json.dumps(values))) == values


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"num_hidden_layers": 20000}', "num_hidden_layers=20000, above the limit of 2,048"),
        ('{"text_config": {"n_layer": 2049}}', "n_layer=2049, above the limit of 2,048"),
        ('{"num_decoder_layers": 20000}', "num_decoder_layers=20000, above the limit of 2,048"),
        ('{"num_blocks": 20000}', "num_blocks=20000, above the limit of 2,048"),
        ('{"num_blocks": 1e9}', "above the limit of 2,048"),
        ('{"attention_types": [[["global"], 1000000000]]}', "attention_types=1000000000, above the limit of 16,777"),
        ('{"head_dim": 1000000}', "head_dim=1000000, above the limit of 16,384"),
        ('{"max_position_embeddings": 1000000000}', "above the limit of 134,217,728"),
        ('{"anything": 4294967296}', "above the limit of 2,147,483,648"),
        ('{"anything": 1' + "0" * 4000 + "}", "more than 63 bits"),
        ('{"parts": [{"vocab_size": 1000000000}]}', "vocab_size=1000000000, above the limit of 16,777,216"),
        ('{"a": ' + "[" * 40 + "]" * 40 + "}", "nested more than 32 levels"),
        ('{"a": ' + "[" * 200_000, "nested more than 32 levels"),
        (" " * MAX_BYTES + "{}", "larger than 16 MiB"),
        ("{", "not valid JSON"),
        ("[]", "contains no settings"),
    ],
    ids=[
        "layers",
        "inner layers",
        "decoder layers",
        "blocks",
        "blocks as float",
        "list",
        "head",
        "positions",
        "other",
        "long",
        "vocabulary",
        "deep",
        "deeper",
        "large",
        "cut",
        "no settings",
    ],
)
def test_values_over_a_limit_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        read_hf_config(folder(tmp_path, text))
    assert caught.value.where == str(tmp_path / "config.json")
    assert caught.value.fix


def test_published_values_are_within_the_limits(tmp_path: Path) -> None:
    """Outliers (Llama 4 Scout, Falcon-H1, Mamba 2), and the defaults of every family."""
    values = {"max_position_embeddings": 10_485_760, "rope_theta": 100_000_000_000, "time_step_limit": [0.0, math.inf]}
    assert read_hf_config(folder(tmp_path, json.dumps(values))) == values
    for family in MODEL_FOR_CAUSAL_LM_MAPPING:
        try:
            values = family().to_dict()
        except (ImportError, StrictDataclassError):  # it has no defaults, or needs a library that is not installed
            continue
        read_hf_config(folder(tmp_path, json.dumps(values)))


def test_folder_without_config_json(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        read_hf_config(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError) as caught:
        read_hf_config(tmp_path)
    assert "adapter" in (caught.value.fix or "")
