"""Plan a run with predictions: the rules' choices, compared with every other plan that the configuration leaves open.

Where the model or the GPU is not known, and on CPUs, the rules decide alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pantheraml.base.env import ProcessRank
from pantheraml.base.errors import OutOfMemoryError
from pantheraml.planner.candidates import (
    Candidate,
    Problem,
    alternatives_to,
    candidate,
    fits,
    is_open,
    may_quantize,
    needed_bytes,
    of_plan,
)
from pantheraml.planner.choose import choose
from pantheraml.planner.decided import Decided
from pantheraml.planner.facts import UNFUSED, DeviceFacts, ModelFacts, device_facts, model_facts
from pantheraml.planner.memory import why_not_predicted
from pantheraml.planner.step_time import NO_RATES, NO_SIZES, why_no_time
from pantheraml.planner.suggestions import suggestions
from pantheraml.specs.parallel import ParallelDims
from pantheraml.specs.plan import DeviceSpec, Plan
from pantheraml.specs.prediction import Alternative, MemoryPrediction, Prediction
from pantheraml.specs.train import TrainConfig

CLEARLY_FASTER = 1.10
"""A plan must be predicted to be that much faster to replace the rules', which fits."""
WORTH_ITS_EFFORT = 1.2
"""More complicated parallelism must be predicted to be that much faster: as much as a predicted time may be wrong."""
AS_FAST = 1.03
"""Among plans about as fast as the fastest, the simplest is taken."""
CERTAIN_SHARE = 0.94
"""Fraction of a prediction that is certainly needed; a run on less memory is refused."""
WEIGHTS_SHARE = 0.9
"""Fraction of the memory that weights may take, if no other need is known."""
SHOWN = 6
"""Alternatives that a plan keeps."""
TOO_LARGE_SHOWN = 2
"""Alternatives that do not fit, among these."""
LOOKED_AT = 16
"""Kinds of alternatives that they are taken from, besides those whose memory is known already."""


@dataclass(frozen=True)
class Outlook:
    """Facts besides configuration and hardware; None: not known."""

    sequences: float | None = None
    """Sequences of an epoch, packed ones if the run packs."""
    dollars_per_hour: float | None = None
    """Price of a GPU."""


NOTHING = Outlook()


def plan_run(
    config: TrainConfig,
    devices: DeviceSpec,
    place: ProcessRank | None = None,
    *,
    model: ModelFacts | None = None,
    hardware: DeviceFacts | None = None,
    outlook: Outlook = NOTHING,
    resumed: Plan | None = None,
    total_memory: bool = False,
) -> Plan:
    """Plan a run. `model`, `hardware`: facts that are not read from the configured model folder or from `devices`.

    `resumed`: plan of the run that is continued, whose frozen weights keep their format. `total_memory`: plan for a
    moment at which nobody else uses the GPUs.

    OutOfMemoryError, with the cheapest changes that would fit, if no plan can fit into the GPUs' memory.
    """
    start = _as_before(config, resumed)
    rules = choose(config, devices, place, start)
    if rules.device == "cpu":
        return rules
    model = model or model_facts(config.model)
    used = [gpu for gpu in devices.gpus if gpu.index in rules.device_ids]
    hardware = hardware or device_facts(
        used,
        memory_fraction=config.parallel.memory_fraction,
        total_memory=total_memory or place is not None,
        calibrated=place is None,
    )
    if model.shapes is None:
        return _unpredicted(rules, f"memory and time are not predicted: {model.why_unknown}")
    problem = Problem(config, devices, place, model.shapes, model, hardware)
    base = of_plan(problem, start, rules)
    if base.fits is None and _fits_uncompiled(base) is not False:
        why = (
            why_not_predicted(model.shapes, base.setting, capability=problem.capability)
            or "the memory of the GPU is not known"
        )
        chosen = _by_weights_alone(base, may_change=resumed is None)
        if chosen.setting.fused and (unfused := UNFUSED.get(model.family or "")) is not None:
            why += f"; whatever train.fused says, layers of {model.family} do not run fused ({unfused})"
        weights = sum(model.shapes.frozen_bytes(chosen.setting.frozen_weights or "bf16").values())
        why += f"; all weights together take {_gib(weights)} as this plan stores them"
        if _fits_uncompiled(base):
            why += ", but it would fit even without compiling"
        return _finished(chosen, (), outlook, (f"memory is not predicted, so the rules decide: {why}",))
    compared = _compared(base, quantize=resumed is None)
    best = _best(base, compared)
    if best is None:
        _refuse_if_certain(base, compared)
        best = min(compared, key=lambda each: _needed(each.memory))
    chosen = _decided(base, best)
    others = [each for each in compared if each is not best]
    faster = _faster_quantized(base, best) if resumed is None else None
    warnings = [] if chosen.fits else [_close_call(chosen)]
    warnings += _told_of_unlike_gpus(rules, devices)
    finished = _finished(
        chosen, _alternatives(chosen, others, faster), outlook, (f"sizes of the model: {model.source}",)
    )
    return finished.model_copy(update={"warnings": (*finished.warnings, *warnings)}) if warnings else finished


def _fits_uncompiled(base: Candidate) -> bool | None:
    """Whether the rules' plan, whose memory is not known, would fit if its layers were not compiled, which saves some.

    None: that is not known, either.
    """
    return fits(base.problem.memory(base.setting.model_copy(update={"compile": False})))


def _by_weights_alone(base: Candidate, *, may_change: bool) -> Candidate:
    """The rules' plan, or a leaner one if it cannot even hold the weights. For plans whose memory is not predicted."""
    setting, capacity = base.setting, base.problem.hardware.capacity_bytes
    if capacity is None or setting.dims.model_is_sharded or setting.devices_per_process > 1:
        return base
    weights = base.problem.shapes.frozen_bytes(setting.frozen_weights or "bf16")
    size = sum(weights.values())
    if size <= WEIGHTS_SHARE * capacity:
        return base
    why = f"the weights alone need {_gib(size)} of {_gib(capacity)}"
    if not (may_change and may_quantize(base.problem.config, setting)):
        quantize = "" if setting.frozen_weights == "nf4" else "method.kind=qlora, "
        raise OutOfMemoryError(
            f"This run does not fit into the GPU's memory: {why}.",
            fix=f"Use {quantize}parallel.shard=N on N GPUs, a larger GPU or a smaller model.",
        )
    auto = base.problem.config.train.activation_checkpointing == "auto"
    reasons = {"model.precision": why, "frozen_weights": why, "train.activation_checkpointing": why}
    decided = Decided(frozen_weights="nf4", checkpointing="full" if auto else None, reasons=reasons)
    leaner = candidate(base.problem, decided)
    return base if leaner is None else _by_weights_alone(leaner, may_change=False)


def _as_before(config: TrainConfig, resumed: Plan | None) -> Decided:
    if resumed is None or config.model.precision != "auto" or config.method.kind != "lora":
        return Decided()
    if resumed.frozen_weights not in ("int8", "nf4"):
        return Decided()
    reasons = dict.fromkeys(("model.precision", "frozen_weights"), "as before the run was interrupted")
    return Decided(frozen_weights=resumed.frozen_weights, reasons=reasons)


def _compared(base: Candidate, *, quantize: bool) -> list[Candidate]:
    """All plans with the frozen weights as the rules have them; with 4-bit ones if none of those fits."""
    found = [base, *(each for each in alternatives_to(base) if each.setting != base.setting)]
    found.sort(key=lambda each: (each.ranking_seconds, each.effort))  # memory is predicted for the first ones only
    if quantize and not any(each.fits for each in found):
        found += alternatives_to(base, quantized=True)
    return found


def _best(base: Candidate, compared: list[Candidate]) -> Candidate | None:
    """`compared`: the fastest first."""
    fastest = next((each for each in compared if each.fits), None)
    if fastest is None:
        return None
    if base.fits and base.ranking_seconds <= CLEARLY_FASTER * fastest.ranking_seconds:
        return base
    simple = fastest
    for each in compared:
        if each.ranking_seconds > WORTH_ITS_EFFORT * fastest.ranking_seconds:
            break
        if each.parallel_effort < simple.parallel_effort and each.fits:
            simple = each  # the fastest of its kind, as the fastest come first
    near = (each for each in compared if each.ranking_seconds <= AS_FAST * simple.ranking_seconds)
    return min((each for each in near if each.fits), key=lambda each: each.effort)


def _needed(memory: MemoryPrediction | None) -> float:
    return math.inf if memory is None else needed_bytes(memory)


def _decided(base: Candidate, best: Candidate) -> Candidate:
    """The candidate with the reasons why it takes the rules' place."""
    if best is base:
        return base
    memory = base.memory
    if base.fits:
        why = f"predicted to be {base.ranking_seconds / best.ranking_seconds:.2f} times as fast"
    elif memory is None:
        why = f"{describe(base)} would not fit"
    else:
        need, there_is = _gib(_needed(memory)), _gib(memory.capacity_bytes or 0)
        why = f"{describe(base)} would need {need} of {there_is}"
    names = {
        "parallel": best.decided.dims,
        "train.activation_checkpointing": best.decided.checkpointing,
        "train.micro_batch_size": best.decided.micro_batch,
        "model.precision": best.decided.frozen_weights,
        "frozen_weights": best.decided.frozen_weights,
    }
    reasons = {name: why for name, value in names.items() if value is not None}
    decided = Decided(
        best.decided.dims,
        best.decided.checkpointing,
        best.decided.micro_batch,
        best.decided.frozen_weights,
        reasons,
    )
    again = candidate(base.problem, decided)
    assert again is not None
    return again


def _finished(
    chosen: Candidate, alternatives: tuple[Alternative, ...], outlook: Outlook, sources: tuple[str, ...]
) -> Plan:
    prediction = _prediction(chosen, outlook, sources)
    memory = prediction.memory
    return chosen.plan.model_copy(
        update={
            "prediction": prediction,
            "alternatives": alternatives,
            "predicted_memory_bytes": None if memory is None else memory.allocated_bytes,
            "predicted_seconds": prediction.total_seconds,
        }
    )


def _prediction(chosen: Candidate, outlook: Outlook, sources: tuple[str, ...]) -> Prediction:
    plan, time, rates = chosen.plan, chosen.time, chosen.problem.hardware.rates
    steps = total_steps(chosen.problem.config, outlook.sequences)
    total = None if time is None or steps is None else steps * time.seconds
    hours = None if total is None else plan.world_size * total / 3600
    watts = None if rates is None else rates.watts
    told = [*sources, *(time.sources if time is not None else (_why_no_time(chosen),))]
    if time is None and (least := chosen.least_seconds) is not None:
        told.append(f"plans are compared by the peaks of the data sheets, by which a step takes at least {least:.3g} s")
    if hours is not None and watts is not None:
        told.append(f"energy: {watts:.0f} W per GPU throughout, the GPUs alone")
    return Prediction(
        memory=chosen.memory,
        step_seconds=None if time is None else time.seconds,
        total_seconds=total,
        energy_kwh=None if hours is None or watts is None else hours * watts / 1000,
        dollars=None if hours is None or outlook.dollars_per_hour is None else hours * outlook.dollars_per_hour,
        steps=steps,
        time_parts={} if time is None else time.parts,
        sources=tuple(told),
    )


def _why_no_time(chosen: Candidate) -> str:
    hardware = chosen.problem.hardware
    if hardware.rates is None:
        return f"time is not predicted: {NO_RATES}"
    given, _ = chosen.problem.time_inputs
    unlike = chosen.problem.shapes.unlike
    no_sizes = NO_SIZES if unlike is None else f"the model has {unlike}"
    foreign = chosen.problem.model.why_other_kernels(fused=chosen.setting.fused)
    why = no_sizes if given is None else foreign or why_no_time(chosen.setting, given)
    return f"time is not predicted: {why}"


def total_steps(config: TrainConfig, sequences: float | None) -> int | None:
    """Steps of the whole run; None: not known."""
    if config.train.max_steps is not None:
        return config.train.max_steps
    if sequences is None:
        return None
    return max(1, math.ceil(sequences * config.train.epochs / config.train.global_batch_size))


def _unpredicted(plan: Plan, why: str) -> Plan:
    prediction = Prediction(
        memory=None, step_seconds=None, total_seconds=None, energy_kwh=None, dollars=None, sources=(why,)
    )
    return plan.model_copy(update={"prediction": prediction})


# -- what was not chosen


def _faster_quantized(base: Candidate, best: Candidate) -> Candidate | None:
    """The fastest plan with 4-bit weights, if the model has to be split only because it is not quantized."""
    if best.setting.frozen_weights == "nf4" or best.setting.dims == base.setting.dims:
        return None
    found = sorted(alternatives_to(base, quantized=True), key=lambda each: (each.ranking_seconds, each.effort))
    return next((each for each in found if each.ranking_seconds < best.ranking_seconds and each.fits), None)


def _alternatives(chosen: Candidate, others: list[Candidate], faster: Candidate | None) -> tuple[Alternative, ...]:
    """The best others, each kind once: with the largest micro-batch that fits, else the smallest."""
    kinds: dict[tuple[object, ...], list[Candidate]] = {}
    for each in others:
        setting = each.setting
        kinds.setdefault((setting.dims, setting.activation_checkpointing, setting.frozen_weights), []).append(each)
    fitting: list[Candidate] = []
    too_large: dict[ParallelDims, Candidate] = {}
    for number, members in enumerate(kinds.values()):
        if number >= LOOKED_AT and not all(each.looked_at for each in members):
            continue  # memory is predicted for the first ones, and was for those that might have been chosen
        best = next((each for each in members if each.fits), members[-1])
        if best.memory is None or _is_worse(best, chosen):
            continue
        if best.fits:
            fitting.append(best)
            continue
        # with the parallelism that was chosen, the fastest; with another, what comes nearest to fitting
        dims = best.setting.dims
        known = too_large.get(dims)
        if known is None or (dims != chosen.setting.dims and _needed(best.memory) < _needed(known.memory)):
            too_large[dims] = best
    fitting.sort(key=lambda each: (each.ranking_seconds, each.effort))
    shown_too_large = sorted(too_large.values(), key=lambda each: _needed(each.memory))[:TOO_LARGE_SHOWN]
    quantized = [] if faster is None else [faster]
    kept = [*quantized, *fitting[: SHOWN - len(quantized) - len(shown_too_large)], *shown_too_large]
    return tuple(_alternative(chosen, each) for each in kept)


def _is_worse(each: Candidate, chosen: Candidate) -> bool:
    """True if it needs more memory and more time with the same parallelism, so that it is no alternative."""
    if each.setting.dims != chosen.setting.dims or not each.fits:
        return False
    return each.ranking_seconds >= chosen.ranking_seconds and _needed(each.memory) >= _needed(chosen.memory)


def _alternative(chosen: Candidate, each: Candidate) -> Alternative:
    return Alternative(
        name=describe(each),
        changes=_changes(each),
        fits=each.fits,
        step_seconds=None if each.time is None else each.time.seconds,
        memory=each.memory,
        limited_by="memory" if not each.fits else None if each.time is None else each.time.limited_by,
        reason=_reason(chosen, each),
    )


def describe(each: Candidate) -> str:
    setting = each.setting
    words = [str(setting.dims)] if setting.dims.world_size > 1 else []
    words.append(f"micro-batch {setting.micro_batch}")
    if setting.accumulation > 1:
        words.append(f"x {setting.accumulation}")
    if setting.activation_checkpointing != "none":
        words.append(f"checkpointing {setting.activation_checkpointing}")
    if setting.frozen_weights is not None:
        words.append(setting.frozen_weights)
    return ", ".join(words).replace(", x ", " x ")


def _changes(each: Candidate) -> dict[str, object]:
    """All open settings, so that the run is this plan whatever the planner would choose."""
    setting, train = each.setting, each.problem.config.train
    full = Decided(
        dims=setting.dims if setting.dims.world_size > 1 and is_open(each.problem.config) else None,
        checkpointing=setting.activation_checkpointing if train.activation_checkpointing == "auto" else None,
        micro_batch=setting.micro_batch if train.micro_batch_size == "auto" else None,
        frozen_weights=each.decided.frozen_weights,
    )
    return full.changes()


def _reason(chosen: Candidate, each: Candidate) -> str:
    memory = each.memory
    assert memory is not None
    if not each.fits:
        room = memory.capacity_bytes or 0
        close = ", too close to rely on a prediction" if _needed(memory) <= room else ""
        return f"needs {_gib(_needed(memory))} of {_gib(room)}{close}"
    if not each.ranking_seconds or not chosen.ranking_seconds:
        return "fits, too; which is faster is not known"
    ratio = each.ranking_seconds / chosen.ranking_seconds
    if each.decided.frozen_weights != chosen.decided.frozen_weights:
        return f"predicted to take {ratio:.2f} of the time, but rounds the frozen weights to 4 bits"
    if ratio > AS_FAST:
        return f"a step would take {ratio:.2f} times as long"
    if ratio < 1 / AS_FAST:
        return f"predicted to take {ratio:.2f} of the time, too close to give up the simpler or measured plan"
    before, after = chosen.setting, each.setting
    if after.dims != before.dims:
        return "about as fast, with more complicated parallelism"
    if after.activation_checkpointing != before.activation_checkpointing:
        return "about as fast, with other recomputation"
    return "about as fast, with smaller micro-batches"


# -- nothing fits


def _refuse_if_certain(base: Candidate, compared: list[Candidate]) -> None:
    leanest = min(compared, key=lambda each: _needed(each.memory))
    capacity = base.problem.hardware.capacity_bytes
    if leanest.memory is None or capacity is None or leanest.memory.allocated_bytes * CERTAIN_SHARE <= capacity:
        return
    least = leanest.memory.allocated_bytes
    replicas = [each for each in compared if each.setting.dims.world_size == each.setting.dims.data]
    ways = suggestions(min(replicas or [leanest], key=lambda each: _needed(each.memory)))
    raise OutOfMemoryError(
        f"This run does not fit into the GPU's memory: at least {_gib(least)} would be needed, and there are"
        f" {_gib(capacity)}.",
        where=describe(leanest),
        fix="These would fit: " + "; ".join(ways) + "."
        if ways
        else "Use more or larger GPUs, or a smaller model: no single change of the settings is enough.",
    )


def _close_call(chosen: Candidate) -> str:
    memory = chosen.memory
    assert memory is not None
    need, there_is = _gib(_needed(memory)), _gib(memory.capacity_bytes or 0)
    told = f"memory is short: {need} of {there_is} are predicted to be needed; the run may stop with out of memory"
    ways = suggestions(chosen)
    return f"{told}; these would fit: {'; '.join(ways)}" if ways else told


def _told_of_unlike_gpus(plan: Plan, devices: DeviceSpec) -> list[str]:
    used = [gpu for gpu in devices.gpus if gpu.index in plan.device_ids]
    sizes = sorted({gpu.total_bytes for gpu in used if gpu.total_bytes})
    names = list(dict.fromkeys(gpu.name for gpu in used))
    if plan.world_size < 2:
        return []
    if len(sizes) < 2 or sizes[-1] < 1.05 * sizes[0]:
        unlike = f"the GPUs are unlike ({' and '.join(names)}): all wait for the slowest; with DDP,"
        return [f"{unlike} parallel.batch_shares=adaptive gives more sequences to faster ones"] if names[1:] else []
    return [
        f"the GPUs have unlike memory ({_gib(sizes[0])} to {_gib(sizes[-1])}): all get micro-batches that fit the"
        " smallest; with DDP, parallel.batch_shares=adaptive gives more sequences to faster ones"
    ]


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"
