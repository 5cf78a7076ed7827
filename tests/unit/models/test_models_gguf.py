"""GGUF files, read back by the `gguf` package: keys, tokens and every weight; and what cannot be converted.

What llama.cpp makes of them: test_models_gguf_llama_cpp.py, where its binding is installed.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from pantheraml import FastLanguageModel
from pantheraml.base.errors import ConfigError, MissingExtraError, ModelError, PantheraError, UnsupportedModelError
from pantheraml.models.gguf.kinds import parse_kinds
from pantheraml.models.gguf.save import save_gguf
from tests.unit.models.conftest import COMMON
from tests.unit.models.gguf_tokenizers import CHAT, SIZE, tokenizer

SIZES = {**COMMON, "vocab_size": SIZE, "hidden_size": 64, "head_dim": 16, "intermediate_size": 96}
GEMMA2 = {"query_pre_attn_scalar": 16, "sliding_window": 8, "tie_word_embeddings": True}


def tiny(family: str = "llama", **changes: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**SIZES, **changes}))
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.data.add_(torch.randn_like(parameter), alpha=0.2)
    return model.eval()


def read(file: Path) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, str]]:
    """The keys, the tensors in float32, and their kinds."""
    reader = gguf.GGUFReader(file)
    keys = {name: field.contents() for name, field in reader.fields.items()}
    tensors = {
        t.name: torch.from_numpy(
            np.array(gguf.quants.dequantize(t.data, t.tensor_type)).reshape([int(n) for n in reversed(t.shape)])
        )
        for t in reader.tensors
    }
    return keys, tensors, {t.name: t.tensor_type.name for t in reader.tensors}


def half_split(weight: Tensor, heads: int) -> Tensor:
    """Undo the order of llama.cpp, whose RoPE rotates neighboring rows, not the halves of a head."""
    rows = weight.reshape(heads, -1, 2, *weight.shape[1:])
    return rows.transpose(1, 2).reshape(weight.shape)


@pytest.mark.parametrize(
    ("kind", "matrices", "error"),
    [("f32", "F32", 0), ("f16", "F16", 5e-4), ("bf16", "BF16", 4e-3), ("q8_0", "Q8_0", 0.01)],
)
def test_every_weight_is_in_the_file(tmp_path: Path, kind: str, matrices: str, error: float) -> None:
    model, own = tiny(), tokenizer("gpt-2")
    (file,) = save_gguf(model, tmp_path / "out", own, kind)
    assert file.name == f"out.{kind.upper()}.gguf"
    keys, tensors, kinds = read(file)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    weights = {name: parameter.data for name, parameter in model.named_parameters()}
    assert len(tensors) == len(weights)
    for name, weight in weights.items():
        target = str(names.get_name(name, try_suffixes=(".weight",)))
        heads = {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2])
        found = tensors[target] if heads is None else half_split(tensors[target], heads)
        assert found.shape == weight.shape
        assert float((found - weight).abs().max()) <= error * float(weight.abs().max()), name
        assert kinds[target] == ("F32" if weight.ndim == 1 else matrices)
    assert keys["general.architecture"] == "llama"
    assert keys["llama.block_count"] == 2
    assert keys["llama.attention.head_count_kv"] == 2
    assert keys["llama.context_length"] == COMMON["max_position_embeddings"]
    assert keys["tokenizer.chat_template"] == CHAT
    assert keys["tokenizer.ggml.tokens"][: len(own)] == own.convert_ids_to_tokens(list(range(len(own))))
    assert keys["tokenizer.ggml.eos_token_id"] == own.eos_token_id


def test_norms_of_gemma_are_stored_with_their_one(tmp_path: Path) -> None:
    model = tiny("gemma2", **GEMMA2)
    (file,) = save_gguf(model, tmp_path / "out", tokenizer("gpt-2"), "f32")
    keys, tensors, _ = read(file)
    torch.testing.assert_close(tensors["output_norm.weight"], 1 + model.model.norm.weight.data)
    assert "output.weight" not in tensors, "the head is the embedding"
    assert keys["gemma2.attention.sliding_window"] == 8


def test_adapters_are_merged(tmp_path: Path) -> None:
    own, folder = tokenizer("gpt-2"), tmp_path / "model"
    tiny().save_pretrained(folder)
    own.save_pretrained(folder)
    model, _ = FastLanguageModel.from_pretrained(str(folder), device_map="cpu", dtype=torch.float32)
    adapted: Any = FastLanguageModel.get_peft_model(model, r=4)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    (file,) = adapted.save_pretrained_gguf(tmp_path / "adapted", own, "f32")
    merged = adapted.merge_and_unload()
    (plain,) = save_gguf(merged, tmp_path / "merged", own, "f32")
    found, expected = read(Path(file))[1], read(plain)[1]
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=1e-6)
    assert not torch.equal(
        found["blk.0.ffn_up.weight"], dict(tiny().named_parameters())["model.layers.0.mlp.up_proj.weight"]
    )


def word_piece() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")


@pytest.mark.parametrize(
    ("family", "changes", "own", "error", "message"),
    [
        ("gpt2", {}, "gpt-2", UnsupportedModelError, r"type 'gpt2' cannot be converted(?s:.*)Known types are llama,"),
        ("llama", {"hidden_act": "gelu"}, "gpt-2", UnsupportedModelError, "the activation is gelu"),
        ("gemma2", {**GEMMA2, "query_pre_attn_scalar": 8}, "gpt-2", UnsupportedModelError, "attn_scalar is 8"),
        ("llama", {}, None, ConfigError, "none is given"),
        ("llama", {}, "wordpiece", UnsupportedModelError, "WordPiece, not BPE"),
        ("llama", {"vocab_size": 300}, "gpt-2", UnsupportedModelError, "embedding only 300 rows"),
    ],
)
def test_what_cannot_be_converted(
    tmp_path: Path, family: str, changes: dict[str, Any], own: str | None, error: type[PantheraError], message: str
) -> None:
    chosen = word_piece() if own == "wordpiece" else None if own is None else tokenizer(own)
    with pytest.raises(error, match=message):
        save_gguf(tiny(family, **changes), tmp_path / "out", chosen, "f16")
    assert not (tmp_path / "out").exists()


def test_a_value_beyond_f16_leaves_no_file(tmp_path: Path) -> None:
    model = tiny()
    model.model.layers[1].mlp.up_proj.weight.data[0, 0] = 1e5
    with pytest.raises(ModelError, match=r"blk\.1\.ffn_up\.weight has values beyond the range of f16(?s:.*)bf16"):
        save_gguf(model, tmp_path / "out", tokenizer("gpt-2"), "f16")
    assert list(tmp_path.rglob("*.gguf")) == []


def test_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert parse_kinds(["Q8_0", "fast_quantized", "not_quantized"]) == ["q8_0", "bf16"]
    with pytest.raises(MissingExtraError, match="q4_k_m needs the program llama-quantize"):
        parse_kinds("quantized")
    with pytest.raises(ConfigError, match=r"no GGUF kind 'q9_9'(?s:.*)q8_0"):
        parse_kinds("q9_9")
    with pytest.raises(ConfigError, match="No GGUF kind"):
        parse_kinds([])


def test_the_error_of_llama_quantize_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "bin" / "llama-quantize"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\necho loading >&2\necho 'no room for' $3 >&2\nexit 3\n")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tool.parent}{os.pathsep}{os.environ['PATH']}")
    with pytest.raises(ModelError, match="llama-quantize failed with exit code 3: no room for Q4_K_M"):
        save_gguf(tiny(), tmp_path / "out", tokenizer("gpt-2"), "q4_k_m")
    assert list(tmp_path.rglob("*.gguf")) == []
