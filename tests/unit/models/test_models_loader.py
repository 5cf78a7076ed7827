"""Loading: results, and one clear error for each thing that can be wrong with a model folder."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText, DiffusionGemmaConfig, Gemma4Config

from pantheraml.base.errors import ModelError, UnsupportedModelError
from pantheraml.models.loader import attention_for, check_model, load_model, load_tokenizer, read_config
from pantheraml.models.model_kind import VISION
from pantheraml.specs import hf_config
from pantheraml.specs.paths import is_hub_name
from pantheraml.specs.train import ModelConfig
from tests.ports import reserved_port

HERE: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu")}


@pytest.fixture
def folder(tiny_model: Callable[..., Path], tmp_path: Path) -> Path:
    """A copy of a Llama folder that tests may modify."""
    return Path(shutil.copytree(tiny_model("llama"), tmp_path / "llama"))


def config(folder: Path | str, **changes: Any) -> ModelConfig:
    return ModelConfig(path=str(folder), **changes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loads_in_the_requested_dtype_without_a_cache(folder: Path, dtype: torch.dtype) -> None:
    model: Any = load_model(config(folder), dtype=dtype, device=torch.device("cpu"))
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert model.config._attn_implementation == "sdpa"
    assert model(input_ids=torch.arange(4)[None]).past_key_values is None


def test_random_init_needs_no_weights_and_depends_only_on_the_seed(folder: Path) -> None:
    (folder / "model.safetensors").unlink()

    def weights(seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        model = load_model(config(folder, init="random"), dtype=dtype, device=torch.device("cpu"), seed=seed)
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    state = torch.get_rng_state()
    first = weights(1)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(3)
    assert torch.equal(weights(1), first)
    assert torch.equal(weights(1, torch.bfloat16), first.bfloat16())
    assert not torch.equal(weights(2), first)


def test_sharded_weights_load_and_a_missing_shard_is_reported(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = list(tensors)
    parts = {"model-00001-of-00002.safetensors": names[:5], "model-00002-of-00002.safetensors": names[5:]}
    for file, keys in parts.items():
        save_file({key: tensors[key] for key in keys}, folder / file, metadata={"format": "pt"})
    where = {key: file for file, keys in parts.items() for key in keys}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    load_model(config(folder), **HERE)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match="1 of 2 weight files are missing, such as model-00002-of-00002"):
        check_model(config(folder))
    (folder / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(ModelError, match="weight index is corrupted"):
        check_model(config(folder))


NEO = {"model_type": "gpt_neo", "hidden_size": 16, "num_layers": 2, "num_heads": 2, "vocab_size": 64,
       "attention_types": [[["global"], 2]]}  # fmt: skip


@pytest.mark.parametrize("init", ["random", "pretrained"])
def test_small_config_with_gigabytes_of_buffers_is_refused(folder: Path, init: str) -> None:
    (folder / "config.json").write_text(json.dumps(NEO | {"max_position_embeddings": 300_000}))
    with pytest.raises(ModelError, match=r"would take 167 GiB, above the limit of 4 GiB"):
        load_model(config(folder, init=init), **HERE)


@pytest.mark.parametrize("wrong", [{"hidden_size": "x"}, {"attention_types": 7}, {"num_layers": 3}])
def test_config_that_transformers_refuses(folder: Path, wrong: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(NEO | wrong))
    with pytest.raises(ModelError, match=r"config\.json cannot be used") as raised:
        check_model(config(folder))
    assert raised.value.where == str(folder / "config.json")


@pytest.mark.extended
def test_config_that_takes_gigabytes_to_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_config, "IN_LISTS", 1 << 40)
    (folder / "config.json").write_text(json.dumps(NEO | {"attention_types": [[["global"], 1_000_000_000]]}))
    with pytest.raises(ModelError, match="takes more than 2048 MiB of memory"):
        check_model(config(folder))


@pytest.mark.parametrize("call", [check_model, lambda c: load_model(c, **HERE)])
class TestRejected:
    def test_no_folder(self, tmp_path: Path, call: Any) -> None:
        with pytest.raises(ModelError, match="There is no model folder /"):
            call(config(tmp_path / "nothing here"))

    def test_a_file(self, folder: Path, call: Any) -> None:
        with pytest.raises(ModelError, match="is a file, not a model folder"):
            call(config(folder / "config.json"))

    def test_no_config(self, folder: Path, call: Any) -> None:
        (folder / "config.json").unlink()
        with pytest.raises(ModelError, match=r"no config\.json"):
            call(config(folder))

    def test_corrupted_config(self, folder: Path, call: Any) -> None:
        (folder / "config.json").write_text('{"model_type": "llama"')
        with pytest.raises(ModelError, match=r"config\.json is not valid JSON"):
            call(config(folder))

    def test_unknown_architecture(self, folder: Path, call: Any) -> None:
        (folder / "config.json").write_text('{"model_type": "abacus"}')
        with pytest.raises(ModelError, match="abacus"):
            call(config(folder))

    def test_not_a_language_model(self, folder: Path, call: Any) -> None:
        (folder / "config.json").write_text('{"model_type": "vit"}')
        with pytest.raises(UnsupportedModelError, match="'vit' is not a causal language model"):
            call(config(folder))

    def test_remote_code(self, folder: Path, call: Any) -> None:
        text = {"model_type": "own", "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.OwnModel"}}
        (folder / "config.json").write_text(json.dumps(text))
        (folder / "own.py").write_text("raise SystemExit('this code was run')")
        with pytest.raises(ModelError, match="needs remote code"):
            call(config(folder))

    def test_no_weights(self, folder: Path, call: Any) -> None:
        (folder / "model.safetensors").unlink()
        with pytest.raises(ModelError, match="has no weights"):
            call(config(folder))

    def test_corrupted_weights(self, folder: Path, call: Any) -> None:
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-1000])
        with pytest.raises(ModelError, match="corrupted"):
            call(config(folder))

    def test_pickled_weights(self, folder: Path, call: Any) -> None:
        torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
        with pytest.raises(ModelError, match="pickled") as caught:
            call(config(folder))
        assert "model.allow_pickle=true" in str(caught.value)
        call(config(folder, allow_pickle=True))

    def test_hub_name_without_a_hub(self, call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        start = time.monotonic()
        with reserved_port() as port, pytest.raises(ModelError) as caught:
            monkeypatch.setattr(
                huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{port}"
            )  # nothing listens there
            call(config("pantheraml-tests/no-such-model"))
        assert time.monotonic() - start < 50, "without repeated retries"
        assert "pantheraml-tests/no-such-model" in caught.value.what
        assert "\n" not in caught.value.what


def test_weights_that_do_not_match_are_rejected(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    short = {key: tensor for key, tensor in tensors.items() if "layers.1.mlp" not in key}
    save_file(short, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.down_proj\.weight"):
        load_model(config(folder), **HERE)
    tensors["model.norm.weight"] = torch.ones(7)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError):
        load_model(config(folder), **HERE)


def test_tokenizer_of_the_model_or_of_another_folder(folder: Path, tiny_model: Callable[..., Path]) -> None:
    assert load_tokenizer(config(folder))("ab")["input_ids"] != []
    for file in folder.glob("token*"):
        file.unlink()
    with pytest.raises(ModelError, match="There is no tokenizer in"):
        load_tokenizer(config(folder))
    other = load_tokenizer(config(folder, tokenizer=str(tiny_model("gpt2"))))
    assert other.is_fast


def test_corrupted_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="tokenizer cannot be loaded"):
        load_tokenizer(config(folder))


@pytest.mark.parametrize("name", ["gpt2", "meta-llama/Llama-3.2-1B"])
def test_hub_names(name: str) -> None:
    assert is_hub_name(name)


@pytest.mark.parametrize("name", ["/data/x", "./x", "../x", "~/x", "a/b/c", "a b", "", "owner/", "x\n"])
def test_not_hub_names(name: str) -> None:
    assert not is_hub_name(name)


def test_parts_without_sdpa_are_eager() -> None:
    """Gemma 4's audio encoder, beside a decoder and a vision tower that have it."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**sizes, "vocab_size": 16, "intermediate_size": 16, "num_key_value_heads": 2, "head_dim": 8}
    audio = {**sizes, "output_proj_dims": 16, "subsampling_conv_channels": [128, 8]}
    source = Gemma4Config(text_config=text, vision_config=None, audio_config=audio)
    attention = attention_for(source, VISION)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(source, attn_implementation=attention)
    assert model.config.audio_config._attn_implementation == "eager"
    assert model.config.text_config._attn_implementation == "sdpa"


def test_models_that_do_not_predict_the_next_token_are_refused(tmp_path: Path) -> None:
    DiffusionGemmaConfig().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"(?s)'diffusion_gemma' does not predict.*config\.json"):
        read_config(config(tmp_path), VISION)
