"""QLoRA on a GPU with fp8 matmuls.

The nf4 to fp8 kernel matches its reference, the fused model matches the plain one, and weights stay in 4 bits.
"""

from __future__ import annotations

import gc
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from pantheraml.engine.memory.checkpointing import apply_checkpointing
from pantheraml.kernels.fp8.e4m3 import E4M3
from pantheraml.kernels.nf4.format import BlockScales, NF4Weight
from pantheraml.kernels.nf4.to_fp8 import nf4_row_scales, nf4_to_fp8, reference_nf4_to_fp8
from pantheraml.models.adapters import apply_method, trainable_parameters
from pantheraml.models.attention import use_document_attention
from pantheraml.models.document_layout import DocumentLayout
from pantheraml.models.fast import fuse
from pantheraml.models.quantize.fp8 import FP8Linear
from pantheraml.models.quantize.nf4 import NF4Linear
from pantheraml.models.quantize.quantized_linear import quantize_linears
from pantheraml.specs.train import MethodConfig, TrainConfig
from tests import toy
from tests.gpu.waiting import no_waiting
from tests.harness import make_plan, make_run, train_here, values

GPU = torch.device("cuda")
WIDTH, INNER, LAYERS, BATCH, LENGTH = 1024, 3072, 4, 2, 512


@pytest.fixture(autouse=True)
def _needs_fp8() -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("row-wise fp8 matmuls need compute capability 9.0")


def quantized(rows: int, columns: int, storage: str) -> NF4Weight:
    generator = torch.Generator(GPU).manual_seed(0)
    weight = NF4Weight.quantize(torch.randn(rows, columns, device=GPU, generator=generator, dtype=torch.bfloat16))
    if storage == "float32":
        return weight._replace(scales=BlockScales(weight.scales.values()))
    if storage == "table":
        assert weight.scales.step is not None
        table = torch.linspace(0, 1, 256, device=GPU).sqrt()
        return weight._replace(scales=weight.scales._replace(table=table, step=weight.scales.step * 255))
    return weight


@pytest.mark.parametrize("is_transposed", [False, True], ids=["rows", "transposed"])
@pytest.mark.parametrize("storage", ["codes", "table", "float32"])
@pytest.mark.parametrize("shape", [(4096, 14336), (1024, 4096), (272, 192)])
def test_nf4_to_fp8_matches_the_reference(shape: tuple[int, int], storage: str, is_transposed: bool) -> None:
    weight = quantized(*shape, storage)
    scales = nf4_row_scales(weight)
    rows, columns = shape
    matrix = torch.zeros((columns, rows + 128) if is_transposed else (rows, columns + 128), device=GPU).to(E4M3)
    out = matrix[:, :rows].T if is_transposed else matrix[:, :columns]
    nf4_to_fp8(weight, scales, out)
    expected = torch.empty(shape, dtype=E4M3, device=GPU)
    reference_nf4_to_fp8(weight, scales, expected)
    # the kernel uses fused multiply-add: a value between two codes may round either way
    differs = out.float() != expected.float()
    assert float(differs.float().mean()) < 2e-3
    torch.testing.assert_close(out.float(), expected.float(), rtol=0.13, atol=2**-9)
    assert not matrix[:, rows if is_transposed else columns :].float().any()


def llama(*, nf4: bool = True) -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=16,
        num_key_value_heads=4,
        vocab_size=512,
        use_cache=False,
    )
    model = LlamaForCausalLM(config).to(GPU, torch.bfloat16)
    quantize_linears(model, "nf4", dtype=torch.bfloat16, device=GPU)
    adapted = apply_method(model, MethodConfig(rank=16), seed=1)
    with torch.no_grad():
        for number, (_, parameter) in enumerate(trainable_parameters(adapted)):
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
            parameter.add_(0.003 * noise.to(parameter))
    if not nf4:
        for name, layer in list(adapted.named_modules()):
            if isinstance(layer, NF4Linear):
                adapted.set_submodule(name, FP8Linear(layer.dequantize(), layer.bias))
    return adapted.train()


def tokens() -> Tensor:
    return torch.randint(512, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1)).to(GPU)


def logits_and_gradient(model: nn.Module) -> tuple[Tensor, Tensor]:
    ids = tokens()
    out = model(input_ids=ids, labels=ids)
    out.loss.backward()
    gradients = [p.grad.float().flatten() for _, p in trainable_parameters(model) if p.grad is not None]
    return out.logits.detach().float(), torch.cat(gradients)


def difference(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


def test_fused_model_matches_the_plain_one() -> None:
    plain, fused, eight_bits = llama(), llama(), llama(nf4=False)
    assert fuse(fused).fused == fuse(eight_bits).fused == LAYERS
    logits, gradient = logits_and_gradient(plain)
    fast_logits, fast_gradient = logits_and_gradient(fused)
    assert difference(fast_logits, logits) < 0.15
    assert float(torch.cosine_similarity(fast_gradient, gradient, dim=0)) > 0.97
    # only such roundings separate this from fp8 of the dequantized weights
    near_logits, near_gradient = logits_and_gradient(eight_bits)
    assert difference(fast_logits, near_logits) < 0.03
    assert float(torch.cosine_similarity(fast_gradient, near_gradient, dim=0)) > 0.999


def test_weights_stay_in_four_bits() -> None:
    model = llama()
    bases = [layer for layer in model.modules() if isinstance(layer, NF4Linear)]
    weights = sum(base.in_features * base.out_features for base in bases)
    widest = max(base.in_features * base.out_features for base in bases)
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    assert fuse(model).fused == LAYERS
    assert torch.cuda.memory_allocated() - before < weights // 10, "adapters' margins and row scales alone"
    apply_checkpointing(model, "full")
    logits_and_gradient(model)  # warm-up: allocates gradients and compiles
    ids = tokens()[:1, :16]
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    model(input_ids=ids, labels=ids).loss.backward()
    # one matrix at a time: gate and up together in e4m3, plus a margin
    assert torch.cuda.max_memory_allocated() - before < 3 * widest
    assert torch.cuda.memory_allocated() - before < weights // 10


def test_no_host_device_sync() -> None:
    model: Any = llama()
    body = model.get_base_model()
    # transformers reads positions on the host unless document boundaries are given
    assert use_document_attention(body) is None
    fuse(model)
    inputs = {"input_ids": tokens(), "position_ids": torch.arange(LENGTH, device=GPU).expand(BATCH, -1)}
    inputs |= DocumentLayout(None, LENGTH).arguments()
    for waiting in (nullcontext(), no_waiting()):  # warm-up
        torch.cuda.synchronize()
        with waiting:
            body.model(**inputs).last_hidden_state.float().square().mean().backward()
    assert all(p.grad is not None for _, p in trainable_parameters(model))


def test_fused_qlora_learns_like_unfused(tmp_path: Path) -> None:
    toy.write_llama(tmp_path / "model", hidden_size=128, intermediate_size=256)
    toy.write_jsonl(tmp_path / "data.jsonl", toy.arithmetic(400))
    losses: dict[str, list[Any]] = {}
    for fused in ("off", "on"):
        config = TrainConfig.model_validate(
            {
                "model": {"path": str(tmp_path / "model")},
                "data": {"path": str(tmp_path / "data.jsonl"), "seq_len": 128, "cache_dir": str(tmp_path / "cache")},
                "method": {"kind": "qlora"},
                "train": {
                    "global_batch_size": 8,
                    "max_steps": 12,
                    "learning_rate": 5e-3,
                    "activation_checkpointing": "full",
                    "fused": fused,
                },
            }
        )
        run = make_run(tmp_path / fused, config, make_plan(config, micro=4, device="cuda", precision="bf16"))
        losses[fused] = values(train_here(run), "train.step", "loss")
    assert losses["on"][-1] < losses["on"][0]
    assert losses["on"] == pytest.approx(losses["off"], rel=2e-2)
