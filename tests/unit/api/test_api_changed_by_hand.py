"""What scripts do by hand to a model whose layers are fused: hooks, weights set to be trained, weights loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from pantheraml import FastLanguageModel
from pantheraml.models.fast import is_fused
from tests import toy

IDS = (torch.arange(40).reshape(2, 20) * 7) % 300 + 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.write_llama(tmp_path_factory.mktemp("biased") / "model", attention_bias=True, mlp_bias=True)


@pytest.fixture
def pair(folder: Path) -> tuple[Any, Any]:
    """A plain and a fused model with the same weights."""
    config = LoraConfig(
        r=8, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    plain = get_peft_model(AutoModelForCausalLM.from_pretrained(folder), config)
    fused = get_peft_model(FastLanguageModel.from_pretrained(str(folder))[0], config)
    weights = dict(plain.named_parameters())
    with torch.no_grad():
        for name, weight in fused.named_parameters():
            weight.copy_(weights[name])
    assert sum(map(is_fused, fused.modules())) == 2
    passes(fused.train()), passes(plain.train())  # layers run as a chain from the second pass on
    return plain, fused


def passes(model: Any) -> float:
    for _ in range(2):
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
    model.zero_grad()
    return float(loss.detach())


HOOKS: dict[str, Callable[[Any, list[Tensor]], Any]] = {
    "output of the MLP": lambda layer, seen: layer.mlp.register_forward_hook(lambda *a: seen.append(a[2])),
    "input of attention": lambda layer, seen: layer.self_attn.register_forward_pre_hook(
        lambda _module, _args, kwargs: seen.append(kwargs["hidden_states"]), with_kwargs=True
    ),
    "output of a linear layer": lambda layer, seen: layer.self_attn.k_proj.register_forward_hook(
        lambda *a: seen.append(a[2])
    ),
    "under an adapter": lambda layer, seen: layer.mlp.down_proj.base_layer.register_forward_hook(
        lambda *a: seen.append(a[2])
    ),
    "in an adapter": lambda layer, seen: layer.self_attn.q_proj.lora_A["default"].register_forward_hook(
        lambda *a: seen.append(a[2])
    ),
    "activation function": lambda layer, seen: layer.mlp.act_fn.register_forward_hook(lambda *a: seen.append(a[2])),
    "output of a norm": lambda layer, seen: layer.input_layernorm.register_forward_hook(lambda *a: seen.append(a[2])),
    "gradient of the MLP": lambda layer, seen: layer.mlp.register_full_backward_hook(lambda *a: seen.append(a[2][0])),
}


@pytest.mark.parametrize("place", HOOKS)
def test_hooks_are_called(pair: tuple[Any, Any], place: str) -> None:
    found: list[list[Tensor]] = []
    for model in pair:
        seen: list[Tensor] = []
        handle = HOOKS[place](model.get_base_model().model.layers[1], seen)
        model(input_ids=IDS, labels=IDS).loss.backward()
        handle.remove()
        model(input_ids=IDS, labels=IDS).loss.backward()
        found.append(seen)
    (theirs,), (ours,) = found
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


UNFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "hook": (
        lambda layer: layer.mlp.register_forward_hook(lambda *_: None),
        "a module inside them has hooks, which fused layers do not call",
    ),
    "trained": (
        lambda layer: layer.self_attn.k_proj.weight.requires_grad_(),
        "a weight or bias of the base is trainable",
    ),
}


@pytest.mark.parametrize("change", UNFUSED)
def test_layers_that_are_not_fused_any_more_say_so(
    pair: tuple[Any, Any], change: str, caplog: pytest.LogCaptureFixture
) -> None:
    (_, model), (make, why) = pair, UNFUSED[change]
    make(model.get_base_model().model.layers[1])
    with caplog.at_level("WARNING", logger="pantheraml"):
        with torch.no_grad():
            model(input_ids=IDS)
        assert not caplog.records, "they train, and only that is to be fast"
        passes(model)
    assert [record.getMessage() for record in caplog.records] == [f"decoder layers run unfused: {why}"]


def test_hooks_on_the_output_head_are_called(pair: tuple[Any, Any]) -> None:
    """They may change the logits, and so the loss."""
    losses, seen = [], list[Tensor]()

    def double(_head: Any, _args: Any, logits: Tensor) -> Tensor:
        seen.append(logits)
        return 2 * logits

    for model in pair:
        handle = model.get_output_embeddings().register_forward_hook(double)
        losses.append(model(input_ids=IDS, labels=IDS).loss)
        losses[-1].backward()
        handle.remove()
    assert "logits" not in pair[1](input_ids=IDS, labels=IDS), "without a hook, nobody needs them"
    torch.testing.assert_close(losses[1], losses[0])
    torch.testing.assert_close(seen[1], seen[0], rtol=1e-4, atol=1e-5)
    for name, weight in pair[0].named_parameters():
        if weight.grad is not None:
            torch.testing.assert_close(pair[1].get_parameter(name).grad, weight.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["self_attn.k_proj.weight", "mlp.gate_proj.bias", "self_attn.q_proj.base_layer.bias"])
def test_weights_that_are_set_to_be_trained(pair: tuple[Any, Any], name: str) -> None:
    gradients = []
    for model in pair:
        weight = model.get_base_model().model.layers[1].get_parameter(name).requires_grad_()
        model(input_ids=IDS, labels=IDS).loss.backward()
        gradients.append(weight.grad)
        with torch.no_grad():
            weight.add_(weight.grad)
        weight.requires_grad_(False)
        weight.grad = None
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-7)
    assert passes(pair[1]) == pytest.approx(passes(pair[0]), abs=1e-5), "fused again, with the weight that was trained"


def test_weights_and_biases_that_are_loaded(pair: tuple[Any, Any]) -> None:
    plain, fused = pair
    torch.manual_seed(2)
    state = {name: weight + 0.05 * torch.randn_like(weight) for name, weight in plain.state_dict().items()}
    before = passes(fused)
    for model in pair:
        model.load_state_dict(state)
    assert passes(fused) == pytest.approx(passes(plain), abs=1e-5) != pytest.approx(before, abs=1e-3)
