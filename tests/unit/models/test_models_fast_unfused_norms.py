"""Norms of layers that are not fused: the class's numbers, in one kernel, whatever the class is called."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from pantheraml.models.fast import fuse
from pantheraml.models.fast.norms import FusedNorm, fuse_norms
from pantheraml.models.tiny_model import tiny_model
from tests.unit.models.test_models_fast import EXACT, adapted, assert_same, base_model, results

FAMILIES = {
    "gemma4_text": True,
    "qwen3_moe": True,
    "gpt_oss": True,
    "hunyuan_v1_dense": True,
    "glm4": True,
    "qwen3_5_text": True,
    "seed_oss": True,
    "cohere2": False,
}
"""Families whose layers are not fused, and whether they have norms to fuse."""


@pytest.mark.parametrize("family", FAMILIES)
def test_numbers_are_those_of_plain_norms(family: str) -> None:
    torch.manual_seed(0)
    plain: Any = adapted(tiny_model(AutoConfig.for_model(family)), targets=["q_proj", "o_proj"], size=0.05).eval()
    ours = copy.deepcopy(plain)
    report = fuse(ours)
    assert report.fused == 0
    assert (report.norms > 0) == FAMILIES[family]
    assert sum(isinstance(module, FusedNorm) for module in ours.modules()) == report.norms
    ids = torch.arange(24).view(2, 12)
    assert_same(*(results(model, input_ids=ids, labels=ids) for model in (ours, plain)), 5 * EXACT)
    assert list(ours.state_dict()) == list(plain.state_dict())
    assert len(pickle.dumps(ours)) > 0


class ScaledRMSNorm(LlamaRMSNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return 0.99 * super().forward(hidden_states)


class GatedRMSNorm(LlamaRMSNorm):
    def forward(self, hidden_states: Tensor, gate: Tensor) -> Tensor:
        return super().forward(hidden_states) * gate


class OnePlusRMSNorm(LlamaRMSNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        x = hidden_states.float()
        normal = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (normal * (1 + self.weight.float())).to(hidden_states.dtype)


class BrokenRMSNorm(LlamaRMSNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        raise TypeError("takes tokens")


@pytest.mark.parametrize(
    ("kind", "plus_one"),
    [(LlamaRMSNorm, False), (OnePlusRMSNorm, True), (ScaledRMSNorm, None), (GatedRMSNorm, None), (BrokenRMSNorm, None)],
)
def test_what_a_class_computes_decides(kind: type[nn.Module], plus_one: bool | None) -> None:
    norm: Any = kind(16)
    assert fuse_norms([norm]) == (plus_one is not None)
    assert getattr(norm, "fused_plus_one", None) is plus_one


def test_a_trainable_norm_gets_its_gradient() -> None:
    plain = LlamaRMSNorm(16)
    ours = copy.deepcopy(plain)
    fuse_norms([ours])
    x = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(0))
    for norm in (plain, ours):
        norm(x).square().sum().backward()
    torch.testing.assert_close(ours.weight.grad, plain.weight.grad)


def test_less_is_saved_for_backward() -> None:
    plain = LlamaRMSNorm(64).requires_grad_(False).to(torch.bfloat16)
    ours = copy.deepcopy(plain)
    fuse_norms([ours])
    x = torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)
    saved = []
    for norm in (plain, ours):
        storages: dict[int, int] = {}

        def save(tensor: Tensor, storages: dict[int, int] = storages) -> Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
            kept = norm(x)
        saved.append(sum(storages.values()))
        del kept
    rows, inverse, weight = 32 * 64 * 2, 32 * 4, 64 * 2
    assert saved[1] == rows + inverse
    assert saved[0] >= 2 * rows + inverse + weight


def test_a_fused_model_has_no_others() -> None:
    assert fuse(adapted(base_model("llama"))).norms == 0


def test_compiled_layers_keep_the_plain_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    norm: Any = LlamaRMSNorm(16)
    fuse_norms([norm])
    calls: list[int] = []
    monkeypatch.setattr(LlamaRMSNorm, "forward", lambda self, x: calls.append(1) or x)
    norm(torch.ones(2, 16))
    assert not calls
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    norm(torch.ones(2, 16))
    assert calls == [1]


def test_unknown_models_of_other_code_are_left_alone() -> None:
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("gpt2", n_embd=32, n_layer=2, n_head=4, vocab_size=99)
    )
    report = fuse(model)
    assert report.norms == 0
