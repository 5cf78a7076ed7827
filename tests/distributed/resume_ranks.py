"""Rank script of test_resume: legs of runs, in one process group, each with its own parallel layout.

A leg is one start of a run: on the ranks of its `dims` (all, or only the first), up to the step at which a stop is
requested, or to the end.
"""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from pantheraml.base import env
from pantheraml.base.event_stream import EventWriter
from pantheraml.base.events import EventBase
from pantheraml.checkpoint.store import CheckpointStore
from pantheraml.engine.guard.watchdog import StopFlag
from pantheraml.engine.job import Job
from pantheraml.engine.loop import TrainingLoop
from pantheraml.engine.step.feed import StepBatches
from pantheraml.engine.step.step import Begun, Stepper
from pantheraml.parallel.process_group import World, open_world
from pantheraml.specs.parallel import ParallelDims
from pantheraml.specs.run_dir import RunDir
from pantheraml.worker.train import build_model, open_data, save_result
from tests.distributed.layouts import layout_of
from tests.harness import make_plan, silent


class RecordingStepper(Stepper):
    """Stepper that records the samples of each step."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.samples: list[list[int]] = []

    def begin(self, batches: StepBatches, **arguments: Any) -> Begun:
        self.samples.append(batches.sample_ids.tolist())
        return super().begin(batches, **arguments)


def run_leg(run: RunDir, leg: dict[str, Any], world: World) -> None:
    config, dims = run.config(), ParallelDims(**leg["dims"])
    config = config.model_copy(update={"train": config.train.model_copy(update=leg.get("train", {}))})
    precision = "fp32" if config.model.precision == "auto" else config.model.precision
    plan = make_plan(config, dims=dims, micro=leg["micro"], precision=precision)
    run.stop_file.unlink(missing_ok=True)
    torch.manual_seed(config.train.seed + world.layout.data_rank)
    with ExitStack() as stack:
        events = stack.enter_context(EventWriter(run.path, rank=world.rank))

        def emit(event: EventBase, /) -> None:
            kind, fields = event.kind, event.model_dump()
            events(event)
            if kind == "train.step" and fields["step"] + 1 == leg["stop_at"]:
                run.stop_file.touch()  # noticed in the next step, which is the last

        emit_events = emit if world.is_main else silent
        stepper = RecordingStepper(build_model(config, plan, world, silent), config, world, plan).setup()
        train_data, eval_data = open_data(run)
        stop = StopFlag(run.stop_file)
        loop = TrainingLoop(Job(config, plan, run.path, stepper, train_data, eval_data, "model", emit_events, stop))
        loop.resume()
        first = loop.progress.step
        if first + 1 == leg["stop_at"]:
            run.stop_file.touch()
        world.wait_for_main()
        stopped_by = loop.run()
        assert (stopped_by == "request") == (leg["stop_at"] is not None), stopped_by
        if stopped_by != "request":
            save_result(run, config, stepper, emit_events)
    if world.is_main:
        with open(run.path / "samples.jsonl", "a") as file:
            for step, samples in enumerate(stepper.samples, start=first + 1):
                file.write(json.dumps({"step": step, "samples": samples}) + "\n")


def damage(checkpoint: Path) -> None:
    """Flip a bit of the last weights."""
    file = max(checkpoint.glob("weights*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def main() -> None:
    legs = json.loads(Path(sys.argv[1]).read_text())
    opening = make_plan(RunDir(Path(legs[0]["run"])).config(), world=env.process_rank().world_size)
    with open_world(opening, timeout_seconds=300) as world:
        for leg in legs:
            if "damage" in leg and world.is_main:
                damage(CheckpointStore(RunDir(Path(leg["run"])).checkpoints).path(leg["damage"]))
            alone = ParallelDims(**leg["dims"]).world_size == 1
            if alone and world.is_main:
                run_leg(RunDir(Path(leg["run"])), leg, World(rank=0, size=1, device=world.device))
            world.wait_for_main()
            if not alone:
                layout = layout_of(ParallelDims(**leg["dims"]), "cpu")
                run_leg(RunDir(Path(leg["run"])), leg, replace(world, layout=layout))
            world.wait_for_main()


if __name__ == "__main__":
    main()
