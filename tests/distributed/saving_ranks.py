"""Rank script of test_saving: every mode for a given world size saves the same state.

The state is fixed before the model is sharded: that of a full model comes from its files, that of an adapter is
generated from the names of its weights. So the expected values were never gathered from shards.
"""

from __future__ import annotations

import hashlib
import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from pantheraml.engine.step.step import Stepper
from pantheraml.models.adapters import trained_form
from pantheraml.models.load_finetuned import export_merged
from pantheraml.parallel.layout import make_layout
from pantheraml.parallel.process_group import World, open_world
from pantheraml.specs.parallel import ParallelDims
from pantheraml.specs.run_dir import RunDir
from pantheraml.specs.train import TrainConfig
from pantheraml.worker.train import build_model, save_result
from tests import toy
from tests.harness import make_plan, silent

ALONE = "one process"
MODES = {
    ALONE: ParallelDims(),
    "ddp x2": ParallelDims(replicate=2),
    "fsdp x2": ParallelDims(shard=2),
    "tp x2": ParallelDims(tensor=2),
    "pp x2": ParallelDims(pipeline=2),
    "cp x2": ParallelDims(context=2),
    "fsdp x4": ParallelDims(shard=4),
    "fsdp 2 x tp 2": ParallelDims(shard=2, tensor=2),
    "dp 2 x pp 2": ParallelDims(replicate=2, pipeline=2),
}
KINDS = ("full", "tied full", "lora", "dora")

ODD = {"hidden_size": 30, "intermediate_size": 50, "num_attention_heads": 2, "head_dim": 10, "vocab_size": 323}
"""Half of each is odd, so that the quarters under FSDP x TP are uneven."""
RANK = 3
"""LoRA rank: one of four shards is empty."""


def write_inputs(root: Path) -> None:
    toy.write_llama(root / "full", **ODD)
    toy.write_llama(root / "tied full", **ODD, tie_word_embeddings=True)


def config_of(kind: str, root: Path) -> TrainConfig:
    return TrainConfig.model_validate(
        {
            "model": {"path": str(root / (kind if "full" in kind else "full"))},
            "data": {"path": str(root)},
            "method": {"kind": kind.removeprefix("tied "), "rank": RANK},
            "train": {"global_batch_size": 8},
            "device": "cpu",
        }
    )


def stack_position(mode: str, kind: str, root: Path) -> Path:
    return root / "saved" / mode / kind


def save(mode: str, kind: str, root: Path, world: World) -> None:
    config = config_of(kind, root)
    plan = make_plan(config, dims=world.layout.dims)
    model = build_model(config, plan, world, silent)
    fix_adapters(model)
    save_result(RunDir(stack_position(mode, kind, root)), config, Stepper(model, config, world, plan).setup(), silent)


@torch.no_grad()
def fix_adapters(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7])
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)))


def merge(mode: str, kind: str, root: Path) -> None:
    config, place = config_of(kind, root), stack_position(mode, kind, root)
    form = trained_form(config.method)
    cpu = torch.device("cpu")
    export_merged(config.model, config.method, place / form, dtype=torch.float32, device=cpu, output=place / "merged")


def main() -> None:
    root, size = Path(sys.argv[1]), int(sys.argv[2])
    modes = {mode: dims for mode, dims in MODES.items() if dims.world_size == size}
    saved = [(mode, kind) for mode in modes for kind in KINDS]
    with open_world(make_plan(config_of("full", root), world=size), timeout_seconds=300) as world:
        layouts = {mode: make_layout(dims, "cpu") for mode, dims in modes.items()}
        for mode, kind in saved:
            save(mode, kind, root, replace(world, layout=layouts[mode]))
        world.wait_for_main()
    # Each rank merges some, outside of the process group: inside, transformers lets only rank 0 write.
    for mode, kind in saved[world.rank :: size]:
        merge(mode, kind, root)


if __name__ == "__main__":
    main()
