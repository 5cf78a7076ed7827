"""Loss and perplexity on held-out data, token-weighted, spread over all ranks."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch

from pantheraml.base.events import Emit
from pantheraml.data.dataset import TokenDataset
from pantheraml.engine.feed import eval_batches
from pantheraml.engine.step import Stepper


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
def evaluate(stepper: Stepper, dataset: TokenDataset, *, micro_batch: int, step: int, emit: Emit) -> Evaluation:
    begin = time.perf_counter()
    model, world = stepper.loss_model, stepper.world
    was_training = model.training
    model.eval()
    loss = torch.zeros((), dtype=torch.float64, device=world.device)
    targets, done, share = 0, 0, math.ceil(len(dataset) / world.size)
    for batch in eval_batches(dataset, world, micro_batch=micro_batch):
        loss += stepper.loss_sum(model, batch)
        targets += int((batch.targets >= 0).sum())
        done += len(batch.input_ids)
        emit("eval.progress", step=step, done=min(len(dataset), done * world.size), total=max(share, len(dataset)))
    model.train(was_training)
    rows = world.gather([float(loss), float(targets)])
    total_targets = int(rows[:, 1].sum())
    result = Evaluation(
        loss=math.fsum(rows[:, 0].tolist()) / max(1, total_targets),
        target_tokens=total_targets,
        seconds=time.perf_counter() - begin,
    )
    emit(
        "eval.done",
        step=step,
        loss=result.loss,
        perplexity=result.perplexity,
        target_tokens=total_targets,
        seconds=result.seconds,
    )
    return result
