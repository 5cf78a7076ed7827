"""Helpers for tests that run the training worker directly, without the command line."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pantheraml.base.event_stream import EventWriter
from pantheraml.base.events import EventBase
from pantheraml.data.dataset import TokenDataset
from pantheraml.data.order import step_samples
from pantheraml.data.prepare import prepare
from pantheraml.engine.guard.watchdog import StopFlag
from pantheraml.models.loader import load_tokenizer
from pantheraml.parallel.process_group import open_world
from pantheraml.specs.parallel import ParallelDims
from pantheraml.specs.plan import Plan
from pantheraml.specs.run_dir import RunDir
from pantheraml.specs.train import TrainConfig
from pantheraml.worker.train import train_rank
from tests.event_log import raw_events


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two configurations, section by section."""
    return {key: {**base.get(key, {}), **changes.get(key, {})} for key in base.keys() | changes.keys()}


def make_plan(
    config: TrainConfig,
    *,
    world: int = 1,
    dims: ParallelDims | None = None,
    micro: int | None = None,
    device: Literal["cpu", "cuda"] = "cpu",
    precision: str = "fp32",
) -> Plan:
    """Build a plan without the planner, so that a test may use more processes than there are cores."""
    checkpointing = config.train.activation_checkpointing
    values = {
        "device": device,
        "device_ids": (0,) if device == "cuda" else (),
        "world_size": world if dims is None else dims.world_size,
        "dims": dims or ParallelDims(replicate=world),
        "backend": "gloo",
        "precision": "bf16" if precision == "fp8" else precision,
        "frozen_weights": "fp8" if precision == "fp8" else "nf4" if config.method.kind == "qlora" else None,
        "fused": config.train.fused == "on",
        "cuda_graph": config.train.cuda_graph == "on",
        "compile": config.train.compile == "on",
        "global_batch_size": config.train.global_batch_size,
        "micro_batch_size": micro or config.train.global_batch_size,
        "activation_checkpointing": "none" if checkpointing == "auto" else checkpointing,
        "threads_per_process": 1,
        "predicted_memory_bytes": None,
        "predicted_seconds": None,
        "choices": (),
    }
    return Plan.model_validate(values)


def make_run(path: Path, config: TrainConfig, plan: Plan) -> RunDir:
    """Create a run folder that is ready for the `train` task."""
    run = RunDir(path)
    run.mark()
    prepared = prepare(config.data, tokenizer=load_tokenizer(config.model), emit=silent)
    eval_path = None if prepared.eval is None else str(prepared.eval)
    data: dict[str, Any] = {"train": str(prepared.train), "eval": eval_path, "format": prepared.format}
    data["sources"] = [list(source) for source in prepared.sources]
    run.data_file.write_text(json.dumps(data))
    run.write_config(config)
    run.write_plan(plan)
    return run


def train_here(run: RunDir) -> list[dict[str, Any]]:
    """Train in this process and return the events of the run."""
    with open_world(run.plan(), timeout_seconds=60) as world, EventWriter(run.path) as emit:
        train_rank(run, run.config(), run.plan(), world, emit, StopFlag(run.stop_file))
    return raw_events(run.path)


def silent(event: EventBase, /) -> None:
    """An Emit that drops everything."""


def values(events: list[dict[str, Any]], kind: str, field: str) -> list[Any]:
    return [event[field] for event in events if event["kind"] == kind]


def seed_with(config: TrainConfig, sample: int, *, step: int) -> int:
    """Return the first seed that puts `sample` into `step` (from 0); the order also depends on the fingerprint."""
    data = TokenDataset.open(prepare(config.data, tokenizer=load_tokenizer(config.model), emit=silent).train)
    batch = config.train.global_batch_size
    return next(
        seed
        for seed in itertools.count()
        if sample in step_samples(data.fingerprint, seed, len(data), batch, step).tolist()
    )
