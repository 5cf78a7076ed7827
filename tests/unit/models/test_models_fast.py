"""Fused decoder layers on the torch references: same numbers, adapters and files as the unfused model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partialmethod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from pantheraml.data.batch import collate
from pantheraml.data.documents import TokenSequence, as_ints
from pantheraml.engine.memory.checkpointing import apply_checkpointing
from pantheraml.engine.step.loss import LossModel
from pantheraml.models.adapters import target_layers, trainable_parameters
from pantheraml.models.attention import use_document_attention
from pantheraml.models.fast import fuse
from pantheraml.models.quantize.fp8 import FP8Linear
from pantheraml.models.quantize.quantized_linear import LORA_LAYERS, quantize_linears
from pantheraml.specs.train import Checkpointing
from tests.unit.models.fused_families import FAMILIES, FUSED

LAYERS = 2
CPU = torch.device("cpu")
IDS = torch.randint(4, 256, (3, 17), generator=torch.Generator().manual_seed(0))

EXACT = 1e-5
"""Relative error of a whole tensor in float32, where only the order of sums differs."""


def base_model(family: str, **changes: Any) -> Any:
    """Random weights, with non-zero biases and norm weights that differ."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**FAMILIES[family], **changes}, attn_implementation="sdpa")
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data.add_(0.3 * torch.randn_like(parameter))
    return model


def randomize(model: nn.Module, seed: int = 1, size: float = 0.15) -> None:
    """Give adapters values as after some training: B is not zero."""
    generator = torch.Generator().manual_seed(seed)
    for _, parameter in trainable_parameters(model):
        parameter.data.copy_(size * torch.randn(parameter.shape, generator=generator))


def adapted(base: Any, targets: str | list[str] = "all-linear", size: float = 0.15, **lora: Any) -> PeftModel:
    config = LoraConfig(
        **{"task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 6, **lora}, target_modules=target_layers(base, targets)
    )
    config._register_custom_module(LORA_LAYERS)
    model = get_peft_model(base, config)
    randomize(model, size=size)
    return model.train()


def quantize_to_fp8(base: Any) -> Any:
    quantize_linears(base, "fp8", dtype=torch.float32, device=CPU)
    return base


def fused(model: PeftModel) -> PeftModel:
    """A copy, fused."""
    twin = copy.deepcopy(model)
    report = fuse(twin)
    assert (report.fused, dict(report.reasons)) == (LAYERS, {})
    return twin


def pair(family: str = "llama", **lora: Any) -> tuple[PeftModel, PeftModel]:
    """Return the same model fused and unfused."""
    plain = adapted(base_model(family), **lora)
    return fused(plain), plain


def results(model: nn.Module, **inputs: Any) -> dict[str, Tensor]:
    """Return logits and the gradients of all trainable parameters."""
    model.zero_grad()
    out = model(**{"input_ids": IDS, "labels": IDS, "use_cache": False, **inputs})
    out.loss.backward()
    collected = {"logits": out.logits.detach()}
    for name, parameter in trainable_parameters(model):
        assert parameter.grad is not None, name
        collected[name] = parameter.grad.clone()
    return collected


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        actual: Tensor = model(input_ids=IDS, use_cache=False).logits
    return actual


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float = EXACT) -> None:
    assert ours.keys() == theirs.keys()
    distances = {name: relative_error(ours[name], expected) for name, expected in theirs.items()}
    worst = max(distances, key=distances.__getitem__)
    assert distances[worst] <= tolerance, f"{worst}: {distances[worst]}"


def runs_fused(model: nn.Module) -> bool:
    """Return whether the next forward is fused: then the attention module is not called."""
    calls: list[int] = []
    attention = next(type(module) for name, module in model.named_modules() if name.endswith("self_attn"))
    with pytest.MonkeyPatch.context() as patch:  # a hook would be seen, and the layers would run unfused
        patch.setattr(attention, "forward", partialmethod(_counted, attention.forward, calls))
        logits(model)
    assert len(calls) in (0, LAYERS)
    return not calls


def _counted(self: Any, forward: Callable[..., Any], calls: list[int], *args: Any, **kwargs: Any) -> Any:
    calls.append(1)
    return forward(self, *args, **kwargs)


# The numbers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FUSED)
def test_unquantized_weights_match(family: str) -> None:
    ours, theirs = pair(family)
    assert runs_fused(ours)
    assert not runs_fused(theirs)
    assert_same(results(ours), results(theirs))


def assert_near(
    ours: dict[str, Tensor], theirs: dict[str, Tensor], *, logits: float, cosine: float, length: float = 0.15
) -> None:
    assert relative_error(ours["logits"], theirs["logits"]) < logits
    assert grad_cosine(ours, theirs) > cosine
    lengths = [float(ours[name].norm() / theirs[name].norm()) for name in theirs]
    assert min(lengths) > 1 - length
    assert max(lengths) < 1 + length


def small_weights(family: str) -> Any:
    """Weights small enough that the model does not amplify the noise of fp8."""
    return base_model(family, initializer_range=0.05)


def assert_near_in_fp8(make: Callable[[], Any], *, noise: float = 1.0, **lora: Any) -> None:
    """Bounds are 1.5 times the largest distance measured over families and adapter shapes, and `noise` times that; and
    fused layers are as close to float32 as unfused ones."""
    exact = results(adapted(make(), size=0.05, **lora))
    plain = adapted(quantize_to_fp8(make()), size=0.05, **lora)
    ours, theirs = results(fused(plain)), results(plain)
    assert_near(ours, theirs, logits=0.06 * noise, cosine=1 - 0.0055 * noise, length=0.15 * noise)
    assert_near(ours, exact, logits=0.1 * noise, cosine=1 - 0.01 * noise, length=0.15 * noise)
    assert relative_error(ours["logits"], exact["logits"]) < 1.2 * relative_error(theirs["logits"], exact["logits"])


NOISE = {"gemma3_text": 3.0, "olmo2": 3.0, "olmo3": 3.0, "exaone4": 4.0}
"""Norms of small outputs of attention and the MLP amplify the noise, of unfused layers as well."""


@pytest.mark.parametrize("family", FUSED)
def test_fp8_weights_are_close_to_unfused_and_float32(family: str) -> None:
    assert_near_in_fp8(lambda: small_weights(family), noise=NOISE.get(family, 1.0))


def grad_cosine(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Cosine similarity of all gradients, concatenated."""
    left, right = (torch.cat([g.flatten() for name, g in of.items() if name != "logits"]) for of in (ours, theirs))
    return float(torch.cosine_similarity(left, right, dim=0))


def test_fp8_weights_with_per_row_scales() -> None:
    """Outputs that differ by a factor of 1000 cannot share a scale, which their gradients then need."""

    def uneven_rows() -> Any:
        base = small_weights("llama")
        with torch.no_grad():
            for name, parameter in base.named_parameters():
                if name.endswith("proj.weight"):
                    parameter[::5] *= 1e-3
        return base

    assert not any(m.shared_scale for m in quantize_to_fp8(uneven_rows()).modules() if isinstance(m, FP8Linear))
    assert_near_in_fp8(uneven_rows)


@pytest.mark.parametrize(
    "lora",
    [
        {"rank_pattern": {"k_proj": 7, r"layers\.1\.mlp\.down_proj": 16}, "alpha_pattern": {"k_proj": 3}},
        {"targets": ["q_proj", "v_proj"]},
        {"targets": ["down_proj"]},
        {"use_rslora": True},
        {"r": 70},
        {"lora_alpha": 4},
    ],
    ids=["ranks", "some", "one", "rslora", "wide", "scaling 1"],
)
@pytest.mark.parametrize("fp8", [False, True], ids=["plain", "fp8"])
def test_adapters_of_every_shape(lora: dict[str, Any], fp8: bool) -> None:
    if fp8:
        assert_near_in_fp8(lambda: small_weights("qwen2"), **lora)
    else:
        ours, theirs = pair("qwen2", **lora)
        assert_same(results(ours), results(theirs))


def test_bf16_weights_with_float32_adapters() -> None:
    exact = adapted(base_model("llama"))
    plain = adapted(base_model("llama").to(torch.bfloat16))
    assert all(parameter.dtype == torch.float32 for _, parameter in trainable_parameters(plain))
    expected = results(exact)
    ours, theirs = results(fused(plain)), results(plain)
    for name in expected:
        assert ours[name].dtype == theirs[name].dtype
        assert relative_error(ours[name].float(), expected[name]) < max(
            0.05, 1.5 * relative_error(theirs[name].float(), expected[name])
        )


def test_gradients_reach_the_inputs() -> None:
    collected = []
    for model in pair("gemma"):
        embeddings = 0.1 * torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(0))
        embeddings.requires_grad_()
        model(inputs_embeds=embeddings, use_cache=False).logits.square().mean().backward()
        assert embeddings.grad is not None
        collected.append(embeddings.grad)
    assert relative_error(*collected) <= EXACT


def test_final_norm_is_fused_and_trainable() -> None:
    plain = adapted(base_model("llama"))
    for model in (plain, twin := fused(plain)):
        norm = model.get_base_model().model.norm
        norm.weight.requires_grad_()
        model(input_ids=IDS, labels=IDS).loss.backward()
    fast = twin.get_base_model().model.norm
    assert type(fast).__name__ == "FusedLlamaRMSNorm"
    torch.testing.assert_close(fast.weight.grad, plain.get_base_model().model.norm.weight.grad, rtol=1e-4, atol=1e-6)


def test_padding_is_masked() -> None:
    mask = torch.ones_like(IDS)
    mask[0, :6] = 0
    mask[2, :11] = 0
    ours, theirs = pair("mistral")
    labels = IDS.masked_fill(mask == 0, -100)
    actual, expected = (results(model, attention_mask=mask, labels=labels) for model in (ours, theirs))
    actual["logits"], expected["logits"] = actual["logits"][mask == 1], expected["logits"][mask == 1]
    assert_same(actual, expected)


@pytest.mark.parametrize("family", FUSED)
def test_packed_documents_with_document_attention(family: str) -> None:
    """The layer passes its window of 4 to this attention; no mask contains it."""
    base = base_model(family)
    assert use_document_attention(base) is None
    plain = adapted(base)
    ids = [as_ints(row[:length].tolist()) for row, length in zip(IDS, (17, 9, 5), strict=True)]
    packs = [
        TokenSequence(ids[0], ids[0], as_ints([6, 11])),
        TokenSequence(np.concatenate(ids[1:]), np.concatenate(ids[1:]), as_ints([9, 5])),
    ]
    batch = collate(packs, pad_id=258, width=24)
    collected = []
    for model in (fused(plain), plain):
        loss = LossModel(model)(
            batch.input_ids, batch.position_ids, batch.targets, batch.boundaries, batch.max_length, batch.target_count
        )
        loss.backward()
        gradients = {name: p.grad for name, p in trainable_parameters(model) if p.grad is not None}
        collected.append({"loss": loss.detach(), **gradients})
    assert_same(collected[0], collected[1])


@pytest.mark.parametrize("mode", ["selective", "full", "offload"])
@pytest.mark.parametrize("fp8", [False, True], ids=["plain", "fp8"])
def test_checkpointing_is_bitwise_equal(mode: Checkpointing, fp8: bool) -> None:
    plain = adapted(quantize_to_fp8(base_model("llama")) if fp8 else base_model("llama"))
    ours = fused(plain)
    expected = results(ours)
    assert apply_checkpointing(ours, mode) == LAYERS
    assert_same(results(ours), expected, tolerance=0)


# Adapters ---------------------------------------------------------------------------------------------------------


def test_the_next_forward_pass_uses_the_adapters_new_values() -> None:
    ours, theirs = pair()
    for model in (ours, theirs):
        trained = [parameter for _, parameter in trainable_parameters(model)]
        optimizer = torch.optim.AdamW(trained, lr=0.02, fused=True)
        for _ in range(2):
            results(model)
            optimizer.step()
    assert_same(results(ours), results(theirs))
    for model in (ours, theirs):
        randomize(model, seed=2)
    assert_same(results(ours), results(theirs))
    for model in (ours, theirs):  # as FSDP or a trainer that flattens parameters does
        for _, parameter in trainable_parameters(model):
            parameter.data = parameter.data.clone() * 1.5
    assert_same(results(ours), results(theirs))


def test_an_adapter_can_be_switched_off_and_on() -> None:
    ours, theirs = pair()
    with ours.disable_adapter(), theirs.disable_adapter():
        off = logits(ours)
        assert relative_error(off, logits(theirs)) <= EXACT
    assert runs_fused(ours)
    assert relative_error(logits(ours), logits(theirs)) <= EXACT
    assert relative_error(logits(ours), off) > 0.1


def test_another_adapter_can_be_used() -> None:
    ours, theirs = pair()
    for model in (ours, theirs):
        model.add_adapter("second", LoraConfig(task_type="CAUSAL_LM", r=3, target_modules=["q_proj", "up_proj"]))
        model.set_adapter("second")
        randomize(model, seed=3)
    assert not runs_fused(ours)
    assert_same(results(ours), results(theirs))
    for model in (ours, theirs):
        model.set_adapter("default")
    assert runs_fused(ours)
    assert_same(results(ours), results(theirs))


def test_rows_of_a_batch_may_use_different_adapters() -> None:
    ours, theirs = (model.eval() for model in pair())
    names = ["default", "__base__", "default"]
    actual, expected = (
        model(input_ids=IDS, use_cache=False, adapter_names=names).logits.detach() for model in (ours, theirs)
    )
    assert relative_error(actual, expected) <= EXACT


def test_adapters_merge_and_unload() -> None:
    ours, theirs = pair()
    before = logits(theirs)
    ours.merge_adapter()
    assert not runs_fused(ours)
    assert relative_error(logits(ours), before) <= EXACT
    ours.unmerge_adapter()
    assert runs_fused(ours)
    assert relative_error(logits(ours), before) <= EXACT
    merged = copy.deepcopy(ours).merge_and_unload()
    assert not any(isinstance(module, LoraLayer) for module in merged.modules())
    assert relative_error(logits(merged), before) <= EXACT


def test_without_its_adapters_it_is_the_base() -> None:
    ours, theirs = pair()
    with theirs.disable_adapter():
        expected = logits(theirs)
    assert relative_error(logits(ours.unload()), expected) <= EXACT


# Other uses of a model ---------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FUSED)
def test_generation_with_a_cache_gives_the_same_tokens(family: str) -> None:
    texts = [
        model.eval().generate(input_ids=IDS, max_new_tokens=12, do_sample=False, use_cache=True, pad_token_id=258)
        for model in pair(family)
    ]
    assert texts[0].shape[1] > IDS.shape[1] + 3
    assert torch.equal(*texts)


def test_eval_mode_and_hidden_states() -> None:
    ours, theirs = (model.eval() for model in pair())
    assert runs_fused(ours)
    with torch.no_grad():
        actual, expected = (m(input_ids=IDS, output_hidden_states=True).hidden_states for m in (ours, theirs))
    assert len(actual) == len(expected) == LAYERS + 1
    assert max(map(relative_error, actual, expected)) <= EXACT


def test_output_attentions() -> None:
    plain = adapted(base_model("llama"))
    plain.get_base_model().set_attn_implementation("eager")
    ours = fused(plain)
    with torch.no_grad():
        actual, expected = (m(input_ids=IDS, use_cache=False, output_attentions=True).attentions for m in (ours, plain))
    assert len(actual) == len(expected) == LAYERS
    assert max(map(relative_error, actual, expected)) <= EXACT


@pytest.mark.parametrize("fp8", [False, True], ids=["plain", "fp8"])
def test_weights_keep_their_names_and_values(fp8: bool) -> None:
    plain = adapted(quantize_to_fp8(base_model("qwen2")) if fp8 else base_model("qwen2"))
    ours = fused(plain)
    actual, expected = ours.state_dict(), plain.state_dict()
    assert list(actual) == list(expected)
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    assert [name for name, _ in ours.named_modules()] == [name for name, _ in plain.named_modules()]
    assert [type(p) for p in ours.parameters()] == [type(p) for p in plain.parameters()]
    assert all(isinstance(layer, type(twin)) for layer, twin in zip(ours.modules(), plain.modules(), strict=True))


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_saved_adapters_are_those_of_peft(family: str, tmp_path: Path) -> None:
    ours, theirs = pair(family)
    for model, name in ((ours, "ours"), (theirs, "theirs")):
        results(model)
        model.save_pretrained(str(tmp_path / name))
    actual, expected = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("ours", "theirs"))
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    assert get_peft_model_state_dict(ours).keys() == expected.keys()
    loaded = PeftModel.from_pretrained(base_model(family), str(tmp_path / "ours"))
    assert relative_error(logits(ours.eval()), logits(loaded.eval())) <= EXACT


# Not fused ----------------------------------------------------------------------------------------------
