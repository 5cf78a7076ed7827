"""Whole fused models: every kernel in its place, against the same model on the torch references."""

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
from pantheraml.models.quantise.packed import pack_linears
from pantheraml.models.quantise.trained_fp8 import use_fp8_products
from pantheraml.specs.plan import Layouts
from pantheraml.specs.train import MethodConfig

IDS = torch.randint(0, 64, (2, 4), generator=torch.Generator().manual_seed(0))
TOLERANCE = {False: 1e-5, True: 5e-3}
"""Of the whole tensor, plain and fp8. A last place decides between two codes of e4m3 now and then, so fp8 differs."""

CHANGED = "base_model.model.model.layers.0.self_attn.v_proj.lora_A.default.weight"

Results = dict[str, Tensor]


def one_layer(family: str) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family, vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, initializer_range=0.1, pad_token_id=0, attn_implementation="sdpa",
    )  # fmt: skip
    base: Any = AutoModelForCausalLM.from_config(config)
    for name, parameter in base.named_parameters():
        if "layernorm" in name:
            parameter.data.add_(0.3 * torch.randn(parameter.shape))
    return base


def model(family: str, *, fp8: bool, error: float = 0.0, layouts: Layouts = 1) -> nn.Module:
    """A layer with an adapter at every product; `error` is added to one value of one of them."""
    base = one_layer(family)
    if fp8:
        assert pack_linears(base, "fp8", dtype=torch.float32, device=torch.device("cpu")) == 7
    adapted = apply_method(base, MethodConfig(rank=4, alpha=6), seed=0)
    for _, parameter in trainable_parameters(adapted):
        parameter.data.add_(0.05 * torch.randn(parameter.shape))
    adapted.get_parameter(CHANGED).data[3, 1] += error
    assert fuse(adapted, layouts=layouts).fused == 1
    return adapted.train()


def trained_model(family: str, *, fp8: bool, error: float = 0.0) -> nn.Module:
    """A layer that is trained as a whole; `error` is added to one of its weights."""
    whole = one_layer(family)
    whole.model.layers[0].self_attn.v_proj.weight.data[3, 1] += error
    if fp8:
        assert use_fp8_products(whole) == 7
    assert fuse(whole).fused == 1
    trained: nn.Module = whole.train()
    return trained


def results(fused: nn.Module) -> Results:
    out = fused(input_ids=IDS, labels=IDS, use_cache=False)
    out.loss.backward()
    return {"logits": out.logits.detach()} | {
        name: parameter.grad for name, parameter in trainable_parameters(fused) if parameter.grad is not None
    }


def assert_same(ours: Results, theirs: Results, tolerance: float) -> None:
    assert ours.keys() == theirs.keys()
    apart = {name: float((ours[name] - wanted).norm() / wanted.norm()) for name, wanted in theirs.items()}
    worst = max(apart, key=apart.__getitem__)
    assert apart[worst] <= tolerance, f"{worst} is {apart[worst]} apart"


@pytest.mark.parametrize("family", ["llama", "gemma"])
@pytest.mark.parametrize("fp8", [False, True], ids=["plain", "fp8"])
@pytest.mark.parametrize(("make", "count"), [(model, 1 + 2 * 7), (trained_model, 1 + 7 + 4)], ids=["adapters", "full"])
def test_kernels_give_what_the_references_give(
    make: Callable[..., nn.Module], count: int, family: str, fp8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = results(make(family, fp8=fp8))
    assert len(ours) == count + (make is trained_model and family == "llama")  # whose head is no embedding
    monkeypatch.setattr(dispatch, "_interpreted", lambda: False)
    assert_same(ours, results(make(family, fp8=fp8)), TOLERANCE[fp8])
    with pytest.raises(AssertionError):
        assert_same(ours, results(make(family, fp8=fp8, error=0.05)), TOLERANCE[fp8])


def test_two_layouts_give_what_one_gives() -> None:
    """Also after the adapters changed."""
    twice, once = (model("llama", fp8=True, layouts=layouts) for layouts in (2, 1))
    for size in (0.0, 0.02):
        for fused in (twice, once):
            fused.zero_grad()
            for number, (_, parameter) in enumerate(trainable_parameters(fused)):
                noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
                parameter.data.add_(size * noise)
        assert_same(results(twice), results(once), tolerance=0)
