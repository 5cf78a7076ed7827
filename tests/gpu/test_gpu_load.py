"""Loading onto a GPU: peak memory, and the same quantized weights as on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from pantheraml.models.loader import load_model
from pantheraml.specs.train import ModelConfig
from tests import toy

LARGEST = 2 * 2048 * 8192
"""Bytes of the largest tensor below, in bf16."""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 2 GB in bf16."""
    folder = tmp_path_factory.mktemp("large")
    config = LlamaConfig(
        vocab_size=8192, hidden_size=2048, intermediate_size=8192, num_hidden_layers=14, num_attention_heads=16
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder, max_shard_size="700MB")
    torch.cuda.empty_cache()
    return folder


def load(folder: Path, device: str, quantize: Any) -> Any:
    config = ModelConfig(path=str(folder))
    return load_model(config, dtype=torch.bfloat16, device=torch.device(device), quantize=quantize)


@pytest.mark.seed("S0-034", "S3-054")
@pytest.mark.parametrize("quant_format", [None, "fp8", "int8", "nf4"])
def test_peak_memory_while_loading(large: Path, quant_format: Any) -> None:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model = load(large, "cuda", quant_format)
    grown, peak = torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before
    size = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))
    assert grown < 1.02 * size
    # five tensors are queued or in progress, and quantizing one takes a few float32 copies of it
    assert peak < size + 14 * LARGEST, f"{peak >> 20} MiB for a model of {size >> 20} MiB"


@pytest.mark.parametrize("quant_format", [None, "int8", "nf4"])
def test_weights_are_the_same_as_on_the_cpu(tmp_path: Path, quant_format: Any) -> None:
    folder = toy.write_llama(tmp_path / "model", hidden_size=128, intermediate_size=256)
    on_cpu, on_gpu = load(folder, "cpu", quant_format), load(folder, "cuda", quant_format)
    mine, theirs = on_cpu.state_dict(), on_gpu.state_dict()
    assert list(mine) == list(theirs)
    assert all(torch.equal(theirs[name].cpu(), tensor) for name, tensor in mine.items())
    assert torch.equal(on_gpu.model.rotary_emb.inv_freq.cpu(), on_cpu.model.rotary_emb.inv_freq)
    assert {t.device.type for t in (*on_gpu.parameters(), *on_gpu.buffers())} == {"cuda"}


def test_logits_are_those_of_transformers(tmp_path: Path) -> None:
    folder = toy.write_llama(tmp_path / "model", hidden_size=128, intermediate_size=256)
    plain: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).cuda()
    ids = torch.arange(4, 100, device="cuda")[None]
    with torch.no_grad():
        assert torch.equal(load(folder, "cuda", None)(input_ids=ids).logits, plain(input_ids=ids).logits)
