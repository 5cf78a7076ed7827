"""Rank script of test_tensor_parallel: every case, against the same model unsharded.

Four ranks. Most cases shard a model over two, and two pairs of ranks divide them up; some shard it over four. Rank 0
writes, for each case, the worst result of any rank.
"""

from __future__ import annotations

import copy
import datetime
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen3Config,
)

from pantheraml.engine.step.loss import LossModel
from pantheraml.kernels.linear_cross_entropy import head as head_op
from pantheraml.models.adapters import apply_method
from pantheraml.models.quantize.fp8 import FP8Linear
from pantheraml.models.quantize.quantized_linear import QuantizedLinear, quantize_linears
from pantheraml.parallel.layout import make_layout
from pantheraml.parallel.tensor import shard_tensors
from pantheraml.specs.parallel import ParallelDims
from pantheraml.specs.train import MethodConfig

STEPS = 3
RATE = 0.03
"""Small: at 0.5, with random weights, a difference in the last bit grows twentyfold per step."""
VOCABULARY = 96
TOKENS = 20


@dataclass(frozen=True)
class Case:
    config: type[PretrainedConfig] = LlamaConfig
    changes: dict[str, Any] = field(default_factory=dict)
    method: dict[str, Any] = field(default_factory=lambda: {"kind": "full"})
    packing: Any = None
    degree: int = 2
    dtype: torch.dtype = torch.float32
    checkpointing: str | None = None
    chunk_elements: int | None = None


LORA = {"kind": "lora", "rank": 4}
DORA = {"kind": "dora", "rank": 4}
WIDE = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
"""Wide enough that half rows consist of whole nf4 blocks."""
BIASES = {"attention_bias": True, "mlp_bias": True}

CASES = {
    "llama full": Case(),
    "llama lora": Case(method=LORA),
    "llama dora": Case(method=DORA),
    "llama full tied, uneven vocabulary, float64": Case(
        changes={"tie_word_embeddings": True, "vocab_size": VOCABULARY + 1}, dtype=torch.float64
    ),
    "llama lora with biases, float64": Case(changes=BIASES, method=LORA, dtype=torch.float64),
    "llama dora with biases, float64": Case(changes=BIASES, method=DORA, dtype=torch.float64),
    "llama full, in four": Case(changes={"num_key_value_heads": 4}, degree=4),
    "llama full with biases, in four, float64": Case(
        changes={**BIASES, "num_key_value_heads": 4}, degree=4, dtype=torch.float64
    ),
    "llama lora, in four": Case(changes={"num_key_value_heads": 4}, method=LORA, degree=4),
    "llama dora, in four": Case(changes={"num_key_value_heads": 4}, method=DORA, degree=4),
    "llama full, loss in chunks, uneven": Case(changes={"vocab_size": VOCABULARY + 1}, chunk_elements=240),
    "llama lora, recomputed": Case(method=LORA, checkpointing="plain"),
    "llama full, recomputed reentrantly": Case(checkpointing="reentrant"),
    "llama lora on the head too": Case(method={**LORA, "target_modules": ["q_proj", "down_proj", "lm_head"]}),
    "qwen3 full": Case(config=Qwen3Config, changes={"head_dim": 8}),
    "qwen3 lora": Case(config=Qwen3Config, changes={"head_dim": 8}, method=LORA),
    "qwen3 full, float64": Case(config=Qwen3Config, changes={"head_dim": 8}, dtype=torch.float64),
    "phi3 full (joined projections)": Case(config=Phi3Config),
    "phi3 lora (joined projections)": Case(config=Phi3Config, method=LORA),
    "gemma3 full (scaled embedding, capped logits)": Case(
        config=Gemma3TextConfig, changes={"head_dim": 8, "final_logit_softcapping": 30.0, "vocab_size": VOCABULARY + 1}
    ),
    "llama lora over nf4": Case(changes=WIDE, method=LORA, packing="nf4"),
    "llama lora over int8": Case(method=LORA, packing="int8"),
    "llama lora over int8 with biases, float64": Case(changes=BIASES, method=LORA, packing="int8", dtype=torch.float64),
}
FP8 = Case(changes=WIDE, method=LORA, packing="fp8")
COUNTED = ("llama full", "llama lora", "qwen3 full")


def make_model(case: Case) -> nn.Module:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = {"vocab_size": VOCABULARY, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    config = case.config(**{**sizes, **ids, "num_key_value_heads": 2, "max_position_embeddings": 64, **case.changes})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(case.dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.1)
    if case.packing is not None:
        quantize_linears(model, case.packing, dtype=case.dtype, device=torch.device("cpu"))
    if case.checkpointing is not None:
        reentrant = case.checkpointing == "reentrant"
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    adapted = apply_method(model, MethodConfig.model_validate(case.method), seed=0).train()
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(case.dtype)
            if "lora_B" in name:
                parameter.normal_(std=0.02)  # so that A has a gradient
    return adapted


def make_batch(step: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Two micro-batches of a step, one of them with few targets."""
    generator = torch.Generator().manual_seed(step)
    ids, targets = torch.randint(0, VOCABULARY, (2, 2, 2, TOKENS), generator=generator)
    targets[0, :, : TOKENS // 3] = -100
    positions = torch.arange(TOKENS).expand(2, -1)
    return [(ids[i], positions, targets[i]) for i in range(2)]


def backward(loss_model: LossModel, step: int) -> float:
    """Backward of the mean token loss of a step; return the loss."""
    batch = make_batch(step)
    count = sum(int((targets >= 0).sum()) for _, _, targets in batch)
    total = 0.0
    for ids, positions, targets in batch:
        loss = loss_model(ids, positions, targets) / count
        loss.backward()
        total += loss.item()
    return total


def train(model: nn.Module, step_taken: Callable[[], None], reduce: Callable[[], None] = lambda: None) -> list[float]:
    """Losses of some SGD steps on the local shards; gradients of the last step are kept."""
    loss_model, losses = LossModel(model), []
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for step in range(STEPS):
        for parameter in trained:
            parameter.grad = None
        losses.append(backward(loss_model, step))
        reduce()
        step_taken()
        with torch.no_grad():
            for parameter in trained:
                assert parameter.grad is not None
                local(parameter).sub_(local(parameter.grad), alpha=RATE)
    return losses


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def difference(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def compare(case: Case, mesh: DeviceMesh) -> dict[str, float]:
    model = make_model(case)
    alone = copy.deepcopy(model)
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    shared = shard_tensors(model, mesh)
    assert names == [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    differences: list[float] = []
    gradients: list[dict[str, Tensor]] = []
    expected_losses = train(alone, lambda: gradients.append({n: p.grad.clone() for n, p in named(alone)}))
    expected = dict(named(alone))
    steps = iter(gradients)

    def check_gradients() -> None:
        wanted = next(steps)
        for name, parameter in named(model):
            gradient = parameter.grad
            assert isinstance(gradient, DTensor)
            assert gradient.placements == parameter.placements, name
            # for a replicated gradient this is the local copy, which must be right on every rank
            differences.append(difference(whole(gradient), wanted[name]))

    before = head_op.CHUNK_ELEMENTS
    head_op.CHUNK_ELEMENTS = case.chunk_elements or before
    try:
        losses = train(model, check_gradients, shared.all_reduce)
    finally:
        head_op.CHUNK_ELEMENTS = before
    logits = [m(input_ids=make_batch(9)[0][0], use_cache=False).logits.detach() for m in (model, alone)]
    return {
        "loss": max(abs(a - b) / b for a, b in zip(losses, expected_losses, strict=True)),
        "gradient": max(differences),
        "weights": max(difference(whole(p.detach()), expected[name].detach()) for name, p in named(model)),
        "logits": difference(*logits),
        "share": held(model) / held(alone),
    }


def named(model: nn.Module) -> list[tuple[str, Any]]:
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


def held(model: nn.Module) -> int:
    """Memory of the weights in bytes, including quantized ones."""
    buffers = [b for m in model.modules() if isinstance(m, QuantizedLinear) for b in m.buffers(recurse=False)]
    storages = {t.untyped_storage().data_ptr(): t for t in (*map(local, model.parameters()), *buffers)}
    return sum(tensor.untyped_storage().nbytes() for tensor in storages.values())


def count_collectives(case: Case, mesh: DeviceMesh) -> dict[str, dict[str, int]]:
    """Collectives of one micro-batch."""
    model = make_model(case)
    shared = shard_tensors(model, mesh)
    loss_model = LossModel(model)
    inputs = make_batch(0)[1]
    counts = {}
    with CommDebugMode() as forward:  # type: ignore[no-untyped-call]
        loss = loss_model(*inputs)
    with CommDebugMode() as back:  # type: ignore[no-untyped-call]
        loss.backward()
    with CommDebugMode() as end:  # type: ignore[no-untyped-call]
        shared.all_reduce()
    for name, seen in (("forward", forward), ("backward", back), ("end", end)):
        counts[name] = {str(op).rpartition(".")[2]: number for op, number in seen.get_comm_counts().items()}
    return counts


def compare_fp8(mesh: DeviceMesh) -> dict[str, list[float]]:
    """Errors of logits and gradients relative to the same weights without fp8: sharded and unsharded.

    Activations are scaled to e4m3 by the maximum of a row, and a rank with part of a row uses the maximum of its part,
    so the two cannot be equal. They can be equally accurate.
    """
    plain, alone, cut = (make_model(FP8) for _ in range(3))
    for name, layer in list(plain.named_modules()):
        if isinstance(layer, FP8Linear):
            linear = nn.Linear(layer.in_features, layer.out_features, bias=False).requires_grad_(False)
            linear.weight.copy_(layer.qweight.float() * layer.scale[:, None])
            plain.set_submodule(name, linear)
    shared = shard_tensors(cut, mesh)
    results = []
    for model in (plain, alone, cut):
        backward(LossModel(model), 0)
        if model is cut:
            shared.all_reduce()
        gradients = torch.cat([whole(parameter.grad).flatten() for _, parameter in named(model)])
        results.append((model(input_ids=make_batch(0)[0][0], use_cache=False).logits.detach(), gradients))
    (logits, gradients), *others = results
    return {
        "logits": [difference(found, logits) for found, _ in others],
        "gradients": [difference(found, gradients) for _, found in others],
    }


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=300))
    layout = make_layout(ParallelDims(replicate=2, tensor=2), "cpu")
    pair, four = layout.submesh("tensor"), init_device_mesh("cpu", (4,), mesh_dim_names=("tensor",))
    results: dict[str, Any] = {name: compare(case, four) for name, case in CASES.items() if case.degree == 4}
    for number, (name, case) in enumerate(case for case in CASES.items() if case[1].degree == 2):
        if number % 2 == layout.data_rank:
            results[name] = compare(case, pair)
            if name in COUNTED:
                results[name]["collectives"] = count_collectives(case, pair)
    ranks_results: list[dict[str, Any]] = [{}] * dist.get_world_size()
    dist.all_gather_object(ranks_results, results)
    fp8 = compare_fp8(pair)
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps({"fp8": fp8, **{name: worst(ranks_results, name) for name in CASES}}))
    dist.destroy_process_group()


def worst(ranks_results: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """Largest value of any rank for a case."""
    found = [results[name] for results in ranks_results if name in results]
    return {key: max((one[key] for one in found), key=str if key == "collectives" else None) for key in found[0]}


if __name__ == "__main__":
    main()
