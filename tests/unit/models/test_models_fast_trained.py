"""Fused decoder layers with trainable weights: every gradient matches the unfused layers."""

from __future__ import annotations

import copy
import gc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from pantheraml.engine.memory.checkpointing import apply_checkpointing
from pantheraml.kernels.gated_activation import gated_activation_backward
from pantheraml.models.fast import autograd_functions as functions
from pantheraml.models.fast import fuse
from pantheraml.models.fast.trainable_group import TrainableGroup
from pantheraml.models.quantize.fp8_training import FP8TrainingLinear, use_fp8_matmuls
from pantheraml.specs.train import Checkpointing, TrainConfig
from tests import toy
from tests.harness import make_plan, make_run, merged, train_here, values
from tests.unit.models.test_models_fast import (
    IDS,
    LAYERS,
    assert_same,
    base_model,
    logits,
    relative_error,
    results,
    runs_fused,
)
from tests.unit.models.test_models_fast_left_alone import assert_left_alone

FAMILIES = ["llama", "mistral", "qwen3", "gemma", "phi3", "olmo3", "exaone4"]
OTHER_IDS = IDS.flip(0)


def fused(model: Any) -> Any:
    """A copy, fused."""
    twin = copy.deepcopy(model)
    report = fuse(twin)
    assert (report.fused, dict(report.reasons)) == (LAYERS, {})
    return twin


def pair(family: str = "llama", *, fp8: bool = False, **changes: Any) -> tuple[Any, Any]:
    """Return the same model fused and unfused."""
    plain = base_model(family, **changes).train()
    if fp8:
        assert use_fp8_matmuls(plain)
    return fused(plain), plain


def powers(*shape: int) -> Tensor:
    """Signed powers of two, which e4m3 holds exactly."""
    return torch.exp2(torch.randint(-1, 3, shape)) * (torch.randint(0, 2, shape) * 2 - 1)


def cosines(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> dict[str, float]:
    assert ours.keys() == theirs.keys()
    return {name: float(torch.cosine_similarity(ours[name].flatten(), theirs[name].flatten(), dim=0)) for name in ours}


# The numbers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_unquantized_matmuls_match(family: str) -> None:
    ours, theirs = pair(family)
    assert runs_fused(ours)
    assert not runs_fused(theirs)
    actual = results(ours)
    assert {name for name, _ in ours.named_parameters()} < actual.keys()
    assert_same(actual, results(theirs))


@pytest.mark.parametrize("family", FAMILIES)
def test_fp8_matmuls_are_close_to_unfused(family: str) -> None:
    """The smallest cosine measured is 0.9990. With both, norm gradients are up to 0.982 from float32."""
    ours, theirs = pair(family, fp8=True, initializer_range=0.05)
    _, exact = pair(family, initializer_range=0.05)
    actual, expected, best = results(ours), results(theirs), results(exact)
    assert min(cosines(actual, expected).values()) > 0.998
    for name, gradient in expected.items():
        assert 0.97 < actual[name].norm() / gradient.norm() < 1.03, name
        assert relative_error(actual[name], best[name]) < 1.1 * relative_error(gradient, best[name]) + 0.02, name


@pytest.mark.parametrize("fp8", [False, True], ids=["plain", "fp8"])
@pytest.mark.parametrize("heights", [(48,), (32, 16, 64)])
def test_every_number_is_in_its_place(heights: tuple[int, ...], fp8: bool) -> None:
    """On numbers that fp8 holds exactly, and a number of rows that is no multiple of 16."""
    torch.manual_seed(0)
    layers = [nn.Linear(80, height, bias=False) for height in heights]
    for layer in layers:
        layer.weight.data.copy_(powers(*layer.weight.shape) * 2.0**-9)
        if fp8:
            layer.__class__ = FP8TrainingLinear
    stacked = torch.cat([layer.weight.detach() for layer in layers])
    group = TrainableGroup(layers)
    x, g = powers(37, 80) * 2.0**5, powers(37, sum(heights)) * torch.exp2(torch.arange(37) % 5 - 20.0)[:, None]
    rows, gradient = group.operand(x), group.gradient_operand(g)
    assert (rows.qdata.dtype == torch.float8_e4m3fn) == fp8
    with torch.no_grad():
        out, lora_mid = group.forward(rows)
        d_input, gradients = group.backward(gradient, rows, lora_mid)
        none, gradients_only = group.backward(gradient, rows, lora_mid, needs_input_grad=False)
    assert none is None
    for actual, expected in ((out, x @ stacked.T), (d_input, g @ stacked), (torch.cat(gradients), g.T @ x)):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6 * float(expected.abs().max()))
    assert [actual.shape for actual in gradients] == [layer.weight.shape for layer in layers]
    assert all(map(torch.equal, gradients, gradients_only))


def test_large_layer_does_not_degrade_a_small_one_in_its_group() -> None:
    """They share one scale; e4m3 keeps all its bits down to 2**-15 of the largest number."""
    torch.manual_seed(0)
    layers = [nn.Linear(64, 32, bias=False) for _ in range(2)]
    layers[0].weight.data *= 2.0**8
    for layer in layers:
        layer.__class__ = FP8TrainingLinear
    x = torch.randn(40, 64)
    group = TrainableGroup(layers)
    with torch.no_grad():
        out, _ = group.forward(group.operand(x))
        assert relative_error(out[:, 32:], layers[1](x)) < 0.05


@pytest.mark.parametrize("fp8", [False, True], ids=["plain", "fp8"])
def test_zero_norm_weights_get_gradients(fp8: bool) -> None:
    """fp8 rows are zero there."""
    ours, theirs = pair(fp8=fp8, initializer_range=0.05)
    for model in (ours, theirs):
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.data[::3] = 0
    actual, expected = results(ours), results(theirs)
    for name, gradient in expected.items():
        if "norm" in name:
            assert gradient[::3].norm() > 0
            assert relative_error(actual[name][::3], gradient[::3]) < (0.05 if fp8 else 1e-5), name


@pytest.mark.parametrize("fp8", [False, True], ids=["plain", "fp8"])
def test_bf16_weights(fp8: bool) -> None:
    plain = base_model("llama", initializer_range=0.05)
    exact = results(plain)
    half = copy.deepcopy(plain).to(torch.bfloat16)
    if fp8:
        use_fp8_matmuls(half)
    actual, theirs = results(fused(half)), results(half)
    for name, expected in exact.items():
        assert actual[name].dtype == torch.bfloat16
        assert relative_error(actual[name].float(), expected) < 0.02 + 1.1 * relative_error(
            theirs[name].float(), expected
        ), name


def test_under_autocast_it_computes_in_the_dtype_of_its_weights() -> None:
    ours, _ = pair()
    expected = results(ours)
    with torch.autocast("cpu", torch.bfloat16):
        actual = results(ours)
    names = [name for name in expected if "layers" in name]
    assert all(actual[name].dtype == torch.float32 for name in names)
    assert max(relative_error(actual[name], expected[name]) for name in names) < 0.05


@pytest.mark.parametrize("mode", ["selective", "full", "offload"])
@pytest.mark.parametrize("fp8", [False, True], ids=["plain", "fp8"])
def test_checkpointing_is_bitwise_equal(mode: Checkpointing, fp8: bool) -> None:
    ours, _ = pair(fp8=fp8)
    expected = results(ours)
    assert apply_checkpointing(ours, mode) == LAYERS
    assert_same(results(ours), expected, tolerance=0)


@pytest.mark.parametrize("mode", ["none", "full", "offload"])
@pytest.mark.parametrize("fp8", [False, True], ids=["plain", "fp8"])
def test_gradients_overwrite_recomputed_activations(
    mode: Checkpointing, fp8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing that a second backward would read."""
    ours, _ = pair(fp8=fp8)
    expected = results(ours)
    apply_checkpointing(ours, mode)
    addresses = []

    def logged_backward(g: Tensor, gate_up: Tensor, **options: Any) -> Any:
        hidden, gradient = gated_activation_backward(g, gate_up, **options)
        addresses.append((hidden.qdata is g, gradient.qdata is gate_up))
        return hidden, gradient

    monkeypatch.setattr(functions, "gated_activation_backward", logged_backward)
    ours.zero_grad()
    loss = ours(input_ids=IDS, labels=IDS, use_cache=False).loss
    for passes in (1, 2):
        loss.backward(retain_graph=passes == 1)
        gradients = {name: parameter.grad / passes for name, parameter in ours.named_parameters()}
        assert_same(gradients, {name: expected[name] for name in gradients})
    in_place = mode in ("full", "offload") and not fp8
    assert addresses == [(in_place, in_place)] * 2 * LAYERS


class OtherSavedTensorHooks:
    """Puts the layers' saved tensors under other saved-tensor hooks, from before forward to after it."""

    def __init__(self, model: nn.Module) -> None:
        self._hooks: list[torch.autograd.graph.saved_tensors_hooks] = []
        for module in model.modules():
            if isinstance(module, GradientCheckpointingLayer):
                module.register_forward_pre_hook(self._begin)
                module.register_forward_hook(self._end)

    def _begin(self, *_: Any) -> None:
        self._hooks.append(torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x))
        self._hooks[-1].__enter__()

    def _end(self, *_: Any) -> None:
        self._hooks.pop().__exit__()


def test_activations_held_by_other_hooks_are_not_overwritten() -> None:
    """Hooks inside a layer take what checkpointing would have recomputed."""
    ours, _ = pair()
    expected = results(ours)
    apply_checkpointing(ours, "full")
    OtherSavedTensorHooks(ours)
    ours.zero_grad()
    loss = ours(input_ids=IDS, labels=IDS, use_cache=False).loss
    loss.backward(retain_graph=True)
    loss.backward()
    gradients = {name: parameter.grad / 2 for name, parameter in ours.named_parameters()}
    assert_same(gradients, {name: expected[name] for name in gradients})


def test_concurrent_backwards() -> None:
    ours, _ = pair()
    expected = results(ours)
    apply_checkpointing(ours, "full")
    loss = ours(input_ids=IDS, labels=IDS, use_cache=False).loss
    names, weights = zip(*ours.named_parameters(), strict=True)
    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(torch.autograd.grad, loss, weights, retain_graph=True) for _ in range(4)]
        for future in futures:
            assert_same(dict(zip(names, future.result(), strict=True)), {name: expected[name] for name in names})


@pytest.mark.parametrize("mode", ["none", "selective", "full", "offload"])
def test_several_forwards_before_backward(mode: Checkpointing) -> None:
    """As in preference optimization. Recomputed layers use the RoPE tables of their own pass."""
    collected = []
    for model in pair():
        apply_checkpointing(model, mode)
        loss = sum(model(input_ids=ids, labels=ids, use_cache=False).loss for ids in (IDS, OTHER_IDS, IDS))
        loss.backward()
        collected.append({name: parameter.grad for name, parameter in model.named_parameters()})
    assert_same(*collected)


def test_rope_cache_drops_past_passes() -> None:
    ours, _ = pair()
    for ids in (IDS, OTHER_IDS):
        ours(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    gc.collect()
    assert not len(ours.model.layers[0].fused_parts.rope_cache._entries)


def test_gradients_accumulate_over_batches_and_backwards() -> None:
    collected = []
    for model in pair():
        model.zero_grad()
        first, second = (model(input_ids=ids, labels=ids, use_cache=False).loss for ids in (IDS, OTHER_IDS))
        first.backward(retain_graph=True)
        first.backward()
        second.backward()
        collected.append({name: parameter.grad for name, parameter in model.named_parameters()})
    assert_same(*collected)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_tied_embeddings(family: str) -> None:
    ours, theirs = pair(family, tie_word_embeddings=True)
    assert ours.lm_head.weight is ours.model.embed_tokens.weight
    assert_same(results(ours), results(theirs))


def test_frozen_embeddings_and_gradients_of_inputs() -> None:
    ours, theirs = pair()
    for model in (ours, theirs):
        model.model.embed_tokens.requires_grad_(False)
    assert_same(results(ours), results(theirs))
    collected = []
    for model in (ours, theirs):
        embeddings = 0.1 * torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(0))
        embeddings.requires_grad_()
        model(inputs_embeds=embeddings, use_cache=False).logits.square().mean().backward()
        collected.append(embeddings.grad)
    assert relative_error(*collected) <= 1e-5


# Weights are read in place ----------------------------------------------------------------------------------


def test_next_pass_uses_updated_and_moved_weights() -> None:
    ours, theirs = pair("qwen3")
    for model in (ours, theirs):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        for _ in range(2):
            results(model)
            optimizer.step()
    assert_same(results(ours), results(theirs))
    for model in (ours, theirs):  # as a trainer that flattens parameters does
        for parameter in model.parameters():
            parameter.data = parameter.data.clone() * 1.1
    assert_same(results(ours), results(theirs))
    for model in (ours, theirs):
        for module in model.model.layers[1].modules():
            if "weight" in module._parameters:
                module.weight = nn.Parameter(0.9 * module.weight.detach())
    assert_same(results(ours), results(theirs))
    for model in (ours, theirs):  # nothing is shared with a copy
        twin = copy.deepcopy(model)
        twin.model.layers[0].mlp.up_proj.weight.data.zero_()
        assert relative_error(logits(twin), logits(model)) > 0.01
    assert_same(results(copy.deepcopy(ours)), results(theirs))


def test_weights_frozen_later_get_no_gradient() -> None:
    ours, theirs = pair()
    for model in (ours, theirs):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("k_proj" not in name and "layers.1.input_layernorm" not in name)
    assert_same(results(ours), results(theirs))
    assert ours.model.layers[1].input_layernorm.weight.grad is None


def test_other_dtype_runs_unfused() -> None:
    ours, theirs = (model.bfloat16() for model in pair())
    assert not runs_fused(ours)
    assert torch.equal(logits(ours), logits(theirs))
    assert runs_fused(ours.float())


def test_other_device_runs_unfused() -> None:
    """Fusion may have other conditions there."""
    ours, theirs = pair()
    for layer in ours.model.layers:
        layer.fused_parts.device = torch.device("meta")
    assert not runs_fused(ours)
    assert torch.equal(logits(ours), logits(theirs))


@pytest.mark.parametrize("fp8", [False, True], ids=["plain", "fp8"])
def test_names_values_and_files_stay(fp8: bool, tmp_path: Path) -> None:
    ours, theirs = pair(fp8=fp8)
    actual, expected = ours.state_dict(), theirs.state_dict()
    assert list(actual) == list(expected)
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    addresses = [parameter.data_ptr() for parameter in ours.parameters()]
    results(ours)
    assert addresses == [parameter.data_ptr() for parameter in ours.parameters()]
    ours.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa")
    assert all(torch.equal(again.state_dict()[name], expected[name]) for name in expected)
    ours.load_state_dict({name: 2 * value for name, value in expected.items()})
    theirs.load_state_dict({name: 2 * value for name, value in expected.items()})
    assert relative_error(logits(ours), logits(theirs)) < (0.3 if fp8 else 1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_generation_with_a_cache_gives_the_same_tokens(family: str) -> None:
    texts = [
        model.eval().generate(input_ids=IDS, max_new_tokens=12, do_sample=False, use_cache=True, pad_token_id=258)
        for model in pair(family)
    ]
    assert torch.equal(*texts)


def test_evaluation_between_passes() -> None:
    ours, theirs = pair()
    loss = ours(input_ids=IDS, labels=IDS, use_cache=False).loss
    assert relative_error(logits(ours.eval()), logits(theirs.eval())) <= 1e-5
    loss.backward()
    expected = results(theirs.train())
    assert_same({"logits": expected["logits"], **{n: p.grad for n, p in ours.named_parameters()}}, expected)


# Not fused ----------------------------------------------------------------------------------------------


def test_unfused_layers_report_reasons(caplog: pytest.LogCaptureFixture) -> None:
    assert_left_alone(base_model("qwen2"), "it has a bias", caplog)
    assert_left_alone(base_model("llama", intermediate_size=40), "multiple of 16", caplog)
    assert_left_alone(base_model("llama").requires_grad_(False), "it has no adapter", caplog, trains=False)
    for part in ("k_proj", "mlp", "input_layernorm"):
        model = base_model("llama")
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(part not in name)
        assert_left_alone(model, "some of its weights are trainable, and others are frozen", caplog)
    half = base_model("llama")
    for layer in half.model.layers:
        layer.self_attn.v_proj.__class__ = FP8TrainingLinear
    assert_left_alone(half, "different quantization formats", caplog)
    mixed = base_model("llama")
    for layer in mixed.model.layers:
        layer.input_layernorm.bfloat16()
        layer.post_attention_layernorm.bfloat16()
    report = fuse(mixed)
    assert dict(report.reasons) == {"weights and norms have different dtypes": LAYERS}


# Training ---------------------------------------------------------------------------------------------------------


def test_fused_fp8_full_finetuning_matches_unfused(tmp_path: Path) -> None:
    toy.write_llama(tmp_path / "model")
    toy.write_jsonl(tmp_path / "data.jsonl", toy.arithmetic(400))
    base = {
        "model": {"path": str(tmp_path / "model"), "precision": "fp8"},
        "data": {"path": str(tmp_path / "data.jsonl"), "seq_len": 64, "cache_dir": str(tmp_path / "cache")},
        "method": {"kind": "full"},
        "train": {"global_batch_size": 8, "max_steps": 30, "learning_rate": 3e-3},
    }
    losses = {}
    for switch in ("on", "off"):
        config = TrainConfig.model_validate(merged(base, {"train": {"fused": switch}}))
        plan = make_plan(config, precision="bf16").model_copy(update={"fp8_matmuls": True, "fused": switch == "on"})
        events = train_here(make_run(tmp_path / switch, config, plan))
        assert not any("not fused" in str(message) for message in values(events, "notice", "message"))
        losses[switch] = values(events, "train.step", "loss")
    assert losses["on"] != losses["off"]
    assert losses["off"][-1] < 0.8 * losses["off"][0]
    assert losses["on"][-1] == pytest.approx(losses["off"][-1], rel=0.01)


@pytest.mark.parametrize("fp8", [False, True], ids=["plain", "fp8"])
@pytest.mark.parametrize("name", ["self_attn.k_proj", "mlp.down_proj"])
def test_changing_weights_before_backward_raises(name: str, fp8: bool) -> None:
    ours, _ = pair(fp8=fp8)
    loss = ours(input_ids=IDS, labels=IDS, use_cache=False).loss
    with torch.no_grad():
        ours.model.layers[0].get_submodule(name).weight.mul_(3)
    with pytest.raises(RuntimeError, match="modified between forward and backward"):
        loss.backward()
