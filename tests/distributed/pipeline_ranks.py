"""Rank script of test_pipeline: every case, against one process that holds the full model.

Arguments: a folder, a device type and names of cases (none: all). Each rank writes its findings to `rank<N>.json` in
the folder. A single GPU is shared by all ranks, which then communicate through gloo.
"""

from __future__ import annotations

import copy
import gc
import json
import sys
import weakref
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM

from pantheraml.base.errors import UnsupportedModelError
from pantheraml.data.batch import Batch, collate
from pantheraml.data.documents import NO_LOSS, TokenSequence
from pantheraml.engine.memory.checkpointing import apply_checkpointing
from pantheraml.engine.step.loss import LossModel
from pantheraml.engine.step.pipeline_step import PipelineRun
from pantheraml.models.adapters import apply_method, trainable_parameters
from pantheraml.models.attention import use_document_attention
from pantheraml.models.quantize.quantized_linear import quantize_linears
from pantheraml.parallel.layout import Layout, make_layout
from pantheraml.specs.parallel import ParallelDims
from pantheraml.specs.train import MethodConfig

VOCABULARY, WIDTH, STEPS, RATE = 96, 24, 3, 0.01
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
    "max_position_embeddings": 64, "initializer_range": 0.2, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**SIZES, "num_key_value_heads": 2, "tie_word_embeddings": False},
    "tied llama": {**SIZES, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "qwen3": {**SIZES, "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": False},
    "gemma2": {**SIZES, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 4},
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, **SIZES},
}


@dataclass(frozen=True)
class Case:
    name: str
    family: str = "llama"
    kind: str = "full"
    pipeline: int = 2
    stages_per_process: int = 1
    replicate: bool = False
    """Two data parallel pipelines."""
    layers: int = 4
    packed: bool = True
    rows: tuple[int, ...] = (2, 2, 2, 2)
    """Rows of each micro-batch of a step."""
    base: str | None = None
    dtype: torch.dtype = torch.float32
    checkpointing: str = "none"
    masked: bool = False
    """Attention with a mask instead of document boundaries."""
    autocast: bool = False
    """Matmuls in bfloat16."""
    dropout: float = 0.0
    targets: str | list[str] = "all-linear"

    @property
    def tolerance(self) -> float:
        return 1e-12 if self.dtype == torch.float64 else 1e-5

    def precision(self) -> AbstractContextManager[object]:
        return torch.autocast("cpu", torch.bfloat16) if self.autocast else nullcontext()


CASES = [
    Case("llama full packed"),
    Case("llama full packed float64", dtype=torch.float64),
    Case("llama full padded", packed=False, rows=(3, 1, 2, 2)),
    Case("llama full one micro-batch", rows=(4,)),
    Case("llama full one row", rows=(1,), packed=False),
    Case("llama full two micro-batches", rows=(2, 3), packed=False),
    Case("llama full checkpointed", checkpointing="full"),
    Case("llama full two layers", layers=2, masked=True),
    Case("llama full in mixed precision", autocast=True),
    Case("llama lora over bfloat16", kind="lora", dtype=torch.bfloat16, autocast=True),
    Case("llama tied", family="tied llama", packed=False),
    Case("llama lora", kind="lora"),
    Case("llama lora padded float64", kind="lora", packed=False, rows=(3, 1, 2), dtype=torch.float64),
    Case("llama lora tied padded", family="tied llama", kind="lora", packed=False),
    Case("llama lora with nothing to train on a stage", kind="lora", targets=["model.layers.3.self_attn.q_proj"]),
    Case("llama dora checkpointed", kind="dora", checkpointing="full", rows=(2, 1)),
    Case("llama lora nf4", kind="lora", base="nf4"),
    Case("qwen3 full padded", family="qwen3", packed=False),
    Case("qwen3 lora packed", family="qwen3", kind="lora", rows=(1, 1)),
    Case("gemma2 full, no plain head", family="gemma2", rows=(2, 2)),
    Case("gpt2 full packed", family="gpt2"),
    Case("gpt2 lora padded", family="gpt2", kind="lora", packed=False, rows=(2, 1, 2)),
    Case("llama interleaved", stages_per_process=2, rows=(2, 1, 2)),
    Case("gpt2 interleaved tied", family="gpt2", stages_per_process=2, packed=False),
    Case("qwen3 lora interleaved", family="qwen3", kind="lora", stages_per_process=2, layers=6, rows=(1,)),
    Case("llama dp 2 x pp 2", replicate=True),
    Case("tied llama dp 2 x pp 2", family="tied llama", replicate=True, packed=False, rows=(2, 1, 2)),
    Case("qwen3 lora dp 2 x pp 2", family="qwen3", kind="lora", replicate=True, rows=(3,)),
    Case("llama pp 4", pipeline=4, layers=5, rows=(2, 2, 2, 2, 1)),
    Case("gpt2 pp 4", family="gpt2", pipeline=4, packed=False, rows=(2,)),
]


def build(case: Case, device: torch.device) -> nn.Module:
    """Build the same model at every call."""
    torch.manual_seed(3)
    values = {**FAMILIES[case.family], "num_hidden_layers": case.layers}
    config = AutoConfig.for_model(case.family.rpartition(" ")[2], **values)
    attention = "eager" if case.family == "gemma2" else "sdpa"  # it uses softcapping
    model = AutoModelForCausalLM.from_config(config, dtype=case.dtype, attn_implementation=attention)
    if case.base == "nf4":
        quantize_linears(model, "nf4", dtype=case.dtype, device=device)
    if not case.masked and attention == "sdpa":
        assert use_document_attention(model) is None
    method = MethodConfig(kind=case.kind, rank=4, dropout=case.dropout, target_modules=case.targets)
    adapted = apply_method(model, method, seed=5)
    adapted.to(device)
    if case.dtype == torch.float64:  # adapters are float32 whatever the base dtype
        adapted.to(case.dtype)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:  # with B at zero, half of the gradients would be zero
            nn.init.normal_(parameter, std=0.1)
    apply_checkpointing(adapted, case.checkpointing)
    return adapted.train()


def make_batches(case: Case, step: int, share: int) -> list[Batch]:
    """Micro-batches of a data rank; if padded, widths differ between steps and ranks."""
    rng = np.random.default_rng([7, step, share])
    made = []
    for rows in case.rows[: len(case.rows) - share] or case.rows:
        sequences = []
        for _ in range(rows):
            lengths = rng.integers(2, 9, size=3 if case.packed else 1 + step)
            lengths = lengths if case.packed else lengths[:1] * (1 + step)
            tokens = rng.integers(2, VOCABULARY, size=int(lengths.sum()))
            labels = np.where(rng.random(len(tokens)) < 0.2, NO_LOSS, tokens)
            labels[np.cumsum(lengths) - lengths] = NO_LOSS
            sequences.append(TokenSequence(tokens, labels, lengths))
        made.append(collate(sequences, pad_id=0, width=WIDTH if case.packed else None))
    return made


def difference(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm().clamp_min(1e-30))


def whole_loss(model: LossModel, batch: Batch, case: Case) -> Tensor:
    batch = batch.to(next(model.parameters()).device)
    with case.precision():
        return model(
            batch.input_ids, batch.position_ids, batch.targets, batch.boundaries, batch.max_length, batch.target_count
        )


def descend(model: nn.Module) -> None:
    """SGD step, which changes weights in proportion to the gradient's error."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= RATE * parameter.grad
                parameter.grad = None


def run_case(case: Case, layout: Layout, device: torch.device) -> dict[str, Any]:
    model = build(case, device)
    whole = copy.deepcopy(model)
    everything = [weakref.ref(module) for module in model.modules()]
    data_group = layout.group("replicate") if case.replicate else None
    run = PipelineRun(
        model,
        layout.group("pipeline"),
        device=device,
        stages_per_process=case.stages_per_process,
        data_group=data_group,
        autocast=case.precision,
    )
    gc.collect()
    alive = {id(module) for ref in everything if (module := ref()) is not None}
    shares = range(2) if case.replicate else range(1)
    mine = layout.coordinates["replicate"] if case.replicate else 0
    reference = LossModel(whole)
    found: dict[str, Any] = {
        "tolerance": case.tolerance,
        "last": layout.coordinates["pipeline"] == case.pipeline - 1,
        "leaked": len(alive - {id(module) for module in model.modules()}),
        "names": [name for name, _ in trainable_parameters(model)],
        "all names": [name for name, _ in trainable_parameters(whole)],
        "shared": sorted(run.shared_parameters),
        "steps": [],
    }
    for step in range(STEPS):
        batches = {share: make_batches(case, step, share) for share in shares}
        factor = 1 / sum(batch.target_count for part in batches.values() for batch in part)
        losses = {}
        for share, part in batches.items():
            losses[share] = [whole_loss(reference, batch, case) for batch in part]
        (sum(sum(part) for part in losses.values()) * factor).backward()
        loss = run.backward(batches[mine], factor)
        expected = dict(whole.named_parameters())
        gradients = {
            name: difference(parameter.grad, expected[name].grad) for name, parameter in trainable_parameters(model)
        }
        descend(model)
        descend(whole)
        with torch.no_grad():
            evaluated = whole_loss(reference, batches[mine][0], case)
        found["steps"].append(
            {
                "loss": [float(loss), sum(float(part.detach()) for part in losses[mine])],
                "evaluation": [float(run.evaluate(batches[mine][0])), float(evaluated)],
                "gradients": gradients,
                "weights": {n: difference(p.detach(), expected[n].detach()) for n, p in trainable_parameters(model)},
            }
        )
    return found


def count_sends(layout: Layout, stages_per_process: int) -> dict[str, int]:
    """Sends of a step with 4 micro-batches, once its shapes are known."""
    case = Case("sends", stages_per_process=stages_per_process)
    device = torch.device("cpu")
    run = PipelineRun(
        build(case, device), layout.group("pipeline"), device=device, stages_per_process=stages_per_process
    )
    batches = make_batches(case, 0, 0)
    run.backward(batches, 1.0)
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        run.backward(batches, 1.0)
    names = [event.name for event in recorded.events()]
    return {name: names.count(name) for name in sorted(set(names)) if name.startswith(("c10d::", "gloo:"))}


def accumulated(layout: Layout) -> float:
    """Largest difference between two accumulated calls and one call with both batches, also over a data group."""
    case, device = Case("accumulated", family="tied llama", replicate=True), torch.device("cpu")
    worst = 0.0
    gradients = []
    batches = make_batches(case, 0, layout.coordinates["replicate"])
    for parts in ([batches], [batches[:1], batches[1:]]):
        model = build(case, device)
        run = PipelineRun(model, layout.group("pipeline"), device=device, data_group=layout.group("replicate"))
        for part in parts:
            run.backward(part, 0.01)
        gradients.append([parameter.grad for _, parameter in trainable_parameters(model)])
    for first, second in zip(*gradients, strict=True):
        worst = max(worst, difference(first, second))
    return worst


def dropped(layout: Layout) -> dict[str, float]:
    """Largest difference with recomputed dropout, and with another dropout mask."""
    device, gradients = torch.device("cpu"), []
    for checkpointing, seed in (("none", 11), ("full", 11), ("full", 12)):
        case = Case("dropped", kind="lora", dropout=0.3, checkpointing=checkpointing)
        model = build(case, device)
        run = PipelineRun(model, layout.group("pipeline"), device=device)
        torch.manual_seed(seed)
        run.backward(make_batches(case, 0, 0), 0.01)
        gradients.append([parameter.grad for _, parameter in trainable_parameters(model)])
    kept, again, other = gradients
    return {
        "again": max(map(difference, again, kept)),
        "another draw": max(map(difference, other, kept)),
    }


def refused(layout: Layout) -> dict[str, str]:
    """Family -> reason for the rejection, which each rank finds on its own before it communicates."""
    reasons = {}
    for family, changes in (("gptj", {"rotary_dim": 4}), ("xglm", {"activation_function": "gelu"}), ("opt", {})):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES, num_hidden_layers=2, **changes))
        try:
            PipelineRun(model, layout.group("pipeline"), device=torch.device("cpu"))
        except UnsupportedModelError as err:
            reasons[family] = err.what
    return reasons


def main() -> None:
    folder, device, names = Path(sys.argv[1]), torch.device(sys.argv[2]), sys.argv[3:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        square = make_layout(ParallelDims(pipeline=2, replicate=2), "cpu")
        line = make_layout(ParallelDims(pipeline=4), "cpu")
        findings: dict[str, Any] = {"cases": {}}
        for number, case in enumerate(case for case in CASES if not names or case.name in names):
            # a case of two ranks runs on one half of the four; the other half takes the next one
            if case.pipeline == 2 and not case.replicate and number % 2 != square.coordinates["replicate"]:
                continue
            findings["cases"][case.name] = run_case(case, line if case.pipeline == 4 else square, device)
        if not names:
            findings["sends"] = [count_sends(square, 1), count_sends(square, 2)]
            findings["accumulated"] = accumulated(square)
            findings["dropped"] = dropped(square)
            findings["refused"] = refused(square)
        (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(findings))
        dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
