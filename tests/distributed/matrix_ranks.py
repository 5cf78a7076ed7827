"""Rank script of test_equality_matrix: every case for a given world size, in one process group."""

from __future__ import annotations

import json
import pickle
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from pantheraml.data.dataset import TokenDataset
from pantheraml.data.prepare import prepare
from pantheraml.engine.trial import Trial, difference, trial
from pantheraml.models.loader import load_tokenizer
from pantheraml.parallel.process_group import World, open_world
from pantheraml.specs.plan import Plan
from pantheraml.specs.train import TrainConfig
from pantheraml.worker.train import build_model
from tests.distributed.layouts import layout_of
from tests.distributed.matrix import STEPS, Case, chosen, full
from tests.harness import make_plan, silent


def dataset_of(config: TrainConfig) -> TokenDataset:
    return TokenDataset.open(prepare(config.data, tokenizer=load_tokenizer(config.model), emit=silent).train)


def alone(case: Case, root: Path, world: World) -> Trial:
    config = case.config(root)
    here = World(rank=0, size=1, device=world.device)
    return steps_of(case, config, case.plan(config, alone=True), here)


def together(case: Case, root: Path, world: World) -> Trial:
    config = case.config(root)
    there = replace(world, layout=layout_of(case.dims, "cpu"))
    return steps_of(case, config, case.plan(config), there)


def steps_of(case: Case, config: TrainConfig, plan: Plan, world: World) -> Trial:
    model = build_model(config, plan, world, silent)
    if case.numbers == "float64":
        model.double()
    return trial(model, config, plan, world, dataset_of(config), steps=STEPS)


def references(cases: list[Case], root: Path, world: World) -> dict[tuple[Any, ...], Trial]:
    """Single-process results of each case, gathered on rank 0; the ranks compute some each."""
    wanted = {case.reference(): case for case in cases}
    places = {reference: root / f"reference-{world.size}-{number}" for number, reference in enumerate(wanted)}
    for number, (reference, case) in enumerate(wanted.items()):
        if number % world.size == world.rank:
            places[reference].write_bytes(pickle.dumps(alone(case, root, world)))
    world.wait_for_main()
    return {name: pickle.loads(place.read_bytes()) for name, place in places.items()} if world.is_main else {}


def main() -> None:
    root, size = Path(sys.argv[1]), int(sys.argv[2])
    cases = [case for case in (full() if sys.argv[3] == "full" else chosen()) if case.dims.world_size == size]
    results = {}
    with open_world(make_plan(cases[0].config(root), world=size), timeout_seconds=300) as world:
        one_process = references(cases, root, world)
        for case in cases:
            found = together(case, root, world)
            if world.is_main:
                expected = one_process[case.reference()]
                losses = {"losses": found.losses, "expected": expected.losses}
                results[str(case)] = {**asdict(difference(found, expected)), **losses}
                (root / f"results-{size}.json").write_text(json.dumps(results))
        world.wait_for_main()


if __name__ == "__main__":
    main()
