"""fp8 weights in two layouts: bitwise equal to one layout, whatever happens to adapters and weights."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel
from torch import nn

from pantheraml.engine.memory.checkpointing import apply_checkpointing
from pantheraml.models.adapters import trainable_parameters
from pantheraml.models.fast import fuse, second_layouts, why_one_layout
from pantheraml.models.fast.group_storage import TwoLayoutMatrix
from pantheraml.models.fast.linear_groups import MAX_RANK
from pantheraml.models.quantize.fp8 import FP8Linear
from pantheraml.specs.plan import Layouts
from pantheraml.specs.train import Checkpointing
from tests.unit.models.fused_families import FUSED
from tests.unit.models.test_models_fast import (
    LAYERS,
    adapted,
    assert_same,
    base_model,
    quantize_to_fp8,
    randomize,
    results,
    runs_fused,
)

ModelPair = tuple[PeftModel, PeftModel]


def fused(plain: PeftModel, layouts: Layouts) -> PeftModel:
    """A copy, fused."""
    twin = copy.deepcopy(plain)
    assert fuse(twin, layouts=layouts).fused == LAYERS
    assert len(second_layouts(twin)) == (2 * LAYERS if layouts == 2 else 0)
    return twin


def layout_pair(family: str = "llama", **lora: Any) -> ModelPair:
    """Return the same model with fp8 weights in two layouts, and in one."""
    plain = adapted(quantize_to_fp8(base_model(family, vocab_size=320)), **lora)
    return fused(plain, 2), fused(plain, 1)


def assert_equal(models: ModelPair) -> None:
    two_layouts, one_layout = models
    assert runs_fused(two_layouts) == runs_fused(one_layout)
    assert_same(results(two_layouts), results(one_layout), tolerance=0)


def groups(model: nn.Module) -> list[Any]:
    return [group for layer in model.get_base_model().model.layers for group in layer.fused_parts.groups]


def weights(model: nn.Module) -> list[FP8Linear]:
    return [layer for layer in model.modules() if isinstance(layer, FP8Linear)]


def is_transposed(model: nn.Module) -> bool:
    """Return whether each backward layout, weights and A, is the transpose of the forward layout."""
    storages = [storage for group in groups(model) if (storage := group.two_layout_storage()) is not None]
    return all(
        torch.equal(
            k.backward_layout[:, : k.forward_layout.shape[0]].float(),
            k.forward_layout[:, : k.backward_layout.shape[0]].float().T,
        )
        and torch.equal(k.backward_matrix()[:, k.forward_layout.shape[0] :][:, : len(k.down)].float(), k.down.float().T)
        for k in storages
    )


# The numbers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FUSED)
def test_two_layouts_match_one_while_adapters_change(family: str) -> None:
    models = layout_pair(family)
    for model in models:
        optimizer = torch.optim.AdamW([p for _, p in trainable_parameters(model)], lr=0.02, fused=True)
        for _ in range(2):
            results(model)
            optimizer.step()
    assert_equal(models)
    assert is_transposed(models[0])


@pytest.mark.parametrize(
    "lora",
    [
        {"rank_pattern": {"k_proj": 7, r"layers\.1\.mlp\.down_proj": 16}, "alpha_pattern": {"k_proj": 3}},
        {"targets": ["q_proj", "v_proj"]},
        {"targets": ["down_proj"]},
        {"r": 70},
    ],
    ids=["ranks", "some", "one", "wide"],
)
def test_adapters_of_every_shape(lora: dict[str, Any]) -> None:
    assert_equal(layout_pair("qwen2", **lora))


def test_per_row_scales() -> None:
    base = base_model("llama")
    with torch.no_grad():
        for name, parameter in base.named_parameters():
            if name.endswith("proj.weight"):
                parameter[::5] *= 1e-3
    plain = adapted(quantize_to_fp8(base))
    assert not any(layer.shared_scale for layer in weights(plain))
    assert_equal((fused(plain, 2), fused(plain, 1)))


@pytest.mark.parametrize("mode", ["selective", "full", "offload"])
def test_checkpointing_is_bitwise_equal(mode: Checkpointing) -> None:
    models = layout_pair()
    for model in models:
        assert apply_checkpointing(model, mode) == LAYERS
    assert_equal(models)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unquantized_weights_have_one_layout(dtype: torch.dtype) -> None:
    model = adapted(base_model("llama").to(dtype))
    assert fuse(model, layouts=2).fused == LAYERS
    assert second_layouts(model) == []


# Changes to adapters and weights ---------------------------------------------------------------------------------


def test_adapters_are_switched_merged_and_unmerged() -> None:
    models = layout_pair()
    for model in models:
        model.add_adapter("second", LoraConfig(task_type="CAUSAL_LM", r=3, target_modules=["q_proj", "up_proj"]))
        model.set_adapter("second")
        randomize(model, seed=3)
        with model.disable_adapter():
            assert not runs_fused(model)
    assert_equal(models)
    for model in models:
        model.set_adapter("default")
        randomize(model, seed=4)
        assert runs_fused(model)
        model.merge_adapter()
        assert not runs_fused(model)
        model.unmerge_adapter()
        assert runs_fused(model)
    assert_equal(models)


def test_copied_model_has_its_own_layouts() -> None:
    models = layout_pair()
    before = results(models[0])
    twins = copy.deepcopy(models)
    for twin in twins:
        randomize(twin, seed=5)
        for layer in weights(twin):
            layer.qweight.copy_(layer.qweight.flip(0))
    assert_equal(twins)
    assert is_transposed(twins[0])
    assert_same(results(models[0]), before, tolerance=0)
    assert {second.data_ptr() for second in second_layouts(models[0])}.isdisjoint(
        second.data_ptr() for second in second_layouts(twins[0])
    )


@pytest.mark.parametrize("layer", range(2))
def test_writing_a_weight_updates_its_backward_layout(layer: int) -> None:
    models = layout_pair()
    for model in models:
        results(model)
        weight = model.get_base_model().model.layers[layer].mlp.down_proj.base_layer.qweight
        weight[3:9] = weight[9:15].clone()
    assert_equal(models)
    assert is_transposed(models[0])


def test_weights_are_transposed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    sync = TwoLayoutMatrix.sync_transpose
    monkeypatch.setattr(TwoLayoutMatrix, "sync_transpose", lambda storage: (calls.append(1), sync(storage))[1])
    model, _ = layout_pair()
    assert len(calls) == 2 * LAYERS
    for _ in range(2):
        results(model)
    assert len(calls) == 2 * LAYERS


def test_second_layouts_are_not_module_state() -> None:
    two_layouts, one_layout = layout_pair()
    for twin in (two_layouts, one_layout):
        results(twin)
    assert two_layouts.state_dict().keys() == one_layout.state_dict().keys()
    assert [name for name, _ in two_layouts.named_buffers()] == [name for name, _ in one_layout.named_buffers()]
    two_layouts.load_state_dict(one_layout.state_dict())
    assert_equal((two_layouts, one_layout))
    mlp = [group for group in groups(two_layouts) if group.two_layout_storage() is not None]
    sizes = sum(group.width * (group.height + group.pad_cols) for group in mlp)
    assert sum(second.numel() for second in second_layouts(two_layouts)) == sizes
    assert second_layouts(one_layout) == []
    assert why_one_layout(two_layouts) is None, "available memory is unknown on a CPU"


def test_second_layouts_are_limited_to_three_quarters() -> None:
    plain = adapted(quantize_to_fp8(base_model("llama", vocab_size=320, num_hidden_layers=12, intermediate_size=512)))
    total = sum(layer.qweight.numel() for layer in weights(plain.get_base_model().model.layers))
    two_layouts, one_layout = copy.deepcopy(plain), copy.deepcopy(plain)
    assert fuse(two_layouts, layouts=2).fused == fuse(one_layout, layouts=1).fused == 12
    storages = [group.two_layout_storage() is not None for group in groups(two_layouts)]
    per_layer = [sum(storages[start : start + 4]) for start in range(0, len(storages), 4)]
    number = per_layer.index(0)
    assert per_layer == [2] * number + [0] * (12 - number)
    mlp = sum(layer.qweight.numel() for layer in weights(plain.get_base_model().model.layers[0].mlp))
    assert abs(number * mlp / total - 0.75) <= mlp / total / 2
    assert_equal((two_layouts, one_layout))


def test_unfused_layers_do_not_count_for_second_layouts() -> None:
    base = quantize_to_fp8(base_model("llama", vocab_size=320, num_hidden_layers=12, intermediate_size=512))
    plain = adapted(base, targets=["10.mlp.down_proj", "11.mlp.down_proj"])
    report = fuse(plain, layouts=2)
    assert len(second_layouts(plain)) == 2 * min(report.fused, 11) > 0


def test_too_large_rank_is_reported() -> None:
    plain = adapted(quantize_to_fp8(base_model("llama", vocab_size=320)), r=MAX_RANK + 1)
    report = fuse(plain)
    assert report.fused == 0
    assert dict(report.reasons) == {f"its adapter's rank is above {MAX_RANK}": LAYERS}
