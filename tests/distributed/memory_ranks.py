"""Rank script of test_planned_memory: trains one step of every case, and counts the bytes of each rank."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

from pantheraml.data.dataset import TokenDataset
from pantheraml.data.prepare import prepare
from pantheraml.engine.step.step import Stepper
from pantheraml.engine.trial import trial_feed
from pantheraml.models.loader import load_tokenizer
from pantheraml.parallel.process_group import World, open_world
from pantheraml.worker.train import build_model
from tests.distributed.layouts import layout_of
from tests.distributed.memory_cases import CASES, MemoryCase, counted, predicted
from tests.harness import make_plan, silent


def compare(case: MemoryCase, root: Path, world: World) -> dict[str, dict[str, int]]:
    config = case.config(root)
    plan = case.plan(config)
    there = replace(world, layout=layout_of(plan.dims, "cpu"))
    model = build_model(config, plan, there, silent)
    stepper = Stepper(model, config, there, plan).setup()
    dataset = TokenDataset.open(prepare(config.data, tokenizer=load_tokenizer(config.model), emit=silent).train)
    model.train()
    with trial_feed(dataset, there, config, plan) as feed:
        report = stepper.backward(feed.step(0), stop_requested=False)
    gradients = counted(stepper)["gradients"]
    stepper.apply(report.numbers, 1e-4)
    found = counted(stepper) | {"gradients": gradients}
    return {"counted": found, "predicted": predicted(case, root, there.layout.coordinates)}


def main() -> None:
    root, size = Path(sys.argv[1]), int(sys.argv[2])
    cases = {name: case for name, case in CASES.items() if case.ranks == size}
    first = next(iter(cases.values())).config(root)
    with open_world(make_plan(first, world=size), timeout_seconds=300) as world:
        found = {name: compare(case, root, world) for name, case in cases.items()}
        (root / f"rank-{size}-{world.rank}.json").write_text(json.dumps(found))
        world.wait_for_main()


if __name__ == "__main__":
    main()
