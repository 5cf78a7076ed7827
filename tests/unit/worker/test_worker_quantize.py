"""The quantize task: a folder in bitsandbytes' format that loads, keeps what it was rounded for, and trains."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pantheraml.base.errors import ConfigError, RunDirectoryError, UnsupportedModelError
from pantheraml.models.loader import load_model
from pantheraml.models.quantize.nf4 import NF4Linear
from pantheraml.parallel.process_group import open_world
from pantheraml.specs.tasks import QuantizeRequest, QuantizeResult
from pantheraml.specs.train import ModelConfig, TrainConfig
from pantheraml.worker.quantize import _storage_dtype, quantize
from tests import toy
from tests.harness import make_plan, make_run, silent, train_here, values
from tests.unit.models.conftest import TinyModel, tiny_model  # noqa: F401

CPU = torch.device("cpu")
LINEARS = 14
"""Of two layers of a Llama."""


def config_of(folder: Path, model: Path, *, remote_code: bool = False, **method: Any) -> TrainConfig:
    return TrainConfig.model_validate(
        {
            "model": {"path": str(model), "trust_remote_code": remote_code},
            "data": {"path": str(folder / "data.jsonl"), "seq_len": 64, "cache_dir": str(folder / "cache")},
            "method": method,
            "train": {"global_batch_size": 4, "max_steps": 4, "learning_rate": 1e-2},
        }
    )


def quantized(
    folder: Path, model: Path, output: Path, tokens: int = 512, *, remote_code: bool = False
) -> QuantizeResult:
    config = config_of(folder, model, remote_code=remote_code)
    run = make_run(folder / f"run-{output.name}", config, make_plan(config))
    with open_world(run.plan(), timeout_seconds=60) as world:
        return quantize(run, QuantizeRequest(run_dir=run.path, output=output, tokens=tokens), world, silent)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("quantize")
    toy.write_llama(place / "model", hidden_size=64, intermediate_size=128, attention_bias=True)
    toy.write_llama(place / "tied", hidden_size=64, intermediate_size=128, tie_word_embeddings=True)
    toy.write_jsonl(place / "data.jsonl", toy.arithmetic(120))
    for name in ("model", "tied"):
        done = quantized(place, place / name, place / f"{name}-nf4")
        assert done.layers == LINEARS
        assert done.bytes == sum(tensor.nbytes for tensor in tensors(place / f"{name}-nf4").values())
        assert 256 < done.tokens <= 512
        assert 0.5 < done.share < 0.9
    return place


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def load(folder: Path, quantize: Any = None) -> Any:
    return load_model(ModelConfig(path=str(folder)), dtype=torch.float32, device=CPU, quantize=quantize)


@pytest.mark.parametrize("name", ["model", "tied"])
def test_the_folder_is_complete(folder: Path, name: str) -> None:
    place, plain = folder / f"{name}-nf4", load(folder / name)
    model = load(place)
    assert sum(isinstance(layer, NF4Linear) for layer in model.modules()) == LINEARS
    assert type(model.lm_head) is torch.nn.Linear
    kept = {name: p for name, p in plain.named_parameters() if "proj.weight" not in name}
    found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert all(torch.equal(found[name], p) for name, p in kept.items())
    assert ("lm_head.weight" in tensors(place)) == (name == "model")
    config = json.loads((place / "config.json").read_text())
    assert config["quantization_config"]["bnb_4bit_quant_type"] == "nf4"
    assert config["quantization_config"]["llm_int8_skip_modules"] == ["lm_head"]
    assert config["use_cache"] is True
    assert {"tokenizer.json", "generation_config.json"} <= {file.name for file in place.iterdir()}
    index = json.loads((place / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == tensors(place).keys()


def test_calibrated_logits_are_closer_than_round_to_nearest(folder: Path) -> None:
    ids = torch.tensor(load_ids(folder))
    with torch.no_grad():
        expected, ours, nearest = (
            load(*each)(ids).logits
            for each in ((folder / "model",), (folder / "model-nf4",), (folder / "model", "nf4"))
        )
    assert float((ours - expected).norm()) < 0.75 * float((nearest - expected).norm())


def load_ids(folder: Path) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    text = "".join(row["prompt"] + row["completion"] for row in toy.arithmetic(40, seed=9))
    return [tokenizer(text)["input_ids"][:200]]


def test_the_quantized_model_trains(folder: Path) -> None:
    config = config_of(folder, folder / "model-nf4", kind="qlora", rank=4)
    losses = values(train_here(make_run(folder / "trained", config, make_plan(config))), "train.step", "loss")
    assert losses[-1] < losses[0]


def test_fewer_tokens_than_requested(folder: Path, tmp_path: Path) -> None:
    done = quantized(folder, folder / "model", tmp_path / "all", tokens=10**6)
    assert 512 < done.tokens < 10_000


def test_what_cannot_be_quantized_is_refused(folder: Path, tmp_path: Path, tiny_model: TinyModel) -> None:  # noqa: F811
    with pytest.raises(ConfigError, match="already stored in nf4"):
        quantized(folder, folder / "model-nf4", tmp_path / "again")
    with pytest.raises(ConfigError, match="custom code"):
        quantized(folder, folder / "model", tmp_path / "code", remote_code=True)
    with pytest.raises(UnsupportedModelError, match="Conv1D"):
        quantized(folder, tiny_model("gpt2"), tmp_path / "gpt2")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    with pytest.raises(RunDirectoryError, match="not an empty folder"):
        quantized(folder, folder / "model", tmp_path / "full")
    assert [path.name for path in tmp_path.iterdir()] == ["full"]


def test_generation_settings_are_kept_as_they_are(folder: Path, tmp_path: Path) -> None:
    """Also those that transformers reads, but would not write."""
    shutil.copytree(folder / "model", tmp_path / "model")
    odd = '{"temperature": 0.6, "do_sample": false}'
    (tmp_path / "model" / "generation_config.json").write_text(odd)
    quantized(folder, tmp_path / "model", tmp_path / "nf4")
    assert (tmp_path / "nf4" / "generation_config.json").read_text() == odd


@pytest.mark.parametrize(
    ("stored", "computed", "kept"),
    [
        (torch.bfloat16, torch.float32, torch.bfloat16),
        (torch.float16, torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.bfloat16, torch.bfloat16),
        (None, torch.float32, torch.float32),
    ],
)
def test_dtype_of_unquantized_tensors(stored: Any, computed: torch.dtype, kept: torch.dtype) -> None:
    assert _storage_dtype(SimpleNamespace(dtype=stored), computed) is kept
