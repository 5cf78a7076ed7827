"""Cases of test_planned_memory, and what a rank holds in each: counted on its tensors, and predicted."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from pantheraml.engine.optim.adamw import LeanAdamW
from pantheraml.engine.step.step import Stepper
from pantheraml.planner.memory.weights import Held, RankPlace, gradient_bytes, held_tensors, optimizer_bytes
from pantheraml.planner.model_shapes import shapes_of_config
from pantheraml.planner.setting import setting_of
from pantheraml.specs.parallel import ParallelDims
from pantheraml.specs.plan import Plan
from pantheraml.specs.train import TrainConfig
from tests import toy
from tests.harness import make_plan

SEQUENCES, LENGTH = 8, 48


@dataclass(frozen=True)
class MemoryCase:
    dims: dict[str, int]
    family: str = "llama"
    method: str = "full"
    quantized: str | None = None
    train: dict[str, Any] = field(default_factory=dict)
    parallel: dict[str, Any] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        return ParallelDims(**self.dims).world_size

    def config(self, root: Path) -> TrainConfig:
        return TrainConfig.model_validate(
            {
                "model": {"path": str(root / self.family)},
                "data": {"path": str(root / "data.jsonl"), "seq_len": LENGTH, "cache_dir": str(root / "cache")},
                "method": {"kind": self.method, "rank": 3},
                "train": {"global_batch_size": SEQUENCES, "max_steps": 1, **self.train},
                "parallel": {**self.dims, **self.parallel},
                "device": "cpu",
            }
        )

    def plan(self, config: TrainConfig) -> Plan:
        dims = ParallelDims(**self.dims)
        plan = make_plan(config, dims=dims, micro=SEQUENCES // dims.data // (4 if dims.pipeline > 1 else 1))
        precision = "bf16" if config.train.weights == "bf16" else "fp32"
        return plan.model_copy(update={"frozen_weights": self.quantized, "precision": precision})


BF16 = {"weights": "bf16", "optimizer": "adamw_bf16"}
CASES: dict[str, MemoryCase] = {
    "one process": MemoryCase({}),
    "one process, 8-bit states": MemoryCase({}, "wide", train={"weights": "bf16", "optimizer": "adamw8bit"}),
    "one process, dora": MemoryCase({}, "tied", "dora"),
    "one process, lora over nf4": MemoryCase({}, "wide", "lora", "nf4"),
    "one process, lora over fp8": MemoryCase({}, "wide", "lora", "fp8"),
    "one process, gpt2": MemoryCase({}, "gpt2"),
    "ddp": MemoryCase({"replicate": 2}),
    "ddp, lora over int8": MemoryCase({"replicate": 2}, "llama", "lora", "int8"),
    "fsdp": MemoryCase({"shard": 2}),
    "fsdp, bf16 states": MemoryCase({"shard": 2}, "tied", train=BF16),
    "fsdp, lora over nf4": MemoryCase({"shard": 2}, "wide", "lora", "nf4"),
    "fsdp, lora over fp8": MemoryCase({"shard": 2}, "wide", "lora", "fp8"),
    "fsdp, dora": MemoryCase({"shard": 2}, "llama", "dora"),
    "tensor": MemoryCase({"tensor": 2}),
    "tensor, lora": MemoryCase({"tensor": 2}, "tied", "lora"),
    "tensor, lora over nf4": MemoryCase({"tensor": 2}, "wide", "lora", "nf4"),
    "tensor, lora over fp8": MemoryCase({"tensor": 2}, "wide", "lora", "fp8"),
    "tensor, dora": MemoryCase({"tensor": 2}, "llama", "dora"),
    "pipeline": MemoryCase({"pipeline": 2}),
    "pipeline, tied": MemoryCase({"pipeline": 2}, "tied"),
    "pipeline, lora over fp8": MemoryCase({"pipeline": 2}, "wide", "lora", "fp8"),
    "context": MemoryCase({"context": 2}, "llama", "lora"),
    "fsdp x4": MemoryCase({"shard": 4}),
    "fsdp x4, 8-bit weights": MemoryCase({"shard": 4}, "llama", "lora", "int8"),
    "hsdp": MemoryCase({"replicate": 2, "shard": 2}, "tied"),
    "fsdp x tensor": MemoryCase({"shard": 2, "tensor": 2}),
    "fsdp x tensor, lora": MemoryCase({"shard": 2, "tensor": 2}, "tied", "lora"),
    "fsdp x context": MemoryCase({"shard": 2, "context": 2}),
    "ddp x pipeline": MemoryCase({"replicate": 2, "pipeline": 2}, "deep", "lora"),
    "pipeline x2, two stages each": MemoryCase({"pipeline": 2}, "deep", parallel={"stages_per_process": 2}),
    "tensor x4": MemoryCase({"tensor": 4}, "deep"),
}
"""Sizes are odd where the family allows it, so that shards are uneven."""

MANY = {"global_batch_size": 1024}
LARGE: dict[str, MemoryCase] = {
    "fsdp x512": MemoryCase({"shard": 512}, train=MANY),
    "fsdp x64 x tensor x2, lora": MemoryCase({"shard": 64, "tensor": 2}, "llama", "lora", None, MANY),
    "hsdp 8 x 64, lora over nf4": MemoryCase({"replicate": 8, "shard": 64}, "wide", "lora", "nf4", MANY),
    "fsdp x64 x context x4, lora over int8": MemoryCase({"shard": 64, "context": 4}, "tied", "lora", "int8", MANY),
    "ddp x128 x pipeline x4, lora over fp8": MemoryCase({"replicate": 128, "pipeline": 4}, "deep", "lora", "fp8", MANY),
    "ddp x256 x pipeline x2": MemoryCase({"replicate": 256, "pipeline": 2}, "deep", train=MANY),
    "ddp x256 x tensor x2": MemoryCase({"replicate": 256, "tensor": 2}, train=MANY),
}
"""Worlds for which no processes are started: sharded in one process, as each of a few ranks."""


def write_inputs(root: Path) -> None:
    toy.write_jsonl(root / "data.jsonl", toy.arithmetic(60))
    toy.write_llama(root / "llama", hidden_size=36, intermediate_size=66, head_dim=10, vocab_size=323)
    toy.write_llama(root / "wide", hidden_size=128, intermediate_size=128)
    toy.write_llama(root / "deep", num_hidden_layers=7, num_key_value_heads=4)
    toy.write_qwen3(root / "tied")
    toy.write_gpt2(root / "gpt2")


def place_of(coordinates: dict[str, int], dims: ParallelDims) -> RankPlace:
    shard = coordinates["shard"] * dims.context + coordinates["context"] if dims.shard > 1 else 0
    return RankPlace(pipeline=coordinates["pipeline"], shard=shard, tensor=coordinates["tensor"])


def predicted(case: MemoryCase, root: Path, coordinates: dict[str, int]) -> dict[str, int]:
    config = case.config(root)
    plan = case.plan(config)
    setting = setting_of(config, plan)
    shapes = shapes_of_config(json.loads((root / case.family / "config.json").read_text()))
    held = held_tensors(shapes, setting, place_of(coordinates, plan.dims))
    return {
        "weights": _held_bytes(held, "weights"),
        "adapters": _held_bytes(held, "adapters"),
        "gradients": gradient_bytes(held),
        "optimizer": optimizer_bytes(held, setting),
    }


def _held_bytes(held: Iterable[Held], part: str) -> int:
    return sum(each.bytes * each.times for each in held if each.part == part)


def counted(stepper: Stepper) -> dict[str, int]:
    """Bytes of this rank's tensors, after a backward and a step. Frequencies of RoPE are no weights."""
    named = [*stepper.model.named_parameters(), *stepper.model.named_buffers()]
    named = [(name, tensor) for name, tensor in named if not name.endswith(("inv_freq", ".attn.bias"))]
    lean = isinstance(stepper.optimizer, LeanAdamW)  # counts steps on the host
    states = [
        value
        for state in stepper.optimizer.state.values()
        for name, value in state.items()
        if not (lean and name == "step")
    ]
    return {
        "weights": _bytes(tensor for name, tensor in named if "lora_" not in name),
        "adapters": _bytes(tensor for name, tensor in named if "lora_" in name),
        "gradients": _bytes(part.grad for _, part in stepper.parts if part.grad is not None),
        "optimizer": _bytes(states),
    }


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in map(_local, tensors))


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
