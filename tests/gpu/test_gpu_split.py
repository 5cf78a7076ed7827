"""One process, several devices: a model split over host and GPU, and copies that share a batch, equal one device."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from pantheraml.parallel.split import DataParallelLoss, place, split

LAYERS = 4


def llama(*, tied: bool = False) -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, num_hidden_layers=LAYERS, tie_word_embeddings=tied, initializer_range=0.1)
    return LlamaForCausalLM(config)


def adapted() -> Any:
    model = get_peft_model(llama(), LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    return model.train()


def custom_map(prefix: str, *, tied: bool) -> dict[str, Any]:
    """The first half on the host, the second on the GPU."""
    layers = {f"{prefix}model.layers.{i}": "cpu" if i < LAYERS // 2 else "cuda:0" for i in range(LAYERS)}
    ends = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": 0, "lm_head": "cpu" if tied else 0}
    return {**layers, **{prefix + name: device for name, device in ends.items()}}


def step(model: Any, rows: Tensor) -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
    """Loss, gradients and weights of one optimizer step, on the host."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    loss = model(input_ids=rows, labels=rows).loss
    loss.backward()
    grads = {n: p.grad.cpu().clone() for n, p in model.named_parameters() if p.grad is not None}
    optimizer.step()
    return loss.item(), grads, {n: p.detach().cpu() for n, p in model.named_parameters()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name] - tensor).norm() <= 5e-5 * tensor.norm() + 1e-9, name


@pytest.mark.parametrize("kind", ["full", "tied", "lora"])
def test_a_model_split_over_host_and_gpu_trains_as_on_one_device(kind: str) -> None:
    model = adapted() if kind == "lora" else llama(tied=kind == "tied").train()
    one = copy.deepcopy(model)
    rows = torch.randint(1, 320, (3, 17))
    custom = custom_map("base_model.model." if kind == "lora" else "", tied=kind == "tied")
    placement = place(model, custom, {0: torch.cuda.mem_get_info(0)[0]})
    parts = split(model, placement)
    assert {p.device.type for p in parts.parameters()} == {"cpu", "cuda"}, "nothing is offloaded, nothing on meta"
    loss, grads, weights = step(parts, rows)
    expected_loss, expected_grads, expected_weights = step(one, rows)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert_same(grads, expected_grads)
    assert_same(weights, expected_weights)


@pytest.mark.parametrize("strategy", ["auto", "balanced", "sequential"])
def test_a_strategy_over_one_gpu_puts_the_model_there(strategy: str) -> None:
    model = llama()
    model = split(model, place(model, strategy, {0: torch.cuda.mem_get_info(0)[0]}))
    assert {p.device for p in model.parameters()} == {torch.device("cuda", 0)}


class SummedLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = llama()

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        logits = self.model(input_ids=ids, use_cache=False).logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


@pytest.mark.parametrize("device_ids", [[0], [0, 0]])
def test_copies_that_share_uneven_rows_count_each_token_once(device_ids: list[int]) -> None:
    loss = SummedLoss().cuda()
    ids = torch.randint(1, 320, (3, 17), device="cuda")
    targets = ids.roll(-1, dims=1)
    targets[0, 2:] = -100  # so that copies hold different numbers of targets too
    expected = loss(ids, targets)
    expected_grads = torch.autograd.grad(expected, list(loss.parameters()))
    found = DataParallelLoss(loss, device_ids)(ids, targets)
    found.backward()
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    for (name, parameter), grad in zip(loss.named_parameters(), expected_grads, strict=True):
        assert parameter.grad is not None
        assert (parameter.grad - grad).norm() <= 5e-5 * grad.norm() + 1e-9, name
