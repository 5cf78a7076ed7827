"""Task `verify`: the first steps of a run in every mode and in one process, and how far apart they are.

All modes use the same processes, one mode after another. Rank 0 takes the steps alone first, while the others wait.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from pantheraml.base.errors import ConfigError, UnsupportedModelError
from pantheraml.base.events import Emit, EventWriter
from pantheraml.base.folders import write_text
from pantheraml.data.dataset import TokenDataset
from pantheraml.engine.trial import Difference, Trial, difference, shares_by_hand, trial
from pantheraml.parallel.layout import ALONE, make_layout
from pantheraml.parallel.process_group import World, open_world
from pantheraml.planner.dims import check_together
from pantheraml.specs.parallel import ParallelDims
from pantheraml.specs.plan import Plan
from pantheraml.specs.run_dir import RunDir
from pantheraml.specs.tasks import ModeVerdict, Verdicts, VerifyRequest
from pantheraml.specs.train import TrainConfig
from pantheraml.worker.train import build_model, check_fits, open_data

TOLERANCE = 1e-5
"""Of loss and gradient in float32: the same sums in another order."""

WEIGHTS = 10
"""Adam divides a gradient by its own size, so one near zero brings its last digits into the weight at full strength."""

NARROW = 2
"""Where numbers are narrow, what one process makes of the same work in another way sets the measure, and a mode may be
this many times off."""


@dataclass(frozen=True)
class Allowed:
    """How far a mode's losses and gradients may be from those of one process."""

    usual: float
    reason: str
    cut_rows: float
    """Where matrices are cut and products are in fp8: each process rounds its own part of a row."""

    def of(self, dims: ParallelDims) -> float:
        return self.cut_rows if dims.tensor > 1 else self.usual


def verify_task(folder: Path, events: EventWriter) -> None:
    request = VerifyRequest.read(folder)
    run = RunDir(request.run_dir)
    config, plan = run.config(), run.plan()
    train_data, _ = open_data(run)
    patience = config.parallel.timeout_seconds
    with open_world(plan, timeout_seconds=patience, max_retries=config.parallel.max_retries) as world:
        verdicts = compare_modes(request, config, plan, world, train_data, events if world.is_main else _silent)
        if verdicts is not None:
            write_text(folder / "verdicts.json", verdicts.model_dump_json(indent=1))
        world.wait_for_main()


def _silent(kind: str, /, **fields: object) -> None:
    """Ranks other than 0 say nothing."""


def compare_modes(
    request: VerifyRequest, config: TrainConfig, plan: Plan, world: World, dataset: TokenDataset, emit: Emit
) -> Verdicts | None:
    """The verdicts, on rank 0. A collective."""
    alone: Trial | None = None
    allowed: Allowed | None = None
    notes = differences_to_run(config, request.modes.values())
    config = comparable(config)
    if world.is_main:
        emit("verify.progress", done=0, total=len(request.modes), mode="one process")

        def alone_with(**changes: Any) -> Trial:
            whole = _plan_for(ParallelDims(), plan, config.train.global_batch_size).model_copy(update=changes)
            return _trial(config, whole, _by_itself(world), dataset, request.steps)

        alone = alone_with()
        cuts_rows = any(dims.tensor > 1 for dims in request.modes.values())
        allowed = allowed_differences(plan, alone, alone_with, cuts_rows=cuts_rows)
        if allowed.cut_rows > allowed.usual:
            notes.append(
                f"allowed where matrices are cut: {allowed.cut_rows:.1e}, {NARROW} times what fp8 itself changes, since"
                " each process rounds its own part of a row"
            )
    world.wait_for_main()
    found = []
    for number, (mode, dims) in enumerate(request.modes.items()):
        emit("verify.progress", done=number + 1, total=len(request.modes), mode=mode)
        verdict = ModeVerdict(mode=mode, dims=dims, batch_shares=shares_by_hand(config, dims))
        try:
            check_mode(config, dims)
            there = replace(world, layout=make_layout(dims, world.device.type))
            made = _trial(config, _plan_for(dims, plan, plan.micro_batch_size), there, dataset, request.steps)
        except (ConfigError, UnsupportedModelError) as err:  # for the same reason on every rank, before they meet
            if request.asked:
                raise
            found.append(verdict.model_copy(update={"not_possible": err.what}))
            continue
        if alone is not None and allowed is not None:
            found.append(_judged(verdict, difference(made, alone), made.seconds, allowed.of(dims)))
    if alone is None or allowed is None:
        return None
    return Verdicts(
        device=world.device.type,
        precision=plan.precision,
        steps=request.steps,
        tolerance=allowed.usual,
        weights_tolerance=WEIGHTS * allowed.usual,
        tolerance_reason=allowed.reason,
        seconds_of_one=alone.seconds,
        notes=[*_about_dropout(alone), *notes],
        modes=found,
    )


def allowed_differences(plan: Plan, alone: Trial, alone_with: Callable[..., Trial], *, cuts_rows: bool) -> Allowed:
    """Measured in one process, where numbers are narrow: `alone_with` takes the steps again with another plan."""
    in_fp8 = plan.frozen_weights == "fp8" or plan.fp8_products
    if plan.precision == "fp32" and not in_fp8:
        return Allowed(TOLERANCE, "float32: the same sums in another order", TOLERANCE)
    usual = _measure(alone_with(micro_batch_size=1), alone)
    name = "fp8" if in_fp8 else plan.precision
    reason = f"{name}: {NARROW} times what another order of the same sums makes in one process"
    cut_rows = _measure(alone_with(frozen_weights=None), alone) if in_fp8 and cuts_rows else usual
    return Allowed(usual, reason, max(usual, cut_rows))


def _measure(other: Trial, alone: Trial) -> float:
    apart = difference(other, alone)
    return max(TOLERANCE, NARROW * max(apart.loss, apart.gradient))


def comparable(config: TrainConfig) -> TrainConfig:
    """`config` with the one aggregation that promises the result of one process."""
    parallel = replace(config.parallel, aggregation="mean", aggregation_weights=None)
    return config.model_copy(update={"parallel": parallel})


def differences_to_run(config: TrainConfig, modes: Iterable[ParallelDims]) -> list[str]:
    """What is compared differs in this from what the config says."""
    notes, parallel = [], config.parallel
    if parallel.aggregation != "mean":
        notes.append(
            f"compared with parallel.aggregation=mean: {parallel.aggregation} is not meant to equal one process"
        )
    if isinstance(parallel.batch_shares, list) and all(shares_by_hand(config, dims) is None for dims in modes):
        sizes = ",".join(map(str, parallel.batch_shares))
        notes.append(f"compared with even shares: no mode has {len(parallel.batch_shares)} for batch_shares={sizes}")
    return notes


def _about_dropout(alone: Trial) -> list[str]:
    names = ", ".join(sorted(alone.without))
    return [f"compared without dropout ({names}): each process draws its own"] if names else []


def check_mode(config: TrainConfig, dims: ParallelDims) -> None:
    """ConfigError where training would be refused; shares of a batch are compared as far as they go."""
    parallel = replace(config.parallel, batch_shares="even", leave_out_nonfinite=False)
    check_together(config.model_copy(update={"parallel": parallel}), dims)


def _judged(verdict: ModeVerdict, apart: Difference, seconds: float, tolerance: float) -> ModeVerdict:
    # written so that NaN fails
    passed = apart.loss <= tolerance and apart.gradient <= tolerance and apart.weights <= WEIGHTS * tolerance
    measured = {"loss": apart.loss, "gradient": apart.gradient, "weights": apart.weights}
    return verdict.model_copy(update={**measured, "seconds": seconds, "passed": passed})


def _by_itself(world: World) -> World:
    return World(rank=0, size=1, device=world.device, layout=ALONE)


def _plan_for(dims: ParallelDims, plan: Plan, micro_batch: int) -> Plan:
    """Without what is only for speed in one process."""
    changes = {"dims": dims, "world_size": dims.world_size, "micro_batch_size": micro_batch}
    plain = {"cuda_graph": False, "compile": False, "fused": plan.fused and dims.world_size == dims.replicate}
    return plan.model_copy(update={**changes, **plain})


def _trial(config: TrainConfig, plan: Plan, world: World, dataset: TokenDataset, steps: int) -> Trial:
    torch.manual_seed(config.train.seed)
    model = build_model(config, plan, world, _silent)
    check_fits(model, dataset)
    made = trial(model, config, plan, world, dataset, steps=steps)
    del model
    gc.collect()  # a model holds itself in cycles, and the next mode needs its memory
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
    return made
