"""Norm gradients from the fp8 rows that a fused layer saves anyway: accuracy, and what is saved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pantheraml.kernels.head_norm_rope import HeadNorms
from pantheraml.kernels.rms_norm import Normed, QuantizedRows, rms_norm, rms_norm_backward, rms_norm_backward_rows
from pantheraml.models.fast import autograd_functions as functions
from pantheraml.models.fast import fuse, residual_branch, stream_reader
from pantheraml.models.fast.kept_inputs import KeptInputs
from pantheraml.models.quantize.fp8 import FP8Linear
from tests.unit.models.test_models_fast import (
    LAYERS,
    adapted,
    assert_same,
    base_model,
    fused,
    grad_cosine,
    quantize_to_fp8,
    relative_error,
    results,
)

IDS = torch.randint(4, 256, (8, 64), generator=torch.Generator().manual_seed(0))
WIDTH = 128

Change = Callable[[Tensor, Tensor], QuantizedRows]


def fused_model(family: str, *, fp8: bool = True) -> nn.Module:
    base = base_model(family, initializer_range=0.05, hidden_size=WIDTH)
    model = adapted(quantize_to_fp8(base) if fp8 else base, size=0.05)
    assert fuse(model).fused == LAYERS
    return model


def from_plain_rows(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    with monkeypatch.context() as patch:
        patch.setattr(stream_reader.Read, "plain_norm_input", lambda read, *_: read.total)
        return results(model, input_ids=IDS, labels=IDS)


@pytest.mark.parametrize("family", ["llama", "gemma", "qwen3"])
def test_adapter_gradients_from_fp8_rows_are_close(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Direction and length. The largest distances measured are a cosine of 0.998 and a length of 0.992; noise of 1/1000
    in the gradients before the norms gives as much, because later matmuls quantize theirs again.
    """
    model = fused_model(family)
    exact = from_plain_rows(model, monkeypatch)
    ours = results(model, input_ids=IDS, labels=IDS)
    assert torch.equal(ours["logits"], exact["logits"])
    for name, expected in exact.items():
        cosine = torch.cosine_similarity(ours[name].flatten(), expected.flatten(), dim=0)
        assert cosine > 0.997, f"{name}: {cosine}"
        assert 0.985 < ours[name].norm() / expected.norm() < 1.015, name


def distances(model: nn.Module, change: Change, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the distance of each norm's gradient, from (changed) fp8 rows, to that from plain rows, for one incoming
    gradient. The residual gradient, which is the same, is left out.
    """
    collected: list[float] = []

    def compare(g: Tensor, x: Any, weight: Tensor, inverse: Tensor, plus_one: bool) -> Tensor:
        plain, quantized = (rms_norm_backward(g, rows, weight, inverse, plus_one=plus_one) for rows in x)
        collected.append(relative_error(quantized, plain))
        return x[0]

    def backward(g: Tensor, x: Any, weight: Tensor, inverse: Tensor, *, plus_one: bool, **options: Any) -> Tensor:
        if not isinstance(x, Tensor):  # the final norm has plain rows
            x = compare(g, x, weight, inverse, plus_one)
        return rms_norm_backward(g, x, weight, inverse, plus_one=plus_one, **options)

    def backward_rows(g: Tensor, x: Any, weight: Tensor, inverse: Tensor, *, plus_one: bool, **options: Any) -> Any:
        x = compare(g, x, weight, inverse, plus_one)
        return rms_norm_backward_rows(g, x, weight, inverse, plus_one=plus_one, **options)

    with monkeypatch.context() as patch:
        patch.setattr(stream_reader.Read, "plain_norm_input", lambda read, *_: read.total)
        patch.setattr(functions, "norm_rows", lambda _, plain, operand: (plain, change(*operand)))
        patch.setattr(functions, "rms_norm_backward", backward)
        patch.setattr(stream_reader, "rms_norm_backward", backward)
        patch.setattr(residual_branch, "rms_norm_backward_rows", backward_rows)
        results(model, input_ids=IDS, labels=IDS)
    return collected


CORRUPTIONS: dict[str, Change] = {
    "scales of other rows": lambda qdata, scales: QuantizedRows(qdata, scales.roll(1)),
    "scales too large by half": lambda qdata, scales: QuantizedRows(qdata, 1.5 * scales),
    "rows of other tokens": lambda qdata, scales: QuantizedRows(qdata.roll(1, dims=0), scales),
}


@pytest.mark.parametrize("family", ["llama", "gemma", "qwen3"])
def test_norm_gradient_from_fp8_rows_is_close(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest distance measured is 0.5%. The first norm has no input gradient: none is needed."""
    model = fused_model(family)
    actual = distances(model, QuantizedRows, monkeypatch)
    assert len(actual) == 2 * LAYERS - 1
    assert max(actual) < 0.01
    for change in CORRUPTIONS.values():
        assert min(distances(model, change, monkeypatch)) > 0.02


@pytest.mark.parametrize(
    "names",
    [("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("down_proj",), ("o_proj",)],
    ids=lambda names: names[0],
)
def test_layers_with_some_fp8_matmuls(names: tuple[str, ...]) -> None:
    """Bounds are those of layers whose matmuls are all fp8."""
    base = base_model("llama", initializer_range=0.05)
    for name, module in list(base.named_modules()):
        parent, _, own = name.rpartition(".")
        if own in names:
            setattr(base.get_submodule(parent), own, FP8Linear(module.weight.detach(), None))
    plain = adapted(base, size=0.05)
    ours, theirs = results(fused(plain)), results(plain)
    assert relative_error(ours["logits"], theirs["logits"]) < 0.05
    assert grad_cosine(ours, theirs) > 0.9965


@pytest.mark.parametrize("fp8", [False, True], ids=["plain", "fp8"])
def test_norm_inputs_are_saved_only_without_fp8_matmuls(fp8: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = fused_model("llama", fp8=fp8)
    norm_inputs: list[Tensor] = []
    saved: list[Tensor] = []

    def logged_rms_norm(*args: Any, **options: Any) -> Normed:
        normed = rms_norm(*args, **options)
        norm_inputs.append(normed.total)
        return normed

    def save(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    for module in (stream_reader, functions):
        monkeypatch.setattr(module, "rms_norm", logged_rms_norm)
    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
    addresses = [tensor.untyped_storage().data_ptr() for tensor in saved]
    *in_layers, last = (total.untyped_storage().data_ptr() in addresses for total in norm_inputs)
    assert in_layers == [not fp8] * (2 * LAYERS)
    assert last
    loss.backward()


def saved_bytes(model: nn.Module) -> int:
    """Bytes of the tensors that a forward saves for backward, each storage once."""
    storages: dict[int, int] = {}

    def save(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
    loss.backward()
    return sum(storages.values())


def test_head_norms_save_one_number_per_head(monkeypatch: pytest.MonkeyPatch) -> None:
    heads = {"head_dim": 8, "num_attention_heads": 4, "num_key_value_heads": 2}
    with_norms, without = (adapted(base_model(family, **heads)) for family in ("qwen3", "llama"))
    for model in (with_norms, without):
        assert fuse(model).fused == LAYERS
    difference = saved_bytes(with_norms) - saved_bytes(without)
    assert difference == LAYERS * IDS.numel() * (4 + 2) * torch.float32.itemsize
    monkeypatch.setattr("pantheraml.models.fast.kept_inputs.output_determines_input", lambda gain: False)
    for layer in with_norms.get_base_model().model.layers:
        layer.fused_parts._kept_inputs = KeptInputs()
    assert saved_bytes(with_norms) - saved_bytes(without) > difference


def test_inputs_of_uneven_head_norms_are_kept() -> None:
    """And the choice follows the weights."""
    kept, even = KeptInputs(), torch.ones(8)
    norms = HeadNorms(even.clone(), even.clone(), 1e-6, False)
    assert kept.of(norms) == (False, False)
    norms.key[0] = 1e-4
    assert kept.of(norms) == (False, True)
    assert kept.of(norms._replace(query=norms.key, key=norms.query)) == (True, False)
    trained = norms._replace(query=nn.Parameter(norms.query))
    assert kept.of(trained) == (True, True)


@pytest.mark.parametrize("part", ["q_norm", "k_norm"])
def test_uneven_head_norms_have_the_same_gradients(part: str) -> None:
    base = base_model("qwen3")
    for layer in base.model.layers:
        getattr(layer.self_attn, part).weight.data[:3] = 1e-5
    plain = adapted(base)
    assert_same(results(fused(plain)), results(plain))
