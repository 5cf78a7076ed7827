"""Whole fused models on the Triton kernels, compared with the same models on the torch references."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from pantheraml.kernels import dispatch
from pantheraml.models.adapters import apply_method, trainable_parameters
from pantheraml.models.fast import fuse
from pantheraml.models.quantize.fp8_training import use_fp8_matmuls
from pantheraml.models.quantize.quantized_linear import quantize_linears
from pantheraml.specs.train import MethodConfig

IDS = torch.randint(0, 64, (2, 4), generator=torch.Generator().manual_seed(0))
TOLERANCE = {False: 1e-5, True: 5e-3}
"""Relative error of a whole tensor, without and with fp8: an ulp can decide between two e4m3 codes, so fp8 differs."""

CHANGED = "base_model.model.model.layers.0.self_attn.v_proj.lora_A.default.weight"

MORE_PARAMETERS = {"llama": 1, "gemma": 0, "qwen3": 3, "gemma3_text": 4, "olmo2": 3, "exaone4": 3}
"""Besides the embedding, two norms per layer and the last norm: a head that is not tied, and more norms."""

Results = dict[str, Tensor]


def one_layer(family: str) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family, vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, initializer_range=0.1, pad_token_id=0, attn_implementation="sdpa",
    )  # fmt: skip
    base: Any = AutoModelForCausalLM.from_config(config)
    for name, parameter in base.named_parameters():
        if name.endswith("norm.weight"):
            parameter.data.add_(0.3 * torch.randn(parameter.shape))
    return base


def adapter_model(family: str, *, fp8: bool, error: float = 0.0) -> nn.Module:
    """One layer with an adapter on every linear; `error` is added to one value of one adapter."""
    base = one_layer(family)
    if fp8:
        assert quantize_linears(base, "fp8", dtype=torch.float32, device=torch.device("cpu")) == 7
    adapted = apply_method(base, MethodConfig(rank=4, alpha=6), seed=0)
    for _, parameter in trainable_parameters(adapted):
        parameter.data.add_(0.05 * torch.randn(parameter.shape))
    adapted.get_parameter(CHANGED).data[3, 1] += error
    assert fuse(adapted).fused == 1
    return adapted.train()


def full_model(family: str, *, fp8: bool, error: float = 0.0) -> nn.Module:
    """One fully trainable layer; `error` is added to one of its weights."""
    base_model = one_layer(family)
    base_model.model.layers[0].self_attn.v_proj.weight.data[3, 1] += error
    if fp8:
        assert use_fp8_matmuls(base_model) == 7
    assert fuse(base_model).fused == 1
    trained: nn.Module = base_model.train()
    return trained


def run(fused: nn.Module) -> Results:
    out = fused(input_ids=IDS, labels=IDS, use_cache=False)
    out.loss.backward()
    return {"logits": out.logits.detach()} | {
        name: parameter.grad for name, parameter in trainable_parameters(fused) if parameter.grad is not None
    }


def assert_same(ours: Results, theirs: Results, tolerance: float) -> None:
    assert ours.keys() == theirs.keys()
    distance = {name: float((ours[name] - expected).norm() / expected.norm()) for name, expected in theirs.items()}
    worst = max(distance, key=distance.__getitem__)
    assert distance[worst] <= tolerance, f"{worst} is {distance[worst]} apart"


@pytest.mark.parametrize("family", list(MORE_PARAMETERS))
@pytest.mark.parametrize("fp8", [False, True], ids=["plain", "fp8"])
@pytest.mark.parametrize(
    ("make", "count"), [(adapter_model, 1 + 2 * 7), (full_model, 1 + 7 + 4)], ids=["adapters", "full"]
)
def test_kernels_match_references(
    make: Callable[..., nn.Module], count: int, family: str, fp8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = run(make(family, fp8=fp8))
    assert len(ours) == count + (MORE_PARAMETERS[family] if make is full_model else 0)
    monkeypatch.setattr(dispatch, "_interpreted", lambda: False)
    assert_same(ours, run(make(family, fp8=fp8)), TOLERANCE[fp8])
    with pytest.raises(AssertionError):
        assert_same(ours, run(make(family, fp8=fp8, error=0.05)), TOLERANCE[fp8])
