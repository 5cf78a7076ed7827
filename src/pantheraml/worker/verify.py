"""Task `verify`: compare the first steps of a run in every parallelism mode with a single process.

All modes run in the same processes, one after another. Rank 0 first takes the single-process steps, while the others
wait.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from pantheraml.base.errors import ConfigError, UnsupportedModelError
from pantheraml.base.event_stream import EventWriter
from pantheraml.base.events import Emit, VerifyProgress, silent
from pantheraml.base.folders import write_text
from pantheraml.data.dataset import TokenDataset
from pantheraml.engine.trial import Difference, Trial, configured_shares, difference, trial
from pantheraml.models.loader import read_config
from pantheraml.parallel.layout import ALONE, make_layout
from pantheraml.parallel.process_group import World, open_world
from pantheraml.planner.dims import check_together
from pantheraml.specs.parallel import ParallelDims
from pantheraml.specs.plan import Plan
from pantheraml.specs.run_dir import RunDir
from pantheraml.specs.tasks import ModeVerdict, Verdicts, VerifyRequest
from pantheraml.specs.train import TrainConfig
from pantheraml.worker.train import build_model, check_fits, open_data, rope_batching_reason

TOLERANCE = 1e-5
"""For loss and gradient in float32: the same sums in another order."""

WEIGHTS_FACTOR = 10
"""Weights may differ this much more: Adam divides a gradient by its own magnitude, so rounding errors of a gradient
near zero reach the weight at full strength."""

LOW_PRECISION_FACTOR = 2
"""In low precision, a mode may differ by this many times what another order of the same sums changes in one process."""


@dataclass(frozen=True)
class Tolerances:
    """Allowed difference of a mode's losses and gradients from those of one process."""

    default: float
    reason: str
    tensor_parallel: float
    """Larger with fp8 matmuls, where each rank quantizes its own part of a row."""

    def of(self, dims: ParallelDims) -> float:
        return self.tensor_parallel if dims.tensor > 1 else self.default


def verify_task(folder: Path, events: EventWriter) -> None:
    request = VerifyRequest.read(folder)
    run = RunDir(request.run_dir)
    config, plan = run.config(), run.plan()
    train_data, _ = open_data(run)
    timeout = config.parallel.timeout_seconds
    with open_world(plan, timeout_seconds=timeout, max_retries=config.parallel.max_retries) as world:
        verdicts = compare_modes(request, config, plan, world, train_data, events if world.is_main else silent)
        if verdicts is not None:
            write_text(folder / "verdicts.json", verdicts.model_dump_json(indent=1))
        world.wait_for_main()


def compare_modes(
    request: VerifyRequest, config: TrainConfig, plan: Plan, world: World, dataset: TokenDataset, emit: Emit
) -> Verdicts | None:
    """Return the verdicts on rank 0, None elsewhere. Collective."""
    single: Trial | None = None
    tolerances: Tolerances | None = None
    notes = differences_to_run(config, request.modes.values())
    config = comparable_config(config)
    alone = rope_batching_reason(read_config(config.model), [dataset])
    if alone is not None:
        notes.append(f"compared with one row in each micro-batch: {alone}")
        plan = plan.model_copy(update={"micro_batch_size": 1})
    if world.is_main:
        emit(VerifyProgress(done=0, total=len(request.modes), mode="one process"))

        def single_with(**changes: Any) -> Trial:
            rows = config.train.global_batch_size if alone is None else 1
            whole = _plan_for(ParallelDims(), plan, rows).model_copy(update=changes)
            return _trial(config, whole, _single_process(world), dataset, request.steps)

        single = single_with()
        tensor_parallel = any(dims.tensor > 1 for dims in request.modes.values())
        batched = alone is None
        tolerances = measure_tolerances(plan, single, single_with, tensor_parallel=tensor_parallel, batched=batched)
        if tolerances.tensor_parallel > tolerances.default:
            notes.append(
                f"allowed with tensor parallelism: {tolerances.tensor_parallel:.1e}, {LOW_PRECISION_FACTOR} times the"
                " effect of fp8 itself, since each rank quantizes its own part of a row"
            )
    world.wait_for_main()
    verdicts = []
    for number, (mode, dims) in enumerate(request.modes.items()):
        emit(VerifyProgress(done=number + 1, total=len(request.modes), mode=mode))
        verdict = ModeVerdict(mode=mode, dims=dims, batch_shares=configured_shares(config, dims))
        try:
            check_mode(config, dims)
            mode_world = replace(world, layout=make_layout(dims, world.device.type))
            result = _trial(config, _plan_for(dims, plan, plan.micro_batch_size), mode_world, dataset, request.steps)
        except (ConfigError, UnsupportedModelError) as err:  # the same on every rank, before any collective
            if request.explicit:
                raise
            verdicts.append(verdict.model_copy(update={"not_possible": err.what}))
            continue
        if single is not None and tolerances is not None:
            verdicts.append(_judge_mode(verdict, difference(result, single), result.seconds, tolerances.of(dims)))
    if single is None or tolerances is None:
        return None
    return Verdicts(
        device=world.device.type,
        precision=plan.precision,
        steps=request.steps,
        tolerance=tolerances.default,
        weights_tolerance=WEIGHTS_FACTOR * tolerances.default,
        tolerance_reason=tolerances.reason,
        seconds_of_one=single.seconds,
        notes=[*_dropout_note(single), *notes],
        modes=verdicts,
    )


def measure_tolerances(
    plan: Plan, single: Trial, single_with: Callable[..., Trial], *, tensor_parallel: bool, batched: bool = True
) -> Tolerances:
    """Fixed in float32, measured in one process otherwise. `single_with` reruns the steps with a changed plan.

    Rows one by one are the other order of the sums; if `single` took them so (not `batched`), float32 is compared.
    """
    in_fp8 = plan.frozen_weights == "fp8" or plan.fp8_matmuls
    if plan.precision == "fp32" and not in_fp8:
        return Tolerances(TOLERANCE, "float32: the same sums in another order", TOLERANCE)
    other: dict[str, Any] = {"micro_batch_size": 1} if batched else {"precision": "fp32"}
    default = _measure(single_with(**other), single)
    name = "fp8" if in_fp8 else plan.precision
    change = "another order of the same sums" if batched else "computing in float32"
    reason = f"{name}: {LOW_PRECISION_FACTOR} times what {change} changes in one process"
    sharded = _measure(single_with(frozen_weights=None), single) if in_fp8 and tensor_parallel else default
    return Tolerances(default, reason, max(default, sharded))


def _measure(other: Trial, single: Trial) -> float:
    diff = difference(other, single)
    return max(TOLERANCE, LOW_PRECISION_FACTOR * max(diff.loss, diff.gradient))


def comparable_config(config: TrainConfig) -> TrainConfig:
    """Return `config` with mean aggregation, the only one that matches a single process."""
    parallel = replace(config.parallel, aggregation="mean", aggregation_weights=None)
    return config.model_copy(update={"parallel": parallel})


def differences_to_run(config: TrainConfig, modes: Iterable[ParallelDims]) -> list[str]:
    """Notes on how the comparison differs from the config."""
    notes, parallel = [], config.parallel
    if parallel.aggregation != "mean":
        notes.append(
            f"compared with parallel.aggregation=mean: {parallel.aggregation} does not match a single process by design"
        )
    if isinstance(parallel.batch_shares, list) and all(configured_shares(config, dims) is None for dims in modes):
        sizes = ",".join(map(str, parallel.batch_shares))
        notes.append(
            f"compared with even batch shares: no mode has {len(parallel.batch_shares)} data-parallel ranks for"
            f" batch_shares={sizes}"
        )
    return notes


def _dropout_note(single: Trial) -> list[str]:
    names = ", ".join(sorted(single.without))
    return [f"compared without dropout ({names}): each rank has its own RNG state"] if names else []


def check_mode(config: TrainConfig, dims: ParallelDims) -> None:
    """Raise ConfigError for modes that training rejects; uneven batch shares are compared where they apply."""
    parallel = replace(config.parallel, batch_shares="even", leave_out_nonfinite=False)
    check_together(config.model_copy(update={"parallel": parallel}), dims)


def _judge_mode(verdict: ModeVerdict, diff: Difference, seconds: float, tolerance: float) -> ModeVerdict:
    # written so that NaN fails
    passed = diff.loss <= tolerance and diff.gradient <= tolerance and diff.weights <= WEIGHTS_FACTOR * tolerance
    measured = {"loss": diff.loss, "gradient": diff.gradient, "weights": diff.weights}
    return verdict.model_copy(update={**measured, "seconds": seconds, "passed": passed})


def _single_process(world: World) -> World:
    return World(rank=0, size=1, device=world.device, layout=ALONE)


def _plan_for(dims: ParallelDims, plan: Plan, micro_batch: int) -> Plan:
    """Return `plan` for a mode, without single-process optimizations."""
    changes = {"dims": dims, "world_size": dims.world_size, "micro_batch_size": micro_batch}
    plain = {"cuda_graph": False, "compile": False, "fused": plan.fused and dims.world_size == dims.replicate}
    return plan.model_copy(update={**changes, **plain})


def _trial(config: TrainConfig, plan: Plan, world: World, dataset: TokenDataset, steps: int) -> Trial:
    torch.manual_seed(config.train.seed)
    model = build_model(config, plan, world, silent)
    check_fits(model, dataset)
    result = trial(model, config, plan, world, dataset, steps=steps)
    del model
    gc.collect()  # models contain reference cycles, and the next mode needs the memory
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
    return result
