"""How `pantheraml plan` shows a plan: choices, memory by part, time, cost, and the plans that were not chosen."""

from __future__ import annotations

import shutil

from pantheraml.base.text import printable
from pantheraml.planner.candidates import needed_bytes
from pantheraml.planner.facts import ModelFacts
from pantheraml.specs.plan import Plan
from pantheraml.specs.prediction import Alternative, MemoryPrediction, Prediction
from pantheraml.specs.train import TrainConfig

BAR = 50
FILLS = "█▓▒░#=+-:o*"
FEW = 3
"""Alternatives shown without --explain."""
VALUE = 40


def show(plan: Plan, config: TrainConfig, facts: ModelFacts, *, explain: bool) -> None:
    _choices(plan)
    for message in plan.warnings:
        _line(f"Warning: {message}.")
    prediction = plan.prediction
    if prediction is None:
        _line('Note: memory and time are predicted for GPUs only; describe some with --gpus "1xH100".')
        return
    _line("")
    if facts.shapes is not None:
        _line(f"Model    {config.model.path}: {facts.shapes.parameters / 1e9:.2f} billion parameters")
    if prediction.memory is not None:
        _memory(prediction.memory, plan)
    _time(plan, prediction, explain=explain)
    if plan.alternatives:
        _alternatives(plan.alternatives if explain else plan.alternatives[:FEW])
    if explain or prediction.memory is None or prediction.step_seconds is None:
        for source in prediction.sources:
            _line(f"Note: {source}.")


def _line(text: str) -> None:
    print(printable(text))


def _choices(plan: Plan) -> None:
    width = max(len(choice.name) for choice in plan.choices)
    for choice in plan.choices:
        value = str(choice.value)
        shown = value if len(value) <= VALUE else f"{value[: VALUE - 3]}..."
        _line(f"{choice.name:{width}}  {shown:12}  {choice.reason}")


def _memory(memory: MemoryPrediction, plan: Plan) -> None:
    needed = needed_bytes(memory)
    rank = "the rank that needs most" if plan.world_size > 1 else "the GPU"
    of = "" if memory.capacity_bytes is None else f" of {_gib(memory.capacity_bytes)}"
    at = f", at its peak ({memory.instant})" if memory.instant else ""
    _line(f"Memory   {_gib(needed)}{of} on {rank}{at}")
    parts = {name: size for name, size in sorted(memory.parts.items(), key=lambda part: -part[1]) if size > 0}
    parts["allocator, CUDA, NCCL" if plan.world_size > 1 else "allocator and CUDA"] = needed - memory.allocated_bytes
    whole = max(memory.capacity_bytes or needed, needed)
    width = min(BAR, shutil.get_terminal_size().columns - 12)
    bar = "".join(fill * round(width * size / whole) for fill, size in zip(FILLS, parts.values(), strict=False))
    _line(f"         |{bar[:width]:{width}}|")
    listed = [f"{fill} {name} {_gib(size)}" for fill, (name, size) in zip(FILLS, parts.items(), strict=False)]
    for start in range(0, len(listed), 3):
        _line("         " + "   ".join(f"{each:28}" for each in listed[start : start + 3]).rstrip())


def _time(plan: Plan, prediction: Prediction, *, explain: bool) -> None:
    seconds = prediction.step_seconds
    if seconds is None:
        _line("Time     not predicted")
        return
    parts = {name: spent for name, spent in prediction.time_parts.items() if spent >= 0.005 * seconds}
    shares = ", ".join(
        f"{name} {100 * spent / seconds:.0f} %" for name, spent in sorted(parts.items(), key=lambda part: -part[1])
    )
    _line(f"Time     {_duration(seconds)} per step of {plan.global_batch_size} sequence(s): {shares}")
    if prediction.total_seconds is not None:
        _line(f"         {_duration(prediction.total_seconds)} for {prediction.steps:,} steps")
    if prediction.energy_kwh is not None:
        _line(f"Energy   {prediction.energy_kwh:.3g} kWh")
    if prediction.dollars is not None:
        _line(f"Cost     {prediction.dollars:,.2f}")
    if prediction.total_seconds is None and explain:
        _line("         the number of steps is not known: give --data, or --set train.max_steps=N")


def _alternatives(alternatives: tuple[Alternative, ...]) -> None:
    _line("Not chosen:")
    width = max(len(each.name) for each in alternatives)
    for each in alternatives:
        memory = "" if each.memory is None else _gib(needed_bytes(each.memory))
        time = "" if each.step_seconds is None else _duration(each.step_seconds)
        limit = "" if each.limited_by is None else f" (limited by {each.limited_by})"
        _line(f"  {each.name:{width}}  {memory:>10}  {time:>8}  {each.reason}{limit}")


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"


def _duration(seconds: float) -> str:
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
