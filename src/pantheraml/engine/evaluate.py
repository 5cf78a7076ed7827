"""Evaluation: token-weighted loss and perplexity on held-out data, sharded over all ranks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from pantheraml.base.events import Emit, EvalDone, EvalProgress
from pantheraml.data.dataset import TokenDataset
from pantheraml.engine.step.feed import eval_batches
from pantheraml.engine.step.step import Stepper

ROUNDS_BETWEEN_VOTES = 16
SECONDS_BETWEEN_EVENTS = 0.5


@dataclass(frozen=True)
class Evaluation:
    loss: float
    target_tokens: int
    seconds: float

    @property
    def perplexity(self) -> float:
        try:
            return math.exp(self.loss)
        except OverflowError:
            return math.inf


@torch.no_grad()
def evaluate(
    stepper: Stepper,
    dataset: TokenDataset,
    *,
    micro_batch: int,
    step: int,
    emit: Emit,
    stop_requested: Callable[[], bool],
) -> Evaluation | None:
    """Evaluate, or return None if some rank was asked to stop: all ranks leave in the same round."""
    begin = last_event = time.perf_counter()
    model, world, layout = stepper.model, stepper.world, stepper.world.layout
    was_training = model.training
    model.eval()
    loss = torch.zeros((), dtype=torch.float64, device=world.device)
    targets = done = 0
    stopped = False
    for number, batch in enumerate(eval_batches(dataset, world, micro_batch=micro_batch)):
        loss += stepper.passes.evaluate(batch)
        targets += batch.target_count
        done += len(batch.input_ids)
        if number % ROUNDS_BETWEEN_VOTES == ROUNDS_BETWEEN_VOTES - 1:
            stopped = bool(world.gather([float(stop_requested())]).any())
        if stopped:
            break
        if time.perf_counter() - last_event > SECONDS_BETWEEN_EVENTS:
            last_event = time.perf_counter()
            emit(EvalProgress(step=step, done=min(len(dataset), done * layout.dims.data), total=len(dataset)))
    model.train(was_training)
    if stopped:
        return None
    rows = world.gather([float(loss) if layout.counts_loss else 0.0, float(targets) if layout.counts_tokens else 0.0])
    total_targets = int(rows[:, 1].sum())
    result = Evaluation(
        loss=math.fsum(rows[:, 0].tolist()) / max(1, total_targets),
        target_tokens=total_targets,
        seconds=time.perf_counter() - begin,
    )
    emit(
        EvalDone(
            step=step,
            loss=result.loss,
            perplexity=result.perplexity,
            target_tokens=total_targets,
            seconds=result.seconds,
        )
    )
    return result
