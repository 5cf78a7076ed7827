"""Per-step queries of trainers return torch's own answers, also after any change to the module tree."""

from __future__ import annotations

import copy
import cProfile
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from pantheraml.models.causal_lm import make_fast
from pantheraml.models.module_walk_cache import CachedModuleWalk, use_cached_walk


def adapted(folder: Path, **changes: Any) -> Any:
    base = AutoModelForCausalLM.from_pretrained(folder)
    make_fast(base)
    settings: dict[str, Any] = {"r": 2, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", **changes}
    model = peft.get_peft_model(base, peft.LoraConfig(**settings))
    use_cached_walk(model)
    return model


def assert_matches_torch(model: nn.Module) -> None:
    actual, expected = list(model.parameters()), list(nn.Module.parameters(model))
    assert len(actual) == len(expected) > 0
    assert all(mine is other for mine, other in zip(actual, expected, strict=True))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("changes", [{}, {"use_dora": True}, {"target_modules": "all-linear"}])
def test_all_parameters_once_and_in_order(tiny_model: Any, changes: dict[str, Any], tied: bool) -> None:
    model = adapted(tiny_model("llama", tie_word_embeddings=tied), **changes)
    for whole in (model, model.base_model.model):
        assert isinstance(whole, CachedModuleWalk)
        assert_matches_torch(whole)


def _replace_a_layer(model: Any) -> None:
    model.get_base_model().model.layers[0].mlp.up_proj = nn.Linear(32, 48)


def _remove_a_layer(model: Any) -> None:
    del model.get_base_model().model.layers[1]


def _set_a_child_to_none(model: Any) -> None:
    model.get_base_model().model.layers[0].mlp = None


def _share_a_layer(model: Any) -> None:
    layers = model.get_base_model().model.layers
    layers[1].mlp = layers[0].mlp


def _add_a_cycle(model: Any) -> None:
    model.get_base_model().model.layers[0].whole = model


def _share_a_parameter(model: Any) -> None:
    layers = model.get_base_model().model.layers
    layers[0].input_layernorm.weight = layers[1].input_layernorm.weight


def _replace_a_parameter(model: Any) -> None:
    model.get_base_model().model.norm.weight = nn.Parameter(torch.ones(32))


def _move_a_parameter(model: Any) -> None:
    layers = model.get_base_model().model.layers
    layers[0].moved = layers[1].input_layernorm._parameters.pop("weight")


def _add_an_adapter(model: Any) -> None:
    model.add_adapter("other", peft.LoraConfig(r=3, target_modules=["k_proj"], task_type="CAUSAL_LM"))


def _remove_an_adapter(model: Any) -> None:
    _add_an_adapter(model)
    list(model.parameters())
    model.delete_adapter("other")


@pytest.mark.parametrize(
    "change",
    [
        _replace_a_layer,
        _remove_a_layer,
        _set_a_child_to_none,
        _share_a_layer,
        _add_a_cycle,
        _share_a_parameter,
        _replace_a_parameter,
        _move_a_parameter,
        _add_an_adapter,
        _remove_an_adapter,
    ],
)
def test_changes_are_seen_immediately(tiny_model: Any, change: Callable[[Any], None]) -> None:
    model = adapted(tiny_model("llama"))
    assert_matches_torch(model)
    before = [id(parameter) for parameter in model.parameters()]
    change(model)
    assert_matches_torch(model)
    same = change in (_add_a_cycle, _remove_an_adapter)
    assert ([id(parameter) for parameter in model.parameters()] == before) is same


def test_parameters_of_the_model_itself(tiny_model: Any) -> None:
    model = adapted(tiny_model("llama"))
    assert list(model.parameters(recurse=False)) == []
    model.own = nn.Parameter(torch.ones(1))
    assert [parameter is model.own for parameter in model.parameters(recurse=False)] == [True]


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_are_reset(tiny_model: Any, to_none: bool) -> None:
    model = adapted(tiny_model("llama")).train()
    ids = torch.arange(12)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert all(parameter.grad is not None for parameter in trained)
    model.zero_grad(set_to_none=to_none)
    assert all((parameter.grad is None) is to_none for parameter in trained)
    assert to_none or not any(parameter.grad.any() for parameter in trained)


def test_train_sets_all_modes(tiny_model: Any) -> None:
    model = adapted(tiny_model("llama"))
    for mode in (True, False, True):
        assert model.train(mode) is model
        assert {module.training for module in model.modules()} == {mode}
    for part in (model.base_model, model.get_base_model().model.layers[1].mlp.act_fn):
        part.training = False
        model.train()
        assert all(module.training for module in model.modules())


def test_it_is_still_a_peft_model(tiny_model: Any, tmp_path: Path) -> None:
    folder = tiny_model("llama")
    model = adapted(folder, init_lora_weights=False).eval()
    assert isinstance(model, peft.PeftModelForCausalLM)
    assert repr(model).startswith("PeftModelForCausalLM(")
    ids = torch.arange(12)[None]
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        torch.testing.assert_close(copy.deepcopy(model)(input_ids=ids).logits, expected)
        model.save_pretrained(tmp_path)
        base = AutoModelForCausalLM.from_pretrained(folder)
        loaded = peft.PeftModel.from_pretrained(base, tmp_path).eval()
        torch.testing.assert_close(loaded(input_ids=ids).logits, expected)
        with model.disable_adapter():
            assert not torch.allclose(model(input_ids=ids).logits, expected, atol=1e-3)
        merged = model.merge_and_unload()
        torch.testing.assert_close(merged(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-4)


def test_a_copy_has_its_own_parameters(tiny_model: Any) -> None:
    model = adapted(tiny_model("llama"))
    other = copy.deepcopy(model)
    assert type(other) is type(model)
    assert_matches_torch(other)
    assert {id(p) for p in other.parameters()}.isdisjoint(id(p) for p in model.parameters())


@pytest.mark.parametrize("change", [_replace_a_layer, _set_a_child_to_none, _share_a_layer, _add_an_adapter])
def test_train_reaches_new_modules(tiny_model: Any, change: Callable[[Any], None]) -> None:
    model = adapted(tiny_model("llama")).train()
    change(model)
    for mode in (True, False, True):
        for module in model.modules():
            module.training = not mode if module is not model else mode
        model.train(mode)
        assert {module.training for module in model.modules()} == {mode}
    layer = nn.Dropout().eval()
    model.get_base_model().model.layers[0].self_attn.o_proj = layer
    assert model.train() is model
    assert layer.training


class _RecordsTrain(nn.Identity):
    heard = 0

    def train(self, mode: bool = True) -> Any:
        type(self).heard += 1
        return super().train(mode)


def test_train_reaches_a_module_whose_class_changed(tiny_model: Any) -> None:
    model = adapted(tiny_model("llama")).train()
    model.train()
    activation = model.get_base_model().model.layers[1].mlp.act_fn
    activation.__class__ = _RecordsTrain
    heard = _RecordsTrain.heard
    model.train()
    assert _RecordsTrain.heard == heard + 1


def test_a_copy_has_no_cached_walk(tiny_model: Any) -> None:
    model = adapted(tiny_model("llama")).train()
    walked = model._walk
    assert pickle.loads(pickle.dumps(walked)) is None
    other = copy.deepcopy(model)
    assert other._walk is None
    other.get_base_model().model.layers[0].mlp.eval()
    assert other.train() is other
    assert all(module.training for module in other.modules())
    assert model._walk is walked


def calls(model: Any) -> int:
    """Count Python and built-in calls of `train()` on a model that is already in training mode."""
    model.train()
    profile = cProfile.Profile()
    profile.runcall(model.train)
    return sum(entry.callcount for entry in profile.getstats())


def test_train_makes_no_more_calls_on_a_larger_model(tiny_model: Any) -> None:
    small, large = (adapted(tiny_model("llama", num_hidden_layers=layers)) for layers in (1, 4))
    assert calls(small) == calls(large)
