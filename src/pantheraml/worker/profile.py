"""Task `profile`: the first steps of a run under a profiler, with its plan and on all of its ranks."""

from __future__ import annotations

from pathlib import Path

import torch

from pantheraml.base.event_stream import EventWriter
from pantheraml.base.events import Emit, silent
from pantheraml.base.folders import write_text
from pantheraml.engine.job import run_length
from pantheraml.engine.memory.oom import explain
from pantheraml.engine.profile import profile_steps
from pantheraml.parallel.process_group import open_world
from pantheraml.specs.run_dir import RunDir
from pantheraml.specs.tasks import ProfileRequest
from pantheraml.worker.train import (
    build_model,
    check_fits,
    open_data,
    plan_for_padded_rows,
    resolve_learning_rate,
    resolve_rope_batching,
)


def profile_task(folder: Path, events: EventWriter) -> None:
    request = ProfileRequest.read(folder)
    run = RunDir(request.run_dir)
    config, plan = run.config(), run.plan()
    data, _ = open_data(run)
    timeout = config.parallel.timeout_seconds
    with open_world(plan, timeout_seconds=timeout, max_retries=config.parallel.max_retries) as world:
        emit: Emit = events if world.is_main else silent
        torch.manual_seed(config.train.seed)
        if config.data.packing and not data.packed:
            plan = plan_for_padded_rows(config, plan, emit)
        model = build_model(config, plan, world, emit, packed=data.packed)
        check_fits(model, data)
        plan = resolve_rope_batching(model, config, plan, [data], emit)
        config = resolve_learning_rate(model, config, run_length(config, len(data)).steps, emit)
        trace = folder / "trace.json" if request.trace else None
        try:
            result = profile_steps(
                model, config, plan, world, data, steps=request.steps, warmup=request.warmup, trace=trace
            )
        except torch.OutOfMemoryError as err:
            raise explain(err, config, plan) from err
        if result is not None:
            write_text(folder / "profile.json", result.model_dump_json(indent=1))
        world.wait_for_main()
