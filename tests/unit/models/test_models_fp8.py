"""FP8 layers: their matmuls, in a whole model, and as its output head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import PeftModel
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from pantheraml.engine.step.loss import LossModel
from pantheraml.models.adapters import TrainedWeights, apply_method, parameter_count, save_trained, trainable_parameters
from pantheraml.models.families import head_loss, plain_head
from pantheraml.models.loader import load_model, load_tokenizer
from pantheraml.models.quantize.fp8 import FP8Linear, FP8LoraLinear, quantize_head
from pantheraml.models.quantize.quantized_linear import quantized_buffers
from pantheraml.specs.train import MethodConfig, ModelConfig
from tests import toy

CPU = torch.device("cpu")
IDS = torch.arange(4, 44)[None]


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    return float(((ours - theirs).norm() / theirs.norm()).detach())


def dequantized(layer: FP8Linear) -> Tensor:
    return layer.qweight.float() * layer.scale[:, None]


# The layer --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scales", ["one", "rows"])
@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_matches_its_dequantized_weight(scales: Any, bias: bool) -> None:
    torch.manual_seed(0)
    dense = nn.Linear(64, 32, bias=bias)
    layer = FP8Linear(dense.weight, dense.bias, scales=scales)
    assert relative_error(dequantized(layer), dense.weight) < 0.03
    x, y = (torch.randn(5, 7, 64).requires_grad_() for _ in "xy")
    y.data.copy_(x.data)
    g = torch.randn(5, 7, 32)
    ours, theirs = layer(x), F.linear(y, dequantized(layer), layer.bias)
    assert relative_error(ours, theirs) < 0.03
    ours.backward(g)
    theirs.backward(g)
    assert x.grad is not None
    assert y.grad is not None
    assert relative_error(x.grad, y.grad) < 0.03
    assert relative_error(1.1 * x.grad, y.grad) > 0.03


def test_values_representable_in_fp8_are_exact() -> None:
    torch.manual_seed(0)
    weight = torch.exp2(torch.randint(-2, 3, (32, 64)))
    for scales in ("one", "rows"):
        layer = FP8Linear(weight, None, scales=scales)  # type: ignore[arg-type]
        x = torch.eye(64).requires_grad_()
        out = layer(x)
        torch.testing.assert_close(out, weight.T, rtol=1e-6, atol=0)
        (gradient,) = torch.autograd.grad(out[:32], x, torch.eye(32))
        # row scales are folded into the gradient before it is quantized
        torch.testing.assert_close(gradient[:32], weight, rtol=1e-6 if scales == "one" else 2**-4, atol=0)


def test_rows_share_a_scale_unless_they_differ_too_much() -> None:
    weight = torch.randn(64, 48)
    layer = FP8Linear(weight, None)
    assert layer.shared_scale
    assert torch.equal(torch.exp2(layer.scale.log2().round()), layer.scale), "a power of two"
    weight[::3] *= 1e-4
    layer = FP8Linear(weight, None)
    assert not layer.shared_scale
    assert max(map(relative_error, dequantized(layer), weight)) < 0.04
    assert FP8Linear(weight, None, scales="one").shared_scale


def test_a_row_of_zeros() -> None:
    weight = torch.randn(32, 48)
    weight[3] = 0
    for scales in ("one", "rows", None):
        layer = FP8Linear(weight, None, scales=scales)  # type: ignore[arg-type]
        out = layer(torch.randn(4, 48))
        assert out.isfinite().all()
        assert (out[:, 3] == 0).all()


def test_output_dtype_follows_the_input_or_autocast() -> None:
    layer = FP8Linear(torch.randn(32, 48), torch.randn(32))
    assert layer(torch.randn(2, 48, dtype=torch.bfloat16)).dtype == torch.bfloat16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(torch.randn(2, 48)).dtype == torch.bfloat16


# A whole model ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 64, "intermediate_size": 128}
    return toy.write_llama(tmp_path_factory.mktemp("fp8") / "model", **sizes)


def load(folder: Path, quantize: Any = None) -> Any:
    return load_model(ModelConfig(path=str(folder)), dtype=torch.float32, device=CPU, quantize=quantize)


def adapted(folder: Path, quantize: Any, **method: Any) -> Any:
    model = apply_method(load(folder, quantize), MethodConfig(rank=4, **method), seed=1)
    with torch.no_grad():
        for number, (_, parameter) in enumerate(trainable_parameters(model)):
            generator = torch.Generator().manual_seed(number)
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model


def gradient(model: nn.Module) -> Tensor:
    model(input_ids=IDS, labels=IDS).loss.backward()
    return torch.cat([p.grad.flatten() for _, p in trainable_parameters(model) if p.grad is not None])


def test_gradients_are_near_the_dense_ones(folder: Path) -> None:
    ours, dense = gradient(adapted(folder, "fp8")), gradient(adapted(folder, None))
    assert torch.cosine_similarity(ours, dense, dim=0) > 0.995
    assert float((ours.norm() / dense.norm() - 1).abs()) < 0.03


def test_every_linear_layer_but_the_head_is_fp8(folder: Path) -> None:
    model = adapted(folder, "fp8")
    assert sum(isinstance(m, FP8LoraLinear) for m in model.modules()) == 14
    assert type(model.get_base_model().get_output_embeddings()) is nn.Linear
    assert len(quantized_buffers(model)) == 14 * 2
    assert parameter_count(model) == parameter_count(adapted(folder, None))
    assert not [name for name in model.state_dict() if "qweight" in name], "quantized weights are not saved"


def test_an_optimizer_step_changes_the_logits(folder: Path) -> None:
    model = adapted(folder, "fp8")
    before = model(input_ids=IDS).logits
    optimizer = torch.optim.AdamW([p for _, p in trainable_parameters(model)], lr=0.02, fused=True)
    gradient(model)
    optimizer.step()
    after = model(input_ids=IDS).logits
    with model.disable_adapter():
        without = model(input_ids=IDS).logits
    assert relative_error(after, before) > 0.05
    assert relative_error(after, without) > 0.05
    dense = adapted(folder, None)
    with torch.no_grad():
        for (_, theirs), (_, mine) in zip(trainable_parameters(dense), trainable_parameters(model), strict=True):
            theirs.copy_(mine)
    assert relative_error(after, dense(input_ids=IDS).logits) < 0.1


def test_adapters_load_in_plain_peft(folder: Path, tmp_path: Path) -> None:
    model = adapted(folder, "fp8")
    config = ModelConfig(path=str(folder))
    save_trained(
        TrainedWeights.of(model),
        tmp_path / "a",
        method=MethodConfig(rank=4),
        model_config=config,
        tokenizer=load_tokenizer(config),
    )
    plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), str(tmp_path / "a"))
    dense = adapted(folder, None)
    torch.testing.assert_close(plain(input_ids=IDS).logits, dense(input_ids=IDS).logits)


# The output head --------------------------------------------------------------------------------------------------


def with_fp8_head(folder: Path) -> Any:
    model = apply_method(load(folder), MethodConfig(rank=4), seed=1)
    assert quantize_head(model.get_base_model())
    return model


def test_an_fp8_head_is_a_plain_head(folder: Path) -> None:
    model = with_fp8_head(folder)
    layer = model.get_base_model().get_output_embeddings()
    assert isinstance(layer, FP8Linear)
    assert layer.shared_scale
    head, _ = plain_head(model)
    assert head is not None
    assert head.layer is layer
    dense = apply_method(load(folder), MethodConfig(rank=4), seed=1)
    assert relative_error(model(input_ids=IDS).logits, dense(input_ids=IDS).logits) < 0.05


@pytest.mark.parametrize("fp8", [False, True])
def test_head_loss_matches_the_loss_of_its_logits(folder: Path, fp8: bool) -> None:
    base = load(folder).requires_grad_(False)
    if fp8:
        assert quantize_head(base)
    layer = base.get_output_embeddings()
    torch.manual_seed(0)
    hidden, targets = torch.randn(2, 9, 64, requires_grad=True), torch.randint(0, 320, (2, 9))
    targets[0, :4] = -100
    twin = hidden.detach().clone().requires_grad_()
    expected = F.cross_entropy(layer(twin).flatten(0, 1), targets.flatten(), reduction="sum")
    actual = head_loss(layer, hidden, targets)
    assert float(actual.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)
    assert float(head_loss(layer, hidden, targets, 14).detach()) == float(actual.detach())
    actual.backward()
    expected.backward()
    assert hidden.grad is not None
    assert twin.grad is not None
    assert relative_error(hidden.grad, twin.grad) < (0.06 if fp8 else 1e-5)
    assert (hidden.grad[0, :4] == 0).all()


@pytest.mark.parametrize("fp8", [False, True])
def test_a_known_target_count_gives_the_same_loss(folder: Path, fp8: bool) -> None:
    model = LossModel(with_fp8_head(folder) if fp8 else apply_method(load(folder), MethodConfig(rank=4), seed=1))
    assert model.full_logits_reason is None
    targets = F.pad(IDS[:, 1:], (0, 1), value=-100)
    targets[:, 3:9] = -100
    positions = torch.arange(IDS.shape[1])[None]
    actual = []
    for count in (None, int((targets >= 0).sum())):
        model.zero_grad()
        loss = model(IDS, positions, targets, target_count=count)
        loss.backward()
        actual.append((loss.detach(), [p.grad for _, p in trainable_parameters(model)]))
    assert torch.equal(actual[0][0], actual[1][0])
    assert all(torch.equal(a, b) for a, b in zip(actual[0][1], actual[1][1], strict=True) if a is not None)
    logits = model.model(input_ids=IDS, position_ids=positions).logits
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    assert float(actual[0][0]) == pytest.approx(float(expected.detach()), rel=1e-5)


def test_heads_that_are_not_quantized(folder: Path) -> None:
    assert not quantize_head(load(folder).requires_grad_(True)), "it is trainable"
    base = load(folder).requires_grad_(False)
    base.lm_head = nn.Linear(64, 320).requires_grad_(False)
    assert not quantize_head(base), "it has a bias"
    base.lm_head = nn.Linear(64, 321, bias=False).requires_grad_(False)
    assert not quantize_head(base), "its height is not a multiple of 16"


def test_a_tied_embedding_is_unchanged(tmp_path: Path) -> None:
    tied = load(toy.write_llama(tmp_path / "tied", tie_word_embeddings=True)).requires_grad_(False)
    before = tied.get_input_embeddings().weight.clone()
    assert quantize_head(tied)
    assert torch.equal(tied.get_input_embeddings().weight, before)
    assert plain_head(tied)[0] is not None


def test_an_fp8_head_with_row_scales_needs_full_logits(folder: Path) -> None:
    base = load(folder)
    base.lm_head = FP8Linear(base.lm_head.weight, None, scales="rows")
    head, reason = plain_head(base)
    assert head is None
    assert "FP8Linear" in reason
