"""fp8 weights in two layouts on a GPU: bitwise equal to one layout, and memory is accounted for."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import LlamaConfig, LlamaForCausalLM

from pantheraml.engine.memory import oom as out_of_memory
from pantheraml.engine.step.step import Stepper
from pantheraml.models.adapters import apply_method, trainable_parameters
from pantheraml.models.attention import DocumentLayout, use_document_attention
from pantheraml.models.families import head_loss
from pantheraml.models.fast import fuse, quantize_head_like_layers, second_layouts, why_one_layout
from pantheraml.models.quantize.fp8 import FP8Linear
from pantheraml.models.quantize.quantized_linear import quantize_linears
from pantheraml.parallel.process_group import World
from pantheraml.planner import fp8_layout_choice as rule
from pantheraml.specs.plan import Layouts, Plan
from pantheraml.specs.train import MethodConfig, TrainConfig
from pantheraml.worker.train import build_model
from tests import toy
from tests.gpu.waiting import no_waiting
from tests.harness import make_plan, make_run, silent, train_here, values

GPU = torch.device("cuda")
WIDTH, INNER, LAYERS, BATCH, LENGTH, VOCABULARY = 1024, 2816, 3, 2, 512, 4096

pytestmark = pytest.mark.filterwarnings("ignore:Synchronization debug mode")


@pytest.fixture(autouse=True)
def _needs_fp8() -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("row-wise fp8 matmuls need compute capability 9.0")


def llama(layouts: Layouts, rank: int = 16) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=WIDTH, intermediate_size=INNER, num_hidden_layers=LAYERS, num_attention_heads=16,
        num_key_value_heads=4, vocab_size=VOCABULARY, use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(GPU, torch.bfloat16).requires_grad_(False)
    quantize_linears(model, "fp8", dtype=torch.bfloat16, device=GPU)
    adapted: Any = apply_method(model, MethodConfig(rank=rank), seed=1)
    change_adapters(adapted, 0)
    assert fuse(adapted, layouts=layouts).fused == LAYERS
    assert quantize_head_like_layers(adapted.get_base_model(), fused=True)
    assert len(second_layouts(adapted)) == (2 * LAYERS if layouts == 2 else 0)
    return adapted.train()


def change_adapters(model: Any, seed: int) -> None:
    with torch.no_grad():
        for number, (_, parameter) in enumerate(trainable_parameters(model)):
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(100 * seed + number))
            parameter.add_(0.003 * noise.to(parameter))


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


def assert_equal(ours: list[Tensor], theirs: list[Tensor]) -> None:
    assert len(ours) == len(theirs) == 2 + 2 * 7 * LAYERS
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("rank", [16, 5, 72])
def test_two_layouts_match_one(rank: int) -> None:
    twice, once = llama(2, rank), llama(1, rank)
    assert_equal(results(once), results(once))
    for seed in range(3):
        before = results(twice)
        assert_equal(before, results(once))
        for model in (twice, once):
            change_adapters(model, seed + 1)
        assert not torch.equal(results(twice)[0], before[0])
    for model in (twice, once):
        base = model.get_base_model()
        for layer in (base.model.layers[1].mlp.up_proj.base_layer, base.lm_head):
            layer.qweight.view(torch.uint8)[: layer.out_features // 2].bitwise_xor_(0x80)  # other signs
    assert_equal(results(twice), results(once))


def test_no_host_device_sync() -> None:
    model = llama(2)
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


def requested_bytes() -> int:
    """Requested bytes; the allocator may round each tensor up by as much as 1 MB."""
    return int(torch.cuda.memory_stats()["requested_bytes.all.current"])


def test_second_layout_memory() -> None:
    added = {}
    for layouts in (1, 1, 2):  # warm-up allocates what stays
        gc.collect()
        before = requested_bytes()
        model = llama(layouts)
        gc.collect()
        added[layouts] = requested_bytes() - before
        mlps = [layer for name, layer in model.named_modules() if ".mlp." in name and isinstance(layer, FP8Linear)]
        weights = sum(layer.qweight.numel() for layer in mlps)
        del model
    extra = added[2] - added[1]
    assert 0.99 * weights < extra < 1.1 * weights


def test_large_weights_use_one_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama(1)
    assert why_one_layout(model) is None
    monkeypatch.setattr(rule, "MAX_MEMORY_SHARE", 1e-6)
    assert "more than a quarter" in str(why_one_layout(model))


# Runs -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpu-layouts")
    toy.write_llama(folder / "model", hidden_size=128, intermediate_size=256)
    toy.write_jsonl(folder / "data.jsonl", toy.arithmetic(400))
    return folder


def planned(root: Path, layouts: Layouts, graph: str) -> tuple[TrainConfig, Plan]:
    config = TrainConfig.model_validate(
        {
            "model": {"path": str(root / "model")},
            "data": {"path": str(root / "data.jsonl"), "seq_len": 128, "cache_dir": str(root / "cache")},
            "train": {
                "global_batch_size": 8, "max_steps": 12, "learning_rate": 5e-3, "fused": "on", "cuda_graph": graph,
                "fp8_layouts": layouts,
            },
        }
    )  # fmt: skip
    plan = make_plan(config, micro=4, device="cuda", precision="fp8")
    return config, plan.model_copy(update={"fp8_layouts": layouts})


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("graph", ["off", "on"])
def test_losses_are_the_same(root: Path, graph: str) -> None:
    losses = []
    for layouts in (1, 2):
        run = make_run(root / f"{graph}-{layouts}", *planned(root, layouts, graph))
        losses.append(values(train_here(run), "train.step", "loss"))
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    assert losses[1][-1] < losses[1][0]


def test_out_of_memory_report_includes_second_layouts(root: Path) -> None:
    world = World(rank=0, size=1, device=GPU)
    collected = {}
    for layouts in (1, 2):
        config, plan = planned(root, layouts, "off")
        stepper = Stepper(build_model(config, plan, world, silent), config, world, plan).setup()
        collected[layouts] = out_of_memory.memory_use(stepper)
        error = out_of_memory.explain(torch.OutOfMemoryError("CUDA out of memory."), config, plan, stepper)
        assert ("train.fp8_layouts=1 (now 2; saves about" in str(error.fix)) == (layouts == 2)
    assert collected[1].second_layout == 0
    assert collected[2].second_layout > 0
