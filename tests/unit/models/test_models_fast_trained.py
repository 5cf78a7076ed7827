"""Fused decoder layers whose weights are trained: every parameter's gradient is that of the layers as they were."""

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

from pantheraml.engine.checkpointing import apply_checkpointing
from pantheraml.kernels.gated_activation import gated_activation_backward
from pantheraml.models.fast import functions, fuse, second_layouts
from pantheraml.models.fast.trained import TrainedGroup
from pantheraml.models.quantise.trained_fp8 import TrainedFP8Linear, use_fp8_products
from pantheraml.specs.train import Checkpointing, TrainConfig
from tests import toy
from tests.harness import make_plan, make_run, merged, train_here, values
from tests.unit.models.test_models_fast import (
    IDS,
    LAYERS,
    apart,
    assert_left_alone,
    assert_same,
    base_model,
    logits,
    results,
    runs_fused,
)

FAMILIES = ["llama", "mistral", "qwen3", "gemma", "phi3"]
OTHER_IDS = IDS.flip(0)


def fused(model: Any) -> Any:
    """A copy, fused."""
    twin = copy.deepcopy(model)
    report = fuse(twin)
    assert (report.fused, dict(report.reasons)) == (LAYERS, {})
    return twin


def pair(family: str = "llama", *, fp8: bool = False, **changes: Any) -> tuple[Any, Any]:
    """The same model fused and as it is."""
    plain = base_model(family, **changes).train()
    if fp8:
        assert use_fp8_products(plain)
    return fused(plain), plain


def powers(*shape: int) -> Tensor:
    """Signed powers of two, which e4m3 holds exactly beside each other."""
    return torch.exp2(torch.randint(-1, 3, shape)) * (torch.randint(0, 2, shape) * 2 - 1)


def cosines(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> dict[str, float]:
    assert ours.keys() == theirs.keys()
    return {name: float(torch.cosine_similarity(ours[name].flatten(), theirs[name].flatten(), dim=0)) for name in ours}


# The numbers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_products_give_the_same_numbers(family: str) -> None:
    ours, theirs = pair(family)
    assert runs_fused(ours)
    assert not runs_fused(theirs)
    found = results(ours)
    assert {name for name, _ in ours.named_parameters()} < found.keys()
    assert_same(found, results(theirs))


@pytest.mark.parametrize("family", FAMILIES)
def test_fp8_products_are_near_those_of_single_layers(family: str) -> None:
    """The smallest cosine measured is 0.9990. With both, gradients of norms are up to 0.982 from those of float32."""
    ours, theirs = pair(family, fp8=True, initializer_range=0.05)
    _, exact = pair(family, initializer_range=0.05)
    found, wanted, best = results(ours), results(theirs), results(exact)
    assert min(cosines(found, wanted).values()) > 0.998
    for name, gradient in wanted.items():
        assert 0.97 < found[name].norm() / gradient.norm() < 1.03, name
        assert apart(found[name], best[name]) < 1.1 * apart(gradient, best[name]) + 0.02, name


@pytest.mark.parametrize("fp8", [False, True], ids=["plain", "fp8"])
@pytest.mark.parametrize("heights", [(48,), (32, 16, 64)])
def test_every_number_is_in_its_place(heights: tuple[int, ...], fp8: bool) -> None:
    """On numbers that fp8 holds exactly; a number of rows that is no multiple of 16."""
    torch.manual_seed(0)
    layers = [nn.Linear(80, height, bias=False) for height in heights]
    for layer in layers:
        layer.weight.data.copy_(powers(*layer.weight.shape) * 2.0**-9)
        if fp8:
            layer.__class__ = TrainedFP8Linear
    whole = torch.cat([layer.weight.detach() for layer in layers])
    group = TrainedGroup(layers)
    x, g = powers(37, 80) * 2.0**5, powers(37, sum(heights)) * torch.exp2(torch.arange(37) % 5 - 20.0)[:, None]
    rows, gradient = group.operand(x), group.gradient_operand(g)
    assert (rows.payload.dtype == torch.float8_e4m3fn) == fp8
    with torch.no_grad():
        out, middle = group.forward(rows)
        d_input, gradients = group.backward(gradient, rows, middle)
        none, alone = group.backward(gradient, rows, middle, wants_input=False)
    assert none is None
    for found, wanted in ((out, x @ whole.T), (d_input, g @ whole), (torch.cat(gradients), g.T @ x)):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6 * float(wanted.abs().max()))
    assert [found.shape for found in gradients] == [layer.weight.shape for layer in layers]
    assert all(map(torch.equal, gradients, alone))


def test_a_layer_that_is_large_beside_another_leaves_that_its_numbers() -> None:
    """They have one scale; e4m3 keeps all its bits down to a 2**15th of the largest number."""
    torch.manual_seed(0)
    layers = [nn.Linear(64, 32, bias=False) for _ in range(2)]
    layers[0].weight.data *= 2.0**8
    for layer in layers:
        layer.__class__ = TrainedFP8Linear
    x = torch.randn(40, 64)
    group = TrainedGroup(layers)
    with torch.no_grad():
        out, _ = group.forward(group.operand(x))
        assert apart(out[:, 32:], layers[1](x)) < 0.05


@pytest.mark.parametrize("fp8", [False, True], ids=["plain", "fp8"])
def test_weights_of_norms_that_are_nought_learn(fp8: bool) -> None:
    """Rows in fp8 have nothing left there."""
    ours, theirs = pair(fp8=fp8, initializer_range=0.05)
    for model in (ours, theirs):
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.data[::3] = 0
    found, wanted = results(ours), results(theirs)
    for name, gradient in wanted.items():
        if "norm" in name:
            assert gradient[::3].norm() > 0
            assert apart(found[name][::3], gradient[::3]) < (0.05 if fp8 else 1e-5), name


@pytest.mark.parametrize("fp8", [False, True], ids=["plain", "fp8"])
def test_bf16_weights(fp8: bool) -> None:
    plain = base_model("llama", initializer_range=0.05)
    exact = results(plain)
    half = copy.deepcopy(plain).to(torch.bfloat16)
    if fp8:
        use_fp8_products(half)
    found, theirs = results(fused(half)), results(half)
    for name, wanted in exact.items():
        assert found[name].dtype == torch.bfloat16
        assert apart(found[name].float(), wanted) < 0.02 + 1.1 * apart(theirs[name].float(), wanted), name


def test_under_autocast_it_computes_in_the_dtype_of_its_weights() -> None:
    ours, _ = pair()
    wanted = results(ours)
    with torch.autocast("cpu", torch.bfloat16):
        found = results(ours)
    names = [name for name in wanted if "layers" in name]
    assert all(found[name].dtype == torch.float32 for name in names)
    assert max(apart(found[name], wanted[name]) for name in names) < 0.05


@pytest.mark.parametrize("mode", ["selective", "full", "offload"])
@pytest.mark.parametrize("fp8", [False, True], ids=["plain", "fp8"])
def test_checkpointing_changes_no_number(mode: Checkpointing, fp8: bool) -> None:
    ours, _ = pair(fp8=fp8)
    wanted = results(ours)
    assert apply_checkpointing(ours, mode) == LAYERS
    assert_same(results(ours), wanted, tolerance=0)


@pytest.mark.parametrize("mode", ["none", "full", "offload"])
@pytest.mark.parametrize("fp8", [False, True], ids=["plain", "fp8"])
def test_gradients_are_written_over_what_was_computed_for_them_alone(
    mode: Checkpointing, fp8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And over nothing that a second way back would read."""
    ours, _ = pair(fp8=fp8)
    wanted = results(ours)
    apply_checkpointing(ours, mode)
    places = []

    def spied(g: Tensor, both: Tensor, **options: Any) -> Any:
        hidden, gradient = gated_activation_backward(g, both, **options)
        places.append((hidden.payload is g, gradient.payload is both))
        return hidden, gradient

    monkeypatch.setattr(functions, "gated_activation_backward", spied)
    ours.zero_grad()
    loss = ours(input_ids=IDS, labels=IDS, use_cache=False).loss
    for passes in (1, 2):
        loss.backward(retain_graph=passes == 1)
        gradients = {name: parameter.grad / passes for name, parameter in ours.named_parameters()}
        assert_same(gradients, {name: wanted[name] for name in gradients})
    here = mode in ("full", "offload") and not fp8
    assert places == [(here, here)] * 2 * LAYERS


class KeptByOthers:
    """Layers whose saved tensors go to hooks of somebody else, from before their forward to after it."""

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


def test_nothing_is_written_over_that_somebody_else_keeps() -> None:
    """Hooks inside a layer take what checkpointing would have computed again."""
    ours, _ = pair()
    wanted = results(ours)
    apply_checkpointing(ours, "full")
    KeptByOthers(ours)
    ours.zero_grad()
    loss = ours(input_ids=IDS, labels=IDS, use_cache=False).loss
    loss.backward(retain_graph=True)
    loss.backward()
    gradients = {name: parameter.grad / 2 for name, parameter in ours.named_parameters()}
    assert_same(gradients, {name: wanted[name] for name in gradients})


def test_threads_may_go_back_through_the_same_layers() -> None:
    ours, _ = pair()
    wanted = results(ours)
    apply_checkpointing(ours, "full")
    loss = ours(input_ids=IDS, labels=IDS, use_cache=False).loss
    names, weights = zip(*ours.named_parameters(), strict=True)
    with ThreadPoolExecutor(4) as pool:
        ways = [pool.submit(torch.autograd.grad, loss, weights, retain_graph=True) for _ in range(4)]
        for way in ways:
            assert_same(dict(zip(names, way.result(), strict=True)), {name: wanted[name] for name in names})


@pytest.mark.parametrize("mode", ["none", "selective", "full", "offload"])
def test_several_passes_before_the_first_way_back(mode: Checkpointing) -> None:
    """As where a preferred answer and another are compared. Layers computed again find what their own pass had."""
    found = []
    for model in pair():
        apply_checkpointing(model, mode)
        loss = sum(model(input_ids=ids, labels=ids, use_cache=False).loss for ids in (IDS, OTHER_IDS, IDS))
        loss.backward()
        found.append({name: parameter.grad for name, parameter in model.named_parameters()})
    assert_same(*found)


def test_positions_of_past_passes_are_not_kept() -> None:
    ours, _ = pair()
    for ids in (IDS, OTHER_IDS):
        ours(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    gc.collect()
    assert not len(ours.model.layers[0].fused_parts.turns._known)


def test_gradients_of_several_batches_and_of_several_passes_back_add_up() -> None:
    found = []
    for model in pair():
        model.zero_grad()
        first, second = (model(input_ids=ids, labels=ids, use_cache=False).loss for ids in (IDS, OTHER_IDS))
        first.backward(retain_graph=True)
        first.backward()
        second.backward()
        found.append({name: parameter.grad for name, parameter in model.named_parameters()})
    assert_same(*found)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_head_that_is_the_embedding(family: str) -> None:
    ours, theirs = pair(family, tie_word_embeddings=True)
    assert ours.lm_head.weight is ours.model.embed_tokens.weight
    assert_same(results(ours), results(theirs))


def test_frozen_embeddings_and_gradients_of_inputs() -> None:
    ours, theirs = pair()
    for model in (ours, theirs):
        model.model.embed_tokens.requires_grad_(False)
    assert_same(results(ours), results(theirs))
    found = []
    for model in (ours, theirs):
        embeddings = 0.1 * torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(0))
        embeddings.requires_grad_()
        model(inputs_embeds=embeddings, use_cache=False).logits.square().mean().backward()
        found.append(embeddings.grad)
    assert apart(*found) <= 1e-5


# Weights are read where they are ----------------------------------------------------------------------------------


def test_the_next_pass_uses_the_new_weights_wherever_they_are() -> None:
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
    for model in (ours, theirs):  # each begins a chain of its own: nothing is shared with the copy
        twin = copy.deepcopy(model)
        twin.model.layers[0].mlp.up_proj.weight.data.zero_()
        assert apart(logits(twin), logits(model)) > 0.01
    assert_same(results(copy.deepcopy(ours)), results(theirs))


def test_weights_that_are_frozen_later_get_no_gradient() -> None:
    ours, theirs = pair()
    for model in (ours, theirs):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("k_proj" not in name and "layers.1.input_layernorm" not in name)
    assert_same(results(ours), results(theirs))
    assert ours.model.layers[1].input_layernorm.weight.grad is None


def test_in_another_dtype_layers_run_as_they_were() -> None:
    ours, theirs = (model.bfloat16() for model in pair())
    assert not runs_fused(ours)
    assert torch.equal(logits(ours), logits(theirs))
    assert runs_fused(ours.float())


def test_on_another_device_layers_run_as_they_were() -> None:
    """There other rules may hold for what is fused."""
    ours, theirs = pair()
    for layer in ours.model.layers:
        layer.fused_parts.device = torch.device("meta")
    assert not runs_fused(ours)
    assert torch.equal(logits(ours), logits(theirs))


@pytest.mark.parametrize("fp8", [False, True], ids=["plain", "fp8"])
def test_names_values_and_files_stay(fp8: bool, tmp_path: Path) -> None:
    ours, theirs = pair(fp8=fp8)
    found, wanted = ours.state_dict(), theirs.state_dict()
    assert list(found) == list(wanted)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert second_layouts(ours) == []
    places = [parameter.data_ptr() for parameter in ours.parameters()]
    results(ours)
    assert places == [parameter.data_ptr() for parameter in ours.parameters()]
    ours.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa")
    assert all(torch.equal(again.state_dict()[name], wanted[name]) for name in wanted)
    ours.load_state_dict({name: 2 * value for name, value in wanted.items()})
    theirs.load_state_dict({name: 2 * value for name, value in wanted.items()})
    assert apart(logits(ours), logits(theirs)) < (0.3 if fp8 else 1e-5)


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
    assert apart(logits(ours.eval()), logits(theirs.eval())) <= 1e-5
    loss.backward()
    wanted = results(theirs.train())
    assert_same({"logits": wanted["logits"], **{n: p.grad for n, p in ours.named_parameters()}}, wanted)


# What stays as it is ----------------------------------------------------------------------------------------------


def test_what_is_not_fused(caplog: pytest.LogCaptureFixture) -> None:
    assert_left_alone(base_model("qwen2"), "it has a bias", caplog)
    assert_left_alone(base_model("llama", intermediate_size=40), "multiple of 16", caplog)
    assert_left_alone(base_model("llama").requires_grad_(False), "it has no adapter", caplog, trains=False)
    for part in ("k_proj", "mlp", "input_layernorm"):
        model = base_model("llama")
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(part not in name)
        assert_left_alone(model, "some of its weights are trained, and others are not", caplog)
    half = base_model("llama")
    for layer in half.model.layers:
        layer.self_attn.v_proj.__class__ = TrainedFP8Linear
    assert_left_alone(half, "packed in different ways", caplog)
    mixed = base_model("llama")
    for layer in mixed.model.layers:
        layer.input_layernorm.bfloat16()
        layer.post_attention_layernorm.bfloat16()
    report = fuse(mixed)
    assert dict(report.reasons) == {"weights and norms have different dtypes": LAYERS}


# Training ---------------------------------------------------------------------------------------------------------


def test_a_full_fine_tune_in_fp8_learns_what_it_learns_unfused(tmp_path: Path) -> None:
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
        plan = make_plan(config, precision="bf16").model_copy(update={"fp8_products": True, "fused": switch == "on"})
        events = train_here(make_run(tmp_path / switch, config, plan))
        assert not any("not fused" in str(message) for message in values(events, "notice", "message"))
        losses[switch] = values(events, "train.step", "loss")
    assert losses["on"] != losses["off"]
    assert losses["off"][-1] < 0.8 * losses["off"][0]
    assert losses["on"][-1] == pytest.approx(losses["off"][-1], rel=0.01)


@pytest.mark.parametrize("fp8", [False, True], ids=["plain", "fp8"])
@pytest.mark.parametrize("name", ["self_attn.k_proj", "mlp.down_proj"])
def test_weights_that_change_before_the_backward_pass(name: str, fp8: bool) -> None:
    ours, _ = pair(fp8=fp8)
    loss = ours(input_ids=IDS, labels=IDS, use_cache=False).loss
    with torch.no_grad():
        ours.model.layers[0].get_submodule(name).weight.mul_(3)
    with pytest.raises(RuntimeError, match="changed between the forward pass and its backward pass"):
        loss.backward()
