"""LoRA over fp8 weights with fused layers on a GPU: the host never waits, and a written weight is read both ways."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import LlamaConfig, LlamaForCausalLM

from pantheraml.models.adapters import apply_method, trainable_parameters
from pantheraml.models.attention import use_document_attention
from pantheraml.models.document_layout import DocumentLayout
from pantheraml.models.families import head_loss
from pantheraml.models.fast import fuse, quantize_head_like_layers
from pantheraml.models.quantize.quantized_linear import quantize_linears
from pantheraml.specs.train import MethodConfig
from tests.gpu.waiting import no_waiting

GPU = torch.device("cuda")
WIDTH, INNER, LAYERS, BATCH, LENGTH, VOCABULARY = 1024, 2816, 3, 2, 512, 4096

pytestmark = pytest.mark.filterwarnings("ignore:Synchronization debug mode")


@pytest.fixture(autouse=True)
def _needs_fp8() -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("row-wise fp8 matmuls need compute capability 9.0")


def llama(rank: int = 16) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=WIDTH, intermediate_size=INNER, num_hidden_layers=LAYERS, num_attention_heads=16,
        num_key_value_heads=4, vocab_size=VOCABULARY, use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(GPU, torch.bfloat16).requires_grad_(False)
    quantize_linears(model, "fp8", dtype=torch.bfloat16, device=GPU)
    adapted: Any = apply_method(model, MethodConfig(rank=rank), seed=1)
    with torch.no_grad():
        for number, (_, parameter) in enumerate(trainable_parameters(adapted)):
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
            parameter.add_(0.003 * noise.to(parameter))
    assert fuse(adapted).fused == LAYERS
    assert quantize_head_like_layers(adapted.get_base_model(), fused=True)
    return adapted.train()


def tokens(seed: int) -> Tensor:
    return torch.randint(VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(seed)).to(GPU)


def results(model: Any) -> list[Tensor]:
    """Return hidden states, loss and all gradients. Attention's own backward would be nondeterministic."""
    model.zero_grad()
    base = model.get_base_model()
    with sdpa_kernel(SDPBackend.MATH):
        hidden = base.model(input_ids=tokens(1)).last_hidden_state
        loss = head_loss(base.lm_head, hidden, tokens(2), BATCH * LENGTH)
        loss.backward()
    return [hidden.detach(), loss.detach(), *(p.grad for _, p in trainable_parameters(model) if p.grad is not None)]


@pytest.mark.parametrize("rank", [16, 5, 72])
def test_written_weight_is_read_forward_and_backward(rank: int) -> None:
    model = llama(rank)
    before = results(model)
    assert len(before) == 2 + 2 * 7 * LAYERS
    assert all(map(torch.equal, results(model), before)), "deterministic"
    weight = model.get_base_model().model.layers[1].mlp.up_proj.base_layer.qweight
    weight.view(torch.uint8)[: len(weight) // 2].bitwise_xor_(0x80)  # other signs
    after = results(model)
    assert not torch.equal(after[0], before[0])
    assert not torch.equal(after[2], before[2]), "a gradient of the layer below"
    weight.view(torch.uint8)[: len(weight) // 2].bitwise_xor_(0x80)
    assert all(map(torch.equal, results(model), before))


def test_no_host_device_sync() -> None:
    model = llama()
    body = model.get_base_model()
    assert use_document_attention(body) is None
    inputs = {"input_ids": tokens(1), "position_ids": torch.arange(LENGTH, device=GPU).expand(BATCH, -1)}
    inputs |= DocumentLayout(None, LENGTH).arguments()
    targets = tokens(2)
    for waiting in (nullcontext(), no_waiting()):  # warm-up
        torch.cuda.synchronize()
        with waiting:
            hidden = body.model(**inputs).last_hidden_state
            head_loss(body.lm_head, hidden, targets, BATCH * LENGTH).backward()
