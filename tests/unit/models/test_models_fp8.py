"""FP8 layers in a whole model: PEFT's adapters work as always, and training follows bf16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import nn
from transformers import AutoModelForCausalLM

from pantheraml.base.errors import UnsupportedModelError
from pantheraml.models.adapters import apply_method, save_trained, trainable_parameters
from pantheraml.models.loader import load_model, load_tokenizer
from pantheraml.models.quantise.fp8 import FP8Linear, FP8LoraLinear, keep_fresh
from pantheraml.models.quantise.packed import packed_buffers
from pantheraml.specs.train import MethodConfig, ModelConfig
from tests import toy

CPU = torch.device("cpu")
IDS = torch.arange(4, 44)[None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 64, "intermediate_size": 128}
    return toy.write_llama(tmp_path_factory.mktemp("fp8") / "model", **sizes)


def adapted(folder: Path, quantise: Any, **method: Any) -> nn.Module:
    base = load_model(ModelConfig(path=str(folder)), dtype=torch.float32, device=CPU, quantise=quantise)
    model = apply_method(base, MethodConfig(rank=4, **method), seed=1)
    with torch.no_grad():
        for number, (_, parameter) in enumerate(trainable_parameters(model)):
            generator = torch.Generator().manual_seed(number)
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    keep_fresh(model)
    return model


def gradient(model: nn.Module) -> torch.Tensor:
    model(input_ids=IDS, labels=IDS).loss.backward()
    return torch.cat([p.grad.flatten() for _, p in trainable_parameters(model) if p.grad is not None])


def test_gradients_point_where_dense_weights_point(folder: Path) -> None:
    ours, dense = gradient(adapted(folder, "fp8")), gradient(adapted(folder, None))
    assert torch.cosine_similarity(ours, dense, dim=0) > 0.99
    assert float((ours.norm() / dense.norm() - 1).abs()) < 0.05


def test_every_linear_layer_but_the_head_is_fp8(folder: Path) -> None:
    model = adapted(folder, "fp8")
    assert sum(isinstance(m, FP8LoraLinear) for m in model.modules()) == 14
    assert type(model.get_base_model().get_output_embeddings()) is nn.Linear
    assert len(packed_buffers(model)) == 14 * 6
    assert not [name for name in model.state_dict() if "qweight" in name], "packed weights are not saved"


def test_the_weights_follow_the_adapter(folder: Path) -> None:
    model = adapted(folder, "fp8")
    before = model(input_ids=IDS).logits
    optimizer = torch.optim.AdamW([p for _, p in trainable_parameters(model)], lr=0.02, fused=True)
    gradient(model)
    optimizer.step()
    after = model(input_ids=IDS).logits
    with model.disable_adapter():
        without = model(input_ids=IDS).logits
    assert float((after - before).detach().norm() / before.detach().norm()) > 0.05
    assert float((after - without).detach().norm() / without.detach().norm()) > 0.05
    dense = adapted(folder, None)
    with torch.no_grad():
        for (_, theirs), (_, mine) in zip(trainable_parameters(dense), trainable_parameters(model), strict=True):
            theirs.copy_(mine)
    exact = dense(input_ids=IDS).logits
    assert float((after - exact).detach().norm() / exact.detach().norm()) < 0.1


def test_adapters_load_in_plain_peft(folder: Path, tmp_path: Path) -> None:
    model = adapted(folder, "fp8")
    config = ModelConfig(path=str(folder))
    save_trained(
        model, tmp_path / "a", method=MethodConfig(rank=4), model_config=config, tokenizer=load_tokenizer(config)
    )
    plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), str(tmp_path / "a"))
    dense = adapted(folder, None)
    torch.testing.assert_close(plain(input_ids=IDS).logits, dense(input_ids=IDS).logits)


@pytest.mark.parametrize(("method", "reason"), [({"dropout": 0.1}, "dropout"), ({"rank": 200}, "rank")])
def test_what_cannot_be_fused_takes_the_plain_path(folder: Path, method: dict[str, Any], reason: str) -> None:
    base = load_model(ModelConfig(path=str(folder)), dtype=torch.float32, device=CPU, quantise="fp8")
    model = apply_method(base, MethodConfig(**{"rank": 4, **method}), seed=1).train()
    layer = next(m for m in model.modules() if isinstance(m, FP8LoraLinear))
    assert reason in (layer.why_not_fused() or "")
    assert model(input_ids=IDS).logits.isfinite().all()


def test_a_merge_is_refused(folder: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="fp8"):
        adapted(folder, "fp8").merge_and_unload()


def test_a_bias_is_kept() -> None:
    dense = nn.Linear(64, 32)
    packed = FP8Linear(dense.weight, dense.bias)
    x = torch.randn(5, 64)
    assert float((packed(x) - dense(x)).detach().norm() / dense(x).detach().norm()) < 0.06
