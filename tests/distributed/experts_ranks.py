"""Rank script of test_expert_balance: each case in one process and on all ranks, in one process group."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

from pantheraml.engine.trial import Trial, difference, trial
from pantheraml.parallel.process_group import World, open_world
from pantheraml.specs.parallel import ParallelDims
from pantheraml.specs.train import MethodConfig, TrainConfig
from pantheraml.worker.train import build_model
from tests.distributed.layouts import layout_of
from tests.distributed.matrix_ranks import dataset_of
from tests.harness import make_plan, silent

MODES = {"ddp": ParallelDims(replicate=2), "fsdp": ParallelDims(shard=2), "cp": ParallelDims(context=2)}


def config_of(root: Path, family: str, *, packed: bool) -> TrainConfig:
    return TrainConfig.model_validate(
        {
            "model": {"path": str(root / family)},
            "data": {
                "path": str(root / "data.jsonl"),
                "seq_len": 48,
                "packing": packed,
                "cache_dir": str(root / "cache"),
            },
            "method": {"kind": "full"},
            "train": {"global_batch_size": 7, "max_steps": 2, "learning_rate": 1e-2},
            "device": "cpu",
        }
    )


def with_adapters(config: TrainConfig, *, fused: str) -> TrainConfig:
    """LoRA on attention, router and stacked experts."""
    names = ("experts.gate_up_proj", "experts.down_proj")
    method = MethodConfig(kind="lora", rank=3, target_parameters=names)
    return config.model_copy(update={"method": method, "train": config.train.model_copy(update={"fused": fused})})


def steps(config: TrainConfig, world: World, dims: ParallelDims, micro: int | None) -> Trial:
    plan = make_plan(config, dims=dims, micro=micro)
    return trial(build_model(config, plan, world, silent), config, plan, world, dataset_of(config), steps=2)


def main() -> None:
    root, results = Path(sys.argv[1]), {}
    families = sys.argv[2:]
    first = config_of(root, families[0], packed=True)
    with open_world(make_plan(first, world=2), timeout_seconds=300) as world:
        here = World(rank=0, size=1, device=world.device)
        for number, family in enumerate(families):
            for mode, dims in MODES.items():
                # four passes on one rank and three on the other; and one on each
                for micro in (1, 4):
                    config = config_of(root, family, packed=(number + micro) % 2 == 0)
                    expected = steps(config, here, ParallelDims(), None)
                    found = steps(config, replace(world, layout=layout_of(dims, "cpu")), dims, micro)
                    if world.is_main:
                        losses = {"losses": found.losses, "expected": expected.losses}
                        results[f"{family} {mode} {micro}"] = {**asdict(difference(found, expected)), **losses}
            # against plain PEFT, which adds the adapters to the experts' weights
            config = with_adapters(config_of(root, family, packed=True), fused="auto")
            expected = steps(with_adapters(config, fused="off"), here, ParallelDims(), None)
            for mode in ("one", "ddp", "fsdp"):
                if mode == "one":
                    found = steps(config, here, ParallelDims(), None)
                else:
                    found = steps(config, replace(world, layout=layout_of(MODES[mode], "cpu")), MODES[mode], 1)
                if world.is_main:
                    losses = {"losses": found.losses, "expected": expected.losses}
                    results[f"{family} {mode} lora"] = {**asdict(difference(found, expected)), **losses}
        if world.is_main:
            (root / "results.json").write_text(json.dumps(results))
        world.wait_for_main()


if __name__ == "__main__":
    main()
