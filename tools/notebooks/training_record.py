"""What training really did in a notebook: steps, losses and gradients of every `trainer.train()`.

A notebook whose cells all ran may still have trained nothing. It counts as run only if each training has made its steps
with finite losses, and a gradient that is neither zero nor infinite in one of them.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Training:
    steps: int
    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]


def watch_trainers() -> list[Training]:
    """Return a list that gets one entry for each training of a transformers trainer, in this process."""
    from transformers import TrainerCallback
    from transformers.trainer import DEFAULT_CALLBACKS

    trainings: list[Training] = []

    class Watch(TrainerCallback):  # type: ignore[misc]
        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            logs = state.log_history
            losses = tuple(float(entry["loss"]) for entry in logs if "loss" in entry)
            norms = tuple(float(entry["grad_norm"]) for entry in logs if entry.get("grad_norm") is not None)
            trainings.append(Training(state.global_step, losses, norms))

    DEFAULT_CALLBACKS.append(Watch)
    return trainings


def trains(code: str) -> bool:
    """Whether the code calls a method `train()` of a trainer, or `unsloth_train`."""
    calls = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
    methods = [call.func for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == "train"]
    names = [call.func.id for call in calls if isinstance(call.func, ast.Name)]
    return "unsloth_train" in names or any("trainer" in ast.unparse(method.value).lower() for method in methods)


def problem_with(trainings: Sequence[Training]) -> str | None:
    """Return why these are not the trainings of a notebook that trained; None if they are."""
    if not trainings:
        return "no trainer trained, though the notebook calls train()"
    for training in trainings:
        if training.steps < 1 or not training.losses:
            return f"a trainer made {training.steps} steps and logged {len(training.losses)} losses"
        if not all(map(math.isfinite, training.losses)):
            return f"a loss is not finite: {training.losses}"
        if not all(map(math.isfinite, training.grad_norms)):
            return f"a gradient norm is not finite: {training.grad_norms}"
        if not any(norm > 0 for norm in training.grad_norms):
            return f"every gradient is zero: {training.grad_norms}"
    return None
