"""Frozen nf4 weights, fused: results of the plain nf4 layers, with only the quantized weight in memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pantheraml.kernels.fp8.e4m3 import E4M3
from pantheraml.kernels.nf4.format import NF4Weight
from pantheraml.models.adapters import apply_method, trainable_parameters
from pantheraml.models.fast import fuse, is_fused, quantize_head_like_layers
from pantheraml.models.fast.group_storage import DequantizedMatrix, GroupShape
from pantheraml.models.fast.linear_groups import LoraGroup, why_not_fused
from pantheraml.models.loader import load_model
from pantheraml.models.quantize.fp8 import FP8Head, FP8Linear
from pantheraml.models.quantize.nf4 import NF4Linear
from pantheraml.specs.train import MethodConfig, ModelConfig

CPU = torch.device("cpu")
IDS = torch.randint(0, 250, (2, 24), generator=torch.Generator().manual_seed(3))
SIZES = {"hidden_size": 128, "intermediate_size": 192, "initializer_range": 0.05}


def adapted(folder: Path, quantize: Any = "nf4", **method: Any) -> nn.Module:
    base = load_model(ModelConfig(path=str(folder)), dtype=torch.float32, device=CPU, quantize=quantize)
    model = apply_method(base, MethodConfig(rank=4, **method), seed=1)
    with torch.no_grad():
        for number, (_, parameter) in enumerate(trainable_parameters(model)):
            parameter.add_(0.01 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)))
    return model


def logits_and_gradients(model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    out = model(input_ids=IDS, labels=IDS)
    out.loss.backward()
    return out.logits.detach(), {name: p.grad for name, p in trainable_parameters(model) if p.grad is not None}


def difference(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


@pytest.fixture
def folder(tiny_model: Any) -> Path:
    return tiny_model("llama", **SIZES)


@pytest.mark.parametrize("family", ["llama", "qwen2", "phi3"])
def test_logits_and_gradients_are_those_of_the_plain_layers(tiny_model: Any, family: str) -> None:
    folder = tiny_model(family, **SIZES)
    plain, fused = adapted(folder), adapted(folder)
    report = fuse(fused)
    assert (report.fused, dict(report.reasons)) == (2, {})
    with torch.no_grad(), plain.disable_adapter():
        without_adapters = plain(input_ids=IDS).logits
    logits, gradients = logits_and_gradients(plain)
    fast_logits, fast_gradients = logits_and_gradients(fused)
    assert difference(without_adapters, logits) > 0.3, "the adapters matter"
    assert difference(fast_logits, logits) < 0.1
    assert fast_gradients.keys() == gradients.keys()
    ours, theirs = (torch.cat([g.flatten() for g in actual.values()]) for actual in (fast_gradients, gradients))
    assert float(torch.cosine_similarity(ours, theirs, dim=0)) > 0.99


def test_fused_nf4_equals_fp8_of_dequantized_weights(folder: Path) -> None:
    four_bits, eight_bits = adapted(folder), adapted(folder)
    for name, layer in list(eight_bits.named_modules()):
        if isinstance(layer, NF4Linear):
            eight_bits.set_submodule(name, FP8Linear(layer.dequantize(), layer.bias))
    assert fuse(four_bits).fused == fuse(eight_bits).fused == 2
    logits, gradients = logits_and_gradients(four_bits)
    expected_logits, expected = logits_and_gradients(eight_bits)
    torch.testing.assert_close(logits, expected_logits, rtol=0, atol=0)
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=0, atol=0)


def with_nan_fill(build: Callable[[], Tensor]) -> Tensor:
    """Return `build()`, with uninitialized memory filled with NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(4).isnan().all()
        return build()
    finally:
        torch.use_deterministic_algorithms(False)


def test_both_matrices_hold_weights_and_adapters() -> None:
    generator = torch.Generator().manual_seed(0)
    bases = [NF4Linear(torch.randn(rows, 128, generator=generator), None) for rows in (48, 16)]
    storage = DequantizedMatrix(bases, GroupShape(height=64, width=128, ranks=6, pad_cols=16))
    storage.up.copy_(torch.randn(64, 6, generator=generator).to(E4M3))
    storage.down.copy_(torch.randn(6, 128, generator=generator).to(E4M3))
    forward, backward = (with_nan_fill(build).float() for build in (storage.forward_matrix, storage.backward_matrix))
    assert forward.shape == (64, 144)
    assert backward.shape == (128, 80)
    dense = torch.cat([base.dequantize() for base in bases])
    assert difference(forward[:, :128] * storage.scales[:, None], dense) < 0.03
    assert torch.equal(backward[:, :64], forward[:, :128].T)
    assert torch.equal(forward[:, 128:134], storage.up.float())
    assert torch.equal(backward[:, 64:70], storage.down.float().T)
    assert not forward[:, 134:].any()
    assert not backward[:, 70:].any()


def saved_bytes(model: nn.Module) -> int:
    """Run forward and backward, and return the bytes of tensors saved besides the model itself."""
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    collected: dict[int, int] = {}

    def record(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            collected[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        loss = model(input_ids=IDS[:1, :2], labels=IDS[:1, :2]).loss  # two tokens: any weight would be far larger
    loss.backward()
    return sum(collected.values())


def test_no_dense_weights_are_kept(tiny_model: Any) -> None:
    model = adapted(tiny_model("llama", hidden_size=256, intermediate_size=512))
    fuse(model)
    layers = [m for m in model.modules() if is_fused(m)]
    bases = [base for m in layers for base in m.modules() if type(base) is NF4Linear]
    weights = sum(base.in_features * base.out_features for base in bases)
    assert saved_bytes(model) < weights // 8
    groups: list[LoraGroup] = [group for layer in layers for group in layer.fused_parts.groups]
    values = [value for group in groups for part in (group, group._storage) for value in vars(part).values()]
    own = sum(value.untyped_storage().nbytes() for value in values if isinstance(value, Tensor))
    assert own < weights // 4


def test_a_single_layer_call_is_unchanged(folder: Path) -> None:
    plain, fused = adapted(folder), adapted(folder)
    fuse(fused)
    with plain.disable_adapter(), fused.disable_adapter():  # unfused, because gradients are enabled
        torch.testing.assert_close(fused(input_ids=IDS).logits, plain(input_ids=IDS).logits, rtol=0, atol=0)


def test_the_fused_model_follows_its_adapters(folder: Path) -> None:
    fused_before, fused_after = adapted(folder), adapted(folder)
    fuse(fused_before)
    before = fused_before(input_ids=IDS).logits.detach()
    for model in (fused_before, fused_after):
        with torch.no_grad():
            for _, parameter in trainable_parameters(model):
                parameter.mul_(2.0)
    fuse(fused_after)
    after = fused_before(input_ids=IDS).logits.detach()
    assert difference(after, before) > 0.2
    torch.testing.assert_close(after, fused_after(input_ids=IDS).logits.detach(), rtol=0, atol=0)


def test_checkpointed_gradients_are_the_same(folder: Path) -> None:
    plain, checkpointed = adapted(folder), adapted(folder)
    for model in (plain, checkpointed):
        fuse(model)
    checkpointed.gradient_checkpointing_enable({"use_reentrant": False})
    checkpointed.train()
    _, gradients = logits_and_gradients(plain)
    _, recomputed = logits_and_gradients(checkpointed)
    for name, gradient in gradients.items():
        torch.testing.assert_close(recomputed[name], gradient, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (NF4Linear(torch.ones(64, 64), None, from_conv1d=True), "Conv1D"),
        (NF4Linear(torch.ones(64, 96), None), "multiple of 64"),
        (NF4Linear(torch.ones(40, 64), None), "multiple of 16"),
    ],
)
def test_why_not_fused(layer: NF4Linear, reason: str) -> None:
    assert reason in (why_not_fused(layer) or "")


def test_a_model_in_another_dtype_stays_as_it_is(folder: Path) -> None:
    model = load_model(ModelConfig(path=str(folder)), dtype=torch.bfloat16, device=CPU, quantize="nf4")
    report = fuse(apply_method(model, MethodConfig(rank=4), seed=1))
    assert report.fused == 0
    assert "bfloat16" in next(iter(report.reasons))


def test_int8_is_not_fused(folder: Path) -> None:
    report = fuse(adapted(folder, "int8"))
    assert report.fused == 0
    assert dict(report.reasons) == {"it is a Int8Linear": 2}


def test_foreign_nf4_tables_are_used() -> None:
    dense = torch.randn(32, 128, generator=torch.Generator().manual_seed(5))
    quantized = NF4Weight.quantize(dense)
    table = torch.linspace(0, 1, 256).sqrt()
    foreign = quantized._replace(scales=quantized.scales._replace(table=table, step=quantized.scales.step * 255))
    base = NF4Linear(foreign, None)
    storage = DequantizedMatrix([base], GroupShape(32, 128, 0, 0))
    rebuilt = storage.forward_matrix().float() * storage.scales[:, None]
    assert difference(rebuilt, base.dequantize()) < 0.03
    assert difference(rebuilt, dense) > 0.1, "the table differs"


@pytest.mark.parametrize(
    ("tied", "fused", "kind"), [(False, True, FP8Head), (True, True, nn.Linear), (False, False, nn.Linear)]
)
def test_head_quantization_follows_unless_tied(tiny_model: Any, tied: bool, fused: bool, kind: type) -> None:
    model = adapted(tiny_model("llama", **SIZES, vocab_size=272, tie_word_embeddings=tied))
    base: Any = model.get_base_model()
    assert quantize_head_like_layers(base, fused=fused) == (kind is FP8Head)
    assert type(base.get_output_embeddings()) is kind
