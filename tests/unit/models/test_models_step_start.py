"""Host work before the GPU gets its first kernel of a step: counted, not timed."""

from __future__ import annotations

import copy
import cProfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import LoraConfig
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from pantheraml.kernels.lora_columns import AdapterTable
from pantheraml.models.attention import documents_from_padding
from pantheraml.models.causal_lm import _Targets
from pantheraml.models.fast import fuse

ROWS, WIDTH, HEAD = 3, 10, 8
IDS = torch.randint(0, 250, (ROWS, WIDTH), generator=torch.Generator().manual_seed(0))


def adapted(folder: Path) -> Any:
    base = AutoModelForCausalLM.from_pretrained(folder)
    config = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    return peft.get_peft_model(base, config).train()


def fused(model: Any) -> Any:
    twin = copy.deepcopy(model)
    assert fuse(twin).fused == len(twin.get_base_model().model.layers)
    return twin


def logits(model: Any) -> Tensor:
    out: Tensor = model(input_ids=IDS, use_cache=False).logits.detach()
    return out


def query(model: Any) -> Any:
    return model.get_base_model().model.layers[1].self_attn.q_proj


class Operations(TorchDispatchMode):
    """Records the names of all dispatched operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def calls_of_refresh(model: Any) -> int:
    shared = model.get_base_model().model.layers[0].fused_parts.shared
    shared.refresh()
    profile = cProfile.Profile()
    profile.runcall(shared.refresh)
    return sum(entry.callcount for entry in profile.getstats())


def test_more_adapters_make_no_more_calls(tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU writes all of them in one launch, and must not wait for hundreds of host checks."""
    small, large = (fused(adapted(tiny_model("llama", num_hidden_layers=layers))) for layers in (1, 4))
    written: list[int] = []
    monkeypatch.setattr(AdapterTable, "write", lambda table: written.append(len(table.adapters)))
    assert calls_of_refresh(small) == calls_of_refresh(large)
    assert written == [7, 7, 28, 28]


def _scale(model: Any) -> None:
    query(model).scaling["default"] *= 3


def _replace_a_weight(model: Any) -> None:
    matrix = query(model).lora_A["default"]
    matrix.weight = nn.Parameter(matrix.weight.detach() * 2)


def _move_values(model: Any) -> None:
    weight = query(model).lora_B["default"].weight
    weight.data = weight.data * 2


def _replace_a_matrix(model: Any) -> None:
    layer = query(model)
    matrix = nn.Linear(4, layer.out_features, bias=False)
    matrix.weight.data.copy_(layer.lora_B["default"].weight * 2)
    layer.lora_B["default"] = matrix


def _replace_all_matrices(model: Any) -> None:
    layer = query(model)
    layer.lora_A = copy.deepcopy(layer.lora_A)
    layer.lora_A["default"].weight.data *= 2


def _disable_one(model: Any) -> None:
    query(model).enable_adapters(False)


def _merge_one(model: Any) -> None:
    query(model).merge()
    for matrices in (query(model).lora_A, query(model).lora_B):
        matrices["default"].weight.data *= 2  # a merged layer does not read them


def _no_active_one(model: Any) -> None:
    query(model)._active_adapter = []


def _change_the_list_of_active_ones(model: Any) -> None:
    for layer in model.get_base_model().model.layers:
        layer.self_attn.q_proj.set_adapter(["default"])
    logits(model)
    query(model)._active_adapter.clear()


@pytest.mark.parametrize(
    "change",
    [
        _scale,
        _replace_a_weight,
        _move_values,
        _replace_a_matrix,
        _replace_all_matrices,
        _disable_one,
        _merge_one,
        _no_active_one,
        _change_the_list_of_active_ones,
    ],
)
def test_every_change_of_an_adapter_is_seen(tiny_model: Any, change: Callable[[Any], None]) -> None:
    plain = adapted(tiny_model("llama"))
    ours = fused(plain)
    before = logits(ours)
    for model in (ours, plain):
        change(model)
    actual, expected = logits(ours), logits(plain)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    unseen = change is _merge_one
    assert bool((actual - before).abs().max() > 0.02) is not unseen


def test_a_replaced_parameter_gets_the_gradient(tiny_model: Any) -> None:
    """Even if both share memory."""
    model = fused(adapted(tiny_model("llama")))
    logits(model)
    matrix = query(model).lora_A["default"]
    before, matrix.weight = matrix.weight, nn.Parameter(matrix.weight.data)
    model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    assert before.grad is None
    assert matrix.weight.grad is not None


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_rope_table_is_built_once_for_all_layers(tiny_model: Any, family: str) -> None:
    model = fused(adapted(tiny_model(family, num_hidden_layers=4)))
    saved: list[Tensor] = []

    def save(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        model(input_ids=IDS, use_cache=False)
    angles = torch.arange(WIDTH)[:, None] / 10_000 ** (torch.arange(0, HEAD, 2) / HEAD)
    for wave in (angles.cos(), angles.sin()):
        expected = torch.cat([wave, wave], dim=1).repeat(ROWS, 1)
        same = [
            t
            for t in saved
            if t.numel() == expected.numel() and torch.allclose(t.view_as(expected), expected, atol=1e-5)
        ]
        assert len(same) >= 4
        assert len({tensor.untyped_storage().data_ptr() for tensor in same}) == 1


def test_rope_table_is_rebuilt_for_other_positions(tiny_model: Any) -> None:
    """Even if they are in the same tensors, as when batches are copied into static buffers."""
    plain = adapted(tiny_model("llama"))
    ours = fused(plain)
    rotary = {model: model.get_base_model().model.rotary_emb for model in (ours, plain)}
    for model, embedding in rotary.items():
        cos, sin = (torch.zeros(1, WIDTH, HEAD) for _ in range(2))
        made = embedding.forward

        def in_place(*arguments: Any, cos: Tensor = cos, sin: Tensor = sin, made: Any = made, **named: Any) -> Any:
            for here, there in zip((cos, sin), made(*arguments, **named), strict=True):
                here.copy_(there)
            return cos, sin

        embedding.forward = in_place
        model.eval()
    for stride in (1, 2):
        # with a mask, or transformers would treat each position as a document
        inputs = {"position_ids": (stride * torch.arange(WIDTH))[None], "attention_mask": torch.ones_like(IDS)}
        with torch.no_grad():
            actual, expected = (m(input_ids=IDS, use_cache=False, **inputs).logits for m in (ours, plain))
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_before_the_body_labels_are_copied_and_nothing_is_computed() -> None:
    labels = IDS.clone()
    labels[:, 1:4] = -100
    labels[1, 4:7] = -100
    with Operations() as operations:
        targets = _Targets({"labels": labels})
    assert set(operations.names) <= {"detach", "_to_copy", "clone"}
    shifted = torch.cat([labels[:, 1:], torch.full((ROWS, 1), -100)], dim=1)
    assert torch.equal(targets.labels(), shifted)
    assert targets.count() == int((shifted >= 0).sum()) == 15
    given = _Targets({"labels": labels, "shift_labels": shifted})
    assert given.labels() is shifted
    assert given.count() == 15
    shifted.fill_(-100)
    assert given.count() == 15, "as they were when the body started"


def test_rows_without_padding_only_copy_their_mask() -> None:
    mask = torch.ones(ROWS, WIDTH, dtype=torch.int64)
    with Operations() as operations:
        documents = documents_from_padding(mask)
    assert documents is not None
    assert documents.arguments() == {"max_length_q": WIDTH}
    assert set(operations.names) <= {"_to_copy", "detach"}
