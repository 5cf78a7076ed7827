"""Every tested family: our loader gives transformers' weights, buffers and logits, quantized or not."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from pantheraml.models.adapters import apply_method, trainable_parameters
from pantheraml.models.loader import load_model
from pantheraml.models.quantize.quantized_linear import QuantizedLinear, dequantize_linears
from pantheraml.specs.train import MethodConfig, ModelConfig

FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "phi3", "gpt2", "granite"]
CPU = torch.device("cpu")
IDS = torch.randint(0, 256, (2, 17), generator=torch.Generator().manual_seed(0))

# Relative to the norm of the logits. The largest measured over these families was 0.019, 0.091 and 0.26; plus half.
# Random weights are more sensitive than trained ones; what quantization must not change at all has its own test.
TOLERANCE = {"int8": 0.029, "fp8": 0.14, "nf4": 0.39}


def plain(folder: Path, like: Any, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' own model, with the attention of `like`: which families support SDPA depends on the version."""
    attention = like.config._attn_implementation
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=attention)


def ours(folder: Path, dtype: torch.dtype = torch.float32, quantize: Any = None, **config: Any) -> Any:
    return load_model(ModelConfig(path=str(folder), **config), dtype=dtype, device=CPU, quantize=quantize)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS, use_cache=False).logits  # type: ignore[no-any-return]


def with_lora(model: Any) -> nn.Module:
    """Add a non-zero adapter, the same over every base."""
    adapted = apply_method(model, MethodConfig(rank=4), seed=0)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for _, parameter in trainable_parameters(adapted):
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return adapted


def calm_model(tiny_model: Callable[..., Path], family: str) -> Path:
    """A model whose logits are not sensitive to the last bit of its weights."""
    sizes = {"n_embd": 64} if family == "gpt2" else {"hidden_size": 64, "intermediate_size": 96}
    return tiny_model(family, initializer_range=0.05, **sizes)


def difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


def folder_of(made: Path, way: str, place: Path) -> tuple[Path, dict[str, Any]]:
    if way == "streamed":
        return made, {}
    folder = Path(shutil.copytree(made, place / "pickled"))
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    return folder, {"allow_pickle": True}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("way", ["streamed", "whole"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loading_matches_transformers(
    tiny_model: Callable[..., Path],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    family: str,
    way: Literal["streamed", "whole"],
    dtype: torch.dtype,
) -> None:
    caplog.set_level(logging.INFO, "pantheraml")
    folder, config = folder_of(tiny_model(family), way, tmp_path)
    actual = ours(folder, dtype, **config)
    expected = plain(tiny_model(family), actual, dtype)
    assert ("host memory" in caplog.text) == (way == "whole")
    assert torch.equal(logits(actual), logits(expected))
    for kind in ("named_parameters", "named_buffers"):
        mine, theirs = dict(getattr(actual, kind)()), dict(getattr(expected, kind)())
        assert list(mine) == list(theirs)
        for name, tensor in theirs.items():
            assert torch.equal(mine[name], tensor), name
            assert (mine[name].dtype, mine[name].requires_grad) == (tensor.dtype, tensor.requires_grad), name
    assert list(actual.state_dict()) == list(expected.state_dict())
    assert actual.training == expected.training
    assert actual.generation_config.to_dict() == expected.generation_config.to_dict()
    changed = {"use_cache", "_name_or_path"}
    mine, theirs = actual.config.to_dict(), expected.config.to_dict()
    assert {k: v for k, v in mine.items() if k not in changed} == {k: v for k, v in theirs.items() if k not in changed}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("quant_format", list(TOLERANCE))
def test_lora_over_quantized_weights_is_near_the_dense_logits(
    tiny_model: Callable[..., Path], family: str, quant_format: Any
) -> None:
    folder = calm_model(tiny_model, family)
    quantized = with_lora(ours(folder, quantize=quant_format))
    expected = logits(with_lora(plain(folder, quantized)))
    if family == "gpt2" and quant_format == "fp8":  # its Conv1D layers are not quantized to fp8
        assert not any(isinstance(layer, QuantizedLinear) for layer in quantized.modules())
        torch.testing.assert_close(logits(quantized), expected, atol=1e-4, rtol=1e-4)
        return
    assert 0 < difference(logits(quantized), expected) < TOLERANCE[quant_format]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("quant_format", ["int8", "nf4"])
def test_lora_over_quantized_weights_matches_lora_over_dequantized_weights(
    tiny_model: Callable[..., Path], family: str, quant_format: Any
) -> None:
    folder = calm_model(tiny_model, family)
    dequantized = ours(folder, quantize=quant_format)
    assert dequantize_linears(dequantized, torch.float32) > 0
    quantized, dense = with_lora(ours(folder, quantize=quant_format)), with_lora(dequantized)
    torch.testing.assert_close(logits(quantized), logits(dense), atol=1e-4, rtol=1e-4)
