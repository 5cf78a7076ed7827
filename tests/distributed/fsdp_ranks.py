"""Rank script of test_fsdp: every case against one process, all in one process group.

Each rank also computes the single-process run, so that rank 0 can compare and write plain numbers.
"""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from pantheraml.engine.memory.checkpointing import apply_checkpointing
from pantheraml.engine.step.loss import LossModel
from pantheraml.models.adapters import apply_method, trainable_parameters
from pantheraml.models.quantize.quantized_linear import quantize_linears, quantized_buffers
from pantheraml.parallel.fsdp import shard_parameters, without_sync
from pantheraml.parallel.gather import full_tensors, load_full, shard_like
from pantheraml.parallel.layout import Layout
from pantheraml.parallel.local_shards import local_shards, local_squared_norm, move_gradients_to_shards
from pantheraml.parallel.tensor import shard_tensors
from pantheraml.parallel.tp_mappings import PartialGradients
from pantheraml.specs.parallel import ParallelDims
from pantheraml.specs.train import MethodConfig
from tests.distributed.layouts import layout_of

STEPS, SEQUENCES, LENGTH, VOCABULARY = 5, 16, 12, 321
CLIP = 0.5
HSDP, WITH_TENSOR = {"replicate": 2, "shard": 2}, {"shard": 2, "tensor": 2}


@dataclass(frozen=True)
class Case:
    family: str = "llama"
    method: Any = "full"
    packing: Any = None
    dtype: str = "float64"
    accumulation: int = 1
    sync_each: bool = False
    """Reduce gradients after every micro-batch instead of the last."""
    checkpointing: Any = "none"
    dims: dict[str, int] = field(default_factory=lambda: {"shard": 2})


# Sizes are odd where the family allows it, so that shards are uneven, and some empty (LoRA of rank 1).
CASES: dict[str, Case] = {
    "llama full accumulated": Case(accumulation=4),
    "llama full float32, sent each time": Case(dtype="float32", accumulation=4, sync_each=True),
    "llama full offloaded": Case(checkpointing="offload"),
    "llama lora recomputed accumulated": Case(method="lora", checkpointing="full", accumulation=4),
    "llama lora over bf16": Case(method="lora", dtype="bfloat16"),
    "llama dora": Case(method="dora", dtype="float32"),
    "llama nf4 recomputed accumulated": Case(method="lora", packing="nf4", checkpointing="full", accumulation=4),
    "llama fp8": Case(method="lora", packing="fp8", dtype="float32"),
    "llama int8 recomputed selectively": Case(method="lora", packing="int8", checkpointing="selective"),
    "qwen3 tied full": Case(family="qwen3"),
    "gpt2 tied full accumulated": Case(family="gpt2", accumulation=2),
    "gpt2 nf4": Case(family="gpt2", method="lora", packing="nf4", dtype="float32"),
    "hsdp llama full accumulated": Case(dims=HSDP, accumulation=4),
    "hsdp qwen3 lora": Case(family="qwen3", method="lora", dims=HSDP),
    "hsdp llama nf4": Case(method="lora", packing="nf4", dims=HSDP),
    "fsdp x4 llama lora": Case(method="lora", dims={"shard": 4}),
    "fsdp x tensor llama full accumulated": Case(dims=WITH_TENSOR, accumulation=2),
    "fsdp x tensor qwen3 lora": Case(family="qwen3", method="lora", dims=WITH_TENSOR),
    "fsdp x tensor llama int8": Case(method="lora", packing="int8", dims=WITH_TENSOR),
}


def build(case: Case) -> nn.Module:
    """Build the model of a case, with the same weights every time."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": 1}
    # wider than usual: with tiny hidden states the norms would amplify rounding errors from step to step
    sizes["initializer_range"] = 0.3
    degree = case.dims.get("tensor", 1)
    llama: dict[str, Any] = {
        **sizes,
        "hidden_size": 48 if case.packing == "fp8" else 33 * degree,
        "intermediate_size": 80 if case.packing == "fp8" else 67 * degree,
        "num_hidden_layers": 2,
        "num_attention_heads": 3 * degree,
        "num_key_value_heads": degree,
        "head_dim": 8,
    }
    model: Any
    match case.family:
        case "llama":
            model = LlamaForCausalLM(LlamaConfig(**llama))
        case "qwen3":
            model = Qwen3ForCausalLM(Qwen3Config(**llama, tie_word_embeddings=True))
        case "gpt2":
            dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
            model = GPT2LMHeadModel(GPT2Config(**sizes, **dropouts, n_embd=36, n_layer=2, n_head=4, n_positions=64))
    dtype = getattr(torch, case.dtype)
    model = model.to(dtype)
    model.config.use_cache = False
    if case.packing is not None:
        quantize_linears(model, case.packing, dtype=dtype, device=torch.device("cpu"))
    if case.method == "full":
        return apply_method(model, MethodConfig(kind="full"), seed=0)
    adapted = apply_method(
        model, MethodConfig(kind=case.method, rank=1, alpha=1.0, target_modules="all-linear"), seed=0
    )  # type: ignore[arg-type]
    with torch.no_grad():  # adapters start at zero output, where half of the gradients are zero
        for name, parameter in trainable_parameters(adapted):
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape) * 0.1)
    if case.dtype == "float64":
        adapted = adapted.double()
    return adapted


def data() -> tuple[Tensor, Tensor]:
    """Sequences with very different numbers of targets."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (SEQUENCES, LENGTH + 1), generator=generator)
    targets = ids[:, 1:].clone()
    for row in range(SEQUENCES):
        targets[row, : (row * 5) % LENGTH] = -100
    return ids[:, :-1], targets


TARGETS = int((data()[1] >= 0).sum())


class Run:
    """A few training steps, in one process or sharded, with comparable results."""

    def __init__(self, case: Case, layout: Layout, *, sharded: bool) -> None:
        self.case, self.layout, self.sharded = case, layout, sharded
        self.model = build(case)
        self.loss_model = LossModel(self.model)
        apply_checkpointing(self.model, case.checkpointing)
        self.shared: PartialGradients | None = None
        if sharded:
            if layout.dims.tensor > 1:
                self.shared = shard_tensors(self.model, layout.submesh("tensor"))
            assert layout.mesh is not None
            mesh = layout.mesh["replicate", "shard"] if layout.dims.replicate > 1 else layout.mesh["shard"]
            shard_parameters(self.loss_model, decoder_layers(self.model), mesh, quantized_buffers=quantized_buffers)
        self.parameters = trainable_parameters(self.model)
        self.parts = local_shards(self.parameters)
        self.optimizer = torch.optim.AdamW([p for _, p in self.parts], lr=1e-2, eps=1e-6, fused=True)
        self.gradients: dict[str, Tensor] = {}
        self.losses: list[float] = []
        self.norms: list[float] = []

    def batches(self) -> list[tuple[Tensor, Tensor]]:
        ids, targets = data()
        if self.sharded:
            ids = ids.chunk(self.layout.dims.data)[self.layout.data_rank]
            targets = targets.chunk(self.layout.dims.data)[self.layout.data_rank]
        pieces = self.case.accumulation if self.sharded else 1
        return list(zip(ids.chunk(pieces), targets.chunk(pieces), strict=True))

    def loss(self, ids: Tensor, targets: Tensor) -> Tensor:
        positions = torch.arange(LENGTH)[None].expand(len(ids), -1)
        result: Tensor = self.loss_model(ids, positions, targets)
        return result

    def step(self) -> None:
        batches, total = self.batches(), 0.0
        for index, batch in enumerate(batches):
            local = self.sharded and not self.case.sync_each and index < len(batches) - 1
            if local:
                with without_sync(self.loss_model):
                    total += self.backward(batch)
            else:
                total += self.backward(batch)
        if self.shared is not None:
            self.shared.all_reduce()
        move_gradients_to_shards(self.parameters, self.parts)
        squares = local_squared_norm(
            self.parameters, self.parts, ranks=self.layout.dims.world_size if self.sharded else 1
        )
        counted = total if self.layout.counts_loss or not self.sharded else 0.0
        both = torch.stack([torch.tensor(counted, dtype=torch.float64), squares])
        if self.sharded:
            dist.all_reduce(both)
        norm = float(both[1].sqrt())
        self.losses.append(float(both[0]) / TARGETS)
        self.norms.append(norm)
        if len(self.losses) == 1:
            self.gradients = self.whole([(name, part.grad) for name, part in self.parts])
        torch._foreach_mul_([p.grad for _, p in self.parts if p.grad is not None], min(1.0, CLIP / norm))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def backward(self, batch: tuple[Tensor, Tensor]) -> float:
        loss = self.loss(*batch)
        (loss / TARGETS).backward()
        return loss.item()

    def whole(self, local: Iterable[tuple[str, Tensor | None]]) -> dict[str, Tensor]:
        """Gather local tensors, one per parameter, on rank 0; copies."""
        by_name = dict(self.parameters)
        found = [(name, tensor) for name, tensor in local if tensor is not None]
        if not self.sharded:
            return {name: tensor.detach().clone() for name, tensor in found}
        spread = [(name, shard_like(tensor, by_name[name])) for name, tensor in found]
        return {name: tensor.clone() for name, tensor in full_tensors(spread, self.layout)}

    def moments(self) -> list[tuple[str, Tensor]]:
        return [(name, self.optimizer.state[part]["exp_avg_sq"]) for name, part in self.parts]

    @torch.no_grad()
    def evaluate(self) -> float:
        loss = torch.zeros((), dtype=torch.float64)
        for batch in self.batches():
            loss += self.loss(*batch)
        if self.sharded:
            loss *= float(self.layout.counts_loss)
            dist.all_reduce(loss)
        return float(loss)


def difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Largest relative difference of any tensor; names and shapes must be equal."""
    assert found.keys() == expected.keys(), sorted(found.keys() ^ expected.keys())
    floor = 1e-6 * max(float(tensor.double().norm()) for tensor in expected.values())
    largest = 0.0
    for name, tensor in expected.items():
        assert found[name].shape == tensor.shape, name
        error = float((found[name].double() - tensor.double()).norm()) / max(float(tensor.double().norm()), floor)
        largest = max(largest, error)
    return largest


def relative(found: list[float], expected: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))


def held_bytes(run: Run) -> int:
    """Memory of the decoder layers' weights, plain and quantized, including the padding of uneven shards; without
    adapters, whose single row is padded to one on each rank."""
    layers = nn.ModuleList(decoder_layers(run.model))
    named = [(name, parameter) for name, parameter in layers.named_parameters() if "lora_" not in name]
    tensors = [part for _, part in local_shards(named)]
    return sum(tensor.untyped_storage().nbytes() for tensor in [*tensors, *layers.buffers()])


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def compare(case: Case, layout: Layout) -> dict[str, Any]:
    """All numbers of a case; complete on rank 0."""
    one, many = Run(case, layout, sharded=False), Run(case, layout, sharded=True)
    start = {name: tensor.clone() for name, tensor in full_tensors(many.parameters, layout)}
    held = held_bytes(many) / held_bytes(one)
    for _ in range(STEPS):
        one.step()
        many.step()
    result = {
        "bytes": held,
        "loss": relative(many.losses, one.losses),
        "grad_norm": relative(many.norms, one.norms),
        "evaluation": relative([many.evaluate()], [one.evaluate()]),
    }
    end, moments = many.whole(many.parts), many.whole(many.moments())
    one_end, one_moments = one.whole(one.parts), one.whole(one.moments())
    first_loss = roll_back(many, start, moments)
    put_back, moments_again = many.whole(many.parts), many.whole(many.moments())
    if dist.get_rank() == 0:
        result |= {
            "gradients": difference(many.gradients, one.gradients),
            "weights": difference(end, one_end),
            "moments": difference(moments, one_moments),
            "moved": difference(end, start),
            "after_rollback": relative([first_loss], [many.losses[0] * TARGETS]),
            "weights_put_back": same_bits(put_back, start),
            "moments_put_back": same_bits(moments_again, moments),
        }
    return result


def roll_back(run: Run, weights: dict[str, Tensor], moments: dict[str, Tensor]) -> float:
    """Restore the state of rank 0 right after an evaluation; the next step must use the restored weights."""
    shared: list[Any] = [weights, moments]
    dist.broadcast_object_list(shared, src=0)
    for _, moment in run.moments():
        moment.fill_(-1.0)
    by_name = dict(run.parameters)
    load_full(run.parameters, shared[0])
    load_full([(name, shard_like(moment, by_name[name])) for name, moment in run.moments()], shared[1])
    return run.evaluate()


def same_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    assert found.keys() == expected.keys()
    return all(torch.equal(found[name], expected[name]) for name in expected)


def gather_stages() -> dict[str, bool]:
    """Tensors of two pipeline stages, each over two ranks, replicated or sharded, with one name that both have."""
    layout = layout_of(ParallelDims(pipeline=2, shard=2), "cpu")
    whole = {name: torch.randn(5 + number, 3) for number, name in enumerate(("shared", "first", "second", "plain"))}
    whole["narrow"] = torch.randn(3, 2).bfloat16()
    mine = ("shared", "first") if layout.coordinates["pipeline"] == 0 else ("second", "plain", "narrow", "shared")
    named = [
        (name, whole[name] if name == "plain" else distribute_tensor(whole[name], layout.submesh("shard"), [Shard(0)]))
        for name in mine
    ]
    gathered = dict(full_tensors(named, layout, dist.group.WORLD))
    expected = ["shared", "first", "second", "plain", "narrow"] if dist.get_rank() == 0 else []
    bits = list(gathered) == expected and all(torch.equal(tensor, whole[name]) for name, tensor in gathered.items())
    votes = [False] * layout.dims.world_size
    dist.all_gather_object(votes, bits)
    return {"all_ranks_agree": all(votes)}


def main() -> None:
    output = Path(sys.argv[1])
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=300))
    try:
        results: dict[str, Any] = {}
        for name, case in CASES.items():
            dims = ParallelDims(**case.dims)
            if dims.world_size == dist.get_world_size():
                results[name] = compare(case, layout_of(dims, "cpu"))
        if dist.get_world_size() == 4:
            results["stages"] = gather_stages()
        if dist.get_rank() == 0:
            output.write_text(json.dumps(results, indent=1))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
