"""What each process of the equality matrix runs: every case of its number of processes, in one process group."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from pantheraml.data.dataset import TokenDataset
from pantheraml.data.prepare import prepare
from pantheraml.engine.trial import Trial, difference, trial
from pantheraml.models.loader import load_tokenizer
from pantheraml.parallel.layout import make_layout
from pantheraml.parallel.process_group import World, open_world
from pantheraml.specs.train import TrainConfig
from pantheraml.worker.train import build_model
from tests.distributed.matrix import STEPS, Case, chosen, full
from tests.harness import make_plan, silent


def dataset_of(config: TrainConfig) -> TokenDataset:
    return TokenDataset.open(prepare(config.data, tokenizer=load_tokenizer(config.model), emit=silent).train)


def alone(case: Case, root: Path, world: World) -> Trial:
    config = case.config(root)
    here = World(rank=0, size=1, device=world.device)
    plan = make_plan(config)
    return trial(build_model(config, plan, here, silent), config, plan, here, dataset_of(config), steps=STEPS)


def together(case: Case, root: Path, world: World) -> Trial:
    config = case.config(root)
    plan = case.plan(config)
    there = replace(world, layout=make_layout(case.dims, "cpu"))
    return trial(build_model(config, plan, there, silent), config, plan, there, dataset_of(config), steps=STEPS)


def main() -> None:
    root, size = Path(sys.argv[1]), int(sys.argv[2])
    cases = [case for case in (full() if sys.argv[3] == "full" else chosen()) if case.dims.world_size == size]
    references: dict[tuple[Any, ...], Trial] = {}
    results = {}
    with open_world(make_plan(cases[0].config(root), world=size), timeout_seconds=120) as world:
        for case in cases:
            if world.is_main and case.reference() not in references:
                references[case.reference()] = alone(case, root, world)
            world.wait_for_main()
            found = together(case, root, world)
            if world.is_main:
                expected = references[case.reference()]
                results[str(case)] = {**asdict(difference(found, expected)), "losses": expected.losses}
                (root / f"results-{size}.json").write_text(json.dumps(results))
        world.wait_for_main()


if __name__ == "__main__":
    main()
