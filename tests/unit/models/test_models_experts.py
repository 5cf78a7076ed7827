"""LoRA on stacked experts as grouped matmuls: the numbers of plain PEFT, without dense copies of the experts."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from pantheraml.models import experts as subject
from pantheraml.models.experts import speed_up_experts
from tests.unit.models.conftest import COMMON
from tests.unit.models.test_models_fast import IDS, assert_same, logits, randomize, relative_error, results

LAYERS = 2
BOTH = ["gate_up_proj", "down_proj"]
ROUTED = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**COMMON, **ROUTED, "head_dim": 8, "decoder_sparse_step": 1, "mlp_only_layers": []},
    "gpt_oss": {**COMMON, **ROUTED, "head_dim": 8, "sliding_window": 4},
    "mixtral": {**COMMON, **ROUTED},
}


def adapted(family: str, targets: list[str], **changes: Any) -> PeftModel:
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**FAMILIES[family], **changes}))
    for name, parameter in base.named_parameters():
        if name.endswith("bias"):
            parameter.data.add_(0.3 * torch.randn_like(parameter))
    config = LoraConfig(
        task_type="CAUSAL_LM", r=3, lora_alpha=5, target_modules=["q_proj", "o_proj"], target_parameters=targets
    )
    model = get_peft_model(base, config)
    randomize(model)
    return model.train()


def grouped(model: nn.Module) -> Any:
    twin = copy.deepcopy(model)
    assert not speed_up_experts(twin)
    return twin


def is_grouped(model: nn.Module) -> bool:
    return any(type(module).__name__ == "GroupedParamWrapper" for module in model.modules())


@pytest.mark.parametrize("targets", [BOTH, BOTH[:1], BOTH[1:]], ids=["both", "first", "second"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients_are_those_of_peft(family: str, targets: list[str]) -> None:
    plain = adapted(family, targets)
    ours = grouped(plain)
    assert is_grouped(ours)
    assert_same(results(ours), results(plain))


def test_a_wrong_adapter_is_seen() -> None:
    plain = adapted("qwen3_moe", BOTH)
    ours = grouped(plain)
    for wrapper in ours.modules():
        if isinstance(wrapper, ParamWrapper):
            wrapper.scaling["default"] *= 1.1
    with pytest.raises(AssertionError):
        assert_same(results(ours), results(plain), 1e-2)


def test_experts_without_tokens() -> None:
    """Three tokens choose two of eight experts each."""
    plain = adapted("qwen3_moe", BOTH, num_experts=8, num_local_experts=8)
    ids = IDS[:1, :3]
    actual, expected = (results(model, input_ids=ids, labels=ids) for model in (grouped(plain), plain))
    assert_same(actual, expected)
    unused = [
        g.view(8, 3, -1).abs().sum((1, 2)).eq(0).sum()
        for name, g in actual.items()
        if "lora_A" in name and len(g) == 24
    ]
    assert len(unused) == 2 * LAYERS
    assert min(unused) >= 2


def test_bf16_experts_with_float32_adapters_are_closer_to_float32_than_peft() -> None:
    exact = adapted("qwen3_moe", BOTH)
    plain = adapted("qwen3_moe", BOTH)
    for name, parameter in plain.named_parameters():
        if "lora_" not in name:
            parameter.data = parameter.data.to(torch.bfloat16)
    ours = logits(grouped(plain)).float()
    expected = logits(exact)
    assert relative_error(ours, expected) < max(0.03, 1.2 * relative_error(logits(plain).float(), expected))


def dense_bytes(model: nn.Module) -> int:
    """Bytes of saved tensors of the size of a stack of experts, without its own storage."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    stack = next(p.numel() for name, p in model.named_parameters() if name.endswith(BOTH[1]))
    storages: dict[int, int] = {}

    def save(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if tensor.numel() >= stack and tensor.ndim == 3 and tensor.shape[0] == 4 and storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    return sum(storages.values())


def test_no_dense_copy_of_the_experts_is_saved() -> None:
    plain = adapted("qwen3_moe", BOTH)
    stacks = [p for name, p in plain.named_parameters() if name.endswith(tuple(BOTH))]
    weights = sum(p.numel() * p.element_size() for p in stacks)
    assert dense_bytes(plain) >= weights
    assert dense_bytes(grouped(plain)) == 0


def test_switches_and_files_are_those_of_peft(tmp_path: Any) -> None:
    plain = adapted("qwen3_moe", BOTH)
    ours = grouped(plain)
    assert list(ours.state_dict()) == list(plain.state_dict())
    with ours.disable_adapter(), plain.disable_adapter():
        off = logits(ours)
        assert relative_error(off, logits(plain)) < 1e-5
    assert relative_error(logits(ours), off) > 1e-3
    expected = logits(plain)
    ours.save_pretrained(str(tmp_path))
    loaded = PeftModel.from_pretrained(copy.deepcopy(plain).unload(), str(tmp_path))
    assert relative_error(logits(loaded), expected) < 1e-5
    assert relative_error(logits(pickle.loads(pickle.dumps(ours))), expected) < 1e-5
    merged = ours.merge_and_unload()
    assert relative_error(logits(merged), expected) < 1e-4


def left_to_peft(model: nn.Module, reason: str) -> None:
    (actual,) = speed_up_experts(model)
    assert reason in actual
    assert not is_grouped(model)


def test_a_changed_class_is_left_to_peft(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """As if a release of transformers had changed what its experts compute."""
    real: Callable[..., Any] = Qwen3MoeExperts.forward
    monkeypatch.setattr(Qwen3MoeExperts, "forward", lambda *args, **kwargs: 1.05 * real(*args, **kwargs))
    with caplog.at_level("INFO", logger="pantheraml"):
        left_to_peft(adapted("qwen3_moe", BOTH), "Qwen3MoeExperts differs by 5%")
    assert "are added to all of their weights: Qwen3MoeExperts differs by 5%" in caplog.text


def test_sizes_that_grouped_matmuls_cannot_read_are_left_to_peft() -> None:
    left_to_peft(adapted("qwen3_moe", BOTH, moe_intermediate_size=15), "are not multiples of 16 bytes")


def test_comparing_changes_nothing() -> None:
    model = adapted("gpt_oss", BOTH)
    state = torch.get_rng_state()
    speed_up_experts(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert subject.speed_up_experts(model) == {}  # a second call finds nothing to do


def test_experts_of_the_oldest_transformers() -> None:
    """Those of 5.17 do not have these attributes."""
    plain = adapted("qwen3_moe", BOTH)
    for module in plain.modules():
        if isinstance(module, Qwen3MoeExperts):
            for name in subject._NEWER:
                vars(module).pop(name, None)
    assert is_grouped(grouped(plain))
