"""Fp8 weights in two layouts: the numbers of one layout bit for bit, whatever happens to adapters and weights."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel
from torch import nn

from pantheraml.engine.checkpointing import apply_checkpointing
from pantheraml.models.adapters import trainable_parameters
from pantheraml.models.fast import fuse, second_layouts, why_one_layout
from pantheraml.models.fast.groups import MOST_RANKS
from pantheraml.models.fast.storage import KeptTwice
from pantheraml.models.quantise.fp8 import FP8Linear
from pantheraml.specs.plan import Layouts
from pantheraml.specs.train import Checkpointing
from tests.unit.models.test_models_fast import (
    FUSED,
    LAYERS,
    adapted,
    assert_same,
    base_model,
    packed,
    randomise,
    results,
    runs_fused,
)

Both = tuple[PeftModel, PeftModel]


def fused(plain: PeftModel, layouts: Layouts) -> PeftModel:
    """A copy, fused."""
    twin = copy.deepcopy(plain)
    assert fuse(twin, layouts=layouts).fused == LAYERS
    assert len(second_layouts(twin)) == (2 * LAYERS if layouts == 2 else 0)
    return twin


def both(family: str = "llama", **lora: Any) -> Both:
    """The same model with its fp8 weights in two layouts, and in one."""
    plain = adapted(packed(base_model(family, vocab_size=320)), **lora)
    return fused(plain, 2), fused(plain, 1)


def assert_equal(models: Both) -> None:
    twice, once = models
    assert runs_fused(twice) == runs_fused(once)
    assert_same(results(twice), results(once), tolerance=0)


def groups(model: nn.Module) -> list[Any]:
    return [group for layer in model.get_base_model().model.layers for group in layer.fused_parts.groups]


def weights(model: nn.Module) -> list[FP8Linear]:
    return [layer for layer in model.modules() if isinstance(layer, FP8Linear)]


def in_step(model: nn.Module) -> bool:
    """Whether each second layout, weights and A, is the first one turned over."""
    kept = [twice for group in groups(model) if (twice := group.kept_twice()) is not None]
    return all(
        torch.equal(k.second[:, : k.first.shape[0]].float(), k.first[:, : k.second.shape[0]].float().T)
        and torch.equal(k.backward_matrix()[:, k.first.shape[0] :][:, : len(k.down)].float(), k.down.float().T)
        for k in kept
    )


# The numbers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FUSED)
def test_numbers_are_those_of_one_layout_while_adapters_change(family: str) -> None:
    models = both(family)
    for model in models:
        optimizer = torch.optim.AdamW([p for _, p in trainable_parameters(model)], lr=0.02, fused=True)
        for _ in range(2):
            results(model)
            optimizer.step()
    assert_equal(models)
    assert in_step(models[0])


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
    assert_equal(both("qwen2", **lora))


def test_a_scale_for_every_output() -> None:
    base = base_model("llama")
    with torch.no_grad():
        for name, parameter in base.named_parameters():
            if name.endswith("proj.weight"):
                parameter[::5] *= 1e-3
    plain = adapted(packed(base))
    assert not any(layer.shared_scale for layer in weights(plain))
    assert_equal((fused(plain, 2), fused(plain, 1)))


@pytest.mark.parametrize("mode", ["selective", "full", "offload"])
def test_checkpointing_changes_no_number(mode: Checkpointing) -> None:
    models = both()
    for model in models:
        assert apply_checkpointing(model, mode) == LAYERS
    assert_equal(models)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_weights_have_one_layout(dtype: torch.dtype) -> None:
    model = adapted(base_model("llama").to(dtype))
    assert fuse(model, layouts=2).fused == LAYERS
    assert second_layouts(model) == []


# What happens to adapters and weights ---------------------------------------------------------------------------------


def test_adapters_are_switched_merged_and_unmerged() -> None:
    models = both()
    for model in models:
        model.add_adapter("second", LoraConfig(task_type="CAUSAL_LM", r=3, target_modules=["q_proj", "up_proj"]))
        model.set_adapter("second")
        randomise(model, seed=3)
        with model.disable_adapter():
            assert not runs_fused(model)
    assert_equal(models)
    for model in models:
        model.set_adapter("default")
        randomise(model, seed=4)
        assert runs_fused(model)
        model.merge_adapter()
        assert not runs_fused(model)
        model.unmerge_adapter()
        assert runs_fused(model)
    assert_equal(models)


def test_a_copy_of_the_model_has_both_layouts_of_its_own() -> None:
    models = both()
    before = results(models[0])
    twins = copy.deepcopy(models)
    for twin in twins:
        randomise(twin, seed=5)
        for layer in weights(twin):
            layer.qweight.copy_(layer.qweight.flip(0))
    assert_equal(twins)
    assert in_step(twins[0])
    assert_same(results(models[0]), before, tolerance=0)
    assert {second.data_ptr() for second in second_layouts(models[0])}.isdisjoint(
        second.data_ptr() for second in second_layouts(twins[0])
    )


@pytest.mark.parametrize("layer", range(2))
def test_a_weight_that_somebody_writes_to_takes_its_second_layout_along(layer: int) -> None:
    models = both()
    for model in models:
        results(model)
        weight = model.get_base_model().model.layers[layer].mlp.down_proj.base_layer.qweight
        weight[3:9] = weight[9:15].clone()
    assert_equal(models)
    assert in_step(models[0])


def test_weights_are_turned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    turned: list[int] = []
    turn = KeptTwice.turn_weights
    monkeypatch.setattr(KeptTwice, "turn_weights", lambda kept: (turned.append(1), turn(kept))[1])
    model, _ = both()
    assert len(turned) == 2 * LAYERS
    for _ in range(2):
        results(model)
    assert len(turned) == 2 * LAYERS


def test_the_second_layout_is_no_part_of_the_modules() -> None:
    twice, once = both()
    for twin in (twice, once):
        results(twin)
    assert twice.state_dict().keys() == once.state_dict().keys()
    assert [name for name, _ in twice.named_buffers()] == [name for name, _ in once.named_buffers()]
    twice.load_state_dict(once.state_dict())
    assert_equal((twice, once))
    mlp = [group for group in groups(twice) if group.kept_twice() is not None]
    sizes = sum(group.width * (group.height + group.room) for group in mlp)
    assert sum(second.numel() for second in second_layouts(twice)) == sizes
    assert second_layouts(once) == []
    assert why_one_layout(twice) is None, "how much memory there is for it is not known on a CPU"


def test_the_last_layers_keep_one_where_second_layouts_would_add_more_than_three_quarters() -> None:
    plain = adapted(packed(base_model("llama", vocab_size=320, num_hidden_layers=12, intermediate_size=512)))
    first = sum(layer.qweight.numel() for layer in weights(plain.get_base_model().model.layers))
    twice, once = copy.deepcopy(plain), copy.deepcopy(plain)
    assert fuse(twice, layouts=2).fused == fuse(once, layouts=1).fused == 12
    kept = [group.kept_twice() is not None for group in groups(twice)]
    of_layers = [sum(kept[start : start + 4]) for start in range(0, len(kept), 4)]
    number = of_layers.index(0)
    assert of_layers == [2] * number + [0] * (12 - number)
    mlp = sum(layer.qweight.numel() for layer in weights(plain.get_base_model().model.layers[0].mlp))
    assert abs(number * mlp / first - 0.75) <= mlp / first / 2
    assert_equal((twice, once))


def test_layers_that_are_not_fused_take_no_share_of_second_layouts() -> None:
    base = packed(base_model("llama", vocab_size=320, num_hidden_layers=12, intermediate_size=512))
    plain = adapted(base, targets=["10.mlp.down_proj", "11.mlp.down_proj"])
    report = fuse(plain, layouts=2)
    assert len(second_layouts(plain)) == 2 * min(report.fused, 11) > 0


def test_a_rank_beyond_the_kernels_is_told() -> None:
    plain = adapted(packed(base_model("llama", vocab_size=320)), r=MOST_RANKS + 1)
    report = fuse(plain)
    assert report.fused == 0
    assert dict(report.reasons) == {f"its adapter's rank is above {MOST_RANKS}": LAYERS}
