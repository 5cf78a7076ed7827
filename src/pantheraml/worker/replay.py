"""Task `replay`: rerun the step of an incident in one process, with hooks on every module.

It uses the samples and micro-batches of that step and, if the incident saved them, its weights and RNG state; otherwise
the weights of the checkpoint before it, or the initial weights of the run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pantheraml.base.event_stream import EventWriter
from pantheraml.base.events import silent
from pantheraml.base.folders import write_text
from pantheraml.checkpoint.store import CheckpointStore
from pantheraml.data.dataset import TokenDataset
from pantheraml.engine.guard.decide import NOT_FOUND, PASSED
from pantheraml.engine.guard.incident import Finding, culprit, investigate, read_incident
from pantheraml.engine.guard.policy import StepNumbers
from pantheraml.engine.state.capture import load_weights
from pantheraml.engine.state.step_state import load_step_state
from pantheraml.engine.step.feed import StepBatches, read_batch
from pantheraml.engine.step.step import Stepper
from pantheraml.parallel.process_group import World, open_world
from pantheraml.parallel.shard_batch import shards
from pantheraml.specs.parallel import ParallelDims
from pantheraml.specs.run_dir import RunDir
from pantheraml.specs.tasks import ReplayRequest, ReplayResult
from pantheraml.worker.train import build_model, open_data

SPIKE_TOLERANCE = 0.05
"""Relative change of a spike allowed for another device, or one process instead of several; a spike is far larger."""


def replay_task(folder: Path, events: EventWriter) -> None:
    request = ReplayRequest.read(folder)
    with open_world(request.plan, timeout_seconds=60) as world:
        write_text(folder / "replay.json", replay_incident(request, world).model_dump_json(indent=1))


def replay_incident(request: ReplayRequest, world: World) -> ReplayResult:
    run = RunDir(request.run_dir)
    config = run.received_config(request.consent)
    incident, recorded = read_incident(request.incident)
    dataset, _ = open_data(run, untrusted=True)
    stepper = Stepper(build_model(config, request.plan, world, silent), config, world, request.plan).setup()
    stepper.model.train()
    weights = _load_weights(stepper, run, request.incident, incident)
    batches = _batches(dataset, incident, world)
    report = stepper.backward(batches, stop_requested=False)
    then, now = culprit(recorded), culprit(investigate(stepper, batches))
    passed, step = not incident["persistent"], {"step": incident["step"], "cause": incident["verdict"]["cause"]}
    if not passed and incident["verdict"]["anomaly"] in ("spike", "jump"):
        numbers = _numbers(incident)
        return ReplayResult(
            **step,
            recorded=_format_numbers(numbers),
            found=str(now) if now is not None else _format_numbers(report.numbers),
            weights=weights,
            loss=f"{report.numbers.loss:.6g}",
            same=now is None and _close(numbers, report.numbers),
        )
    return ReplayResult(
        **step,
        recorded=str(then) if then is not None else PASSED if passed else NOT_FOUND,
        found=str(now) if now is not None else NOT_FOUND,
        weights=weights,
        loss=f"{report.numbers.loss:.6g}",
        same=_same_finding(then, now) and (now is not None or report.numbers.finite == passed),
    )


def _numbers(incident: Mapping[str, Any]) -> StepNumbers:
    values = incident["numbers"]
    return StepNumbers(**{**values, "left_out": tuple(values["left_out"])})


def _format_numbers(numbers: StepNumbers) -> str:
    return f"loss {numbers.loss:.6g}, gradient norm {numbers.grad_norm:.6g}"


def _close(then: StepNumbers, now: StepNumbers) -> bool:
    return math.isclose(then.loss, now.loss, rel_tol=SPIKE_TOLERANCE) and math.isclose(
        then.grad_norm, now.grad_norm, rel_tol=SPIKE_TOLERANCE
    )


def _load_weights(stepper: Stepper, run: RunDir, path: Path, incident: Mapping[str, Any]) -> str:
    """Load the available weights closest to the start of the step; return which they are."""
    if incident["kept"] is not None:
        load_step_state(path.with_name(incident["kept"]), stepper)
        return "the weights of that step"
    store, before = CheckpointStore(run.checkpoints), incident["step"] - 1
    earlier = [step for step in store.steps() if step <= before]
    if not earlier:
        return "the initial weights of the run"
    load_weights(stepper, store.load(earlier[-1]))
    return "the weights of that step" if earlier[-1] == before else f"the weights of step {earlier[-1]}"


def _batches(dataset: TokenDataset, incident: Mapping[str, Any], world: World) -> StepBatches:
    """Micro-batches of all ranks of the incident, one after another."""
    ids = np.array(incident["samples"], dtype=np.int64)
    ranks = ParallelDims.model_validate(incident["dims"]).data
    parts = [part for own in shards(ids, ranks, micro_batch=incident["micro_batch_size"]) for part in own]
    micro_batches = [read_batch(dataset, part, world) for part in parts]
    return StepBatches(ids, int(dataset.target_tokens(ids).sum()), micro_batches, parts)


def _same_finding(then: Finding | None, now: Finding | None) -> bool:
    if then is None or now is None:
        return then is now
    where = [(finding.phase, finding.module, finding.tensor) for finding in (then, now)]
    return where[0] == where[1] and bool(set(then.samples) & set(now.samples))
