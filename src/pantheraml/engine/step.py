"""One optimizer step over a global batch: forward and backward of each micro-batch, the verdict, the update.

The loss of a step is the sum of token losses over the global batch divided by its target tokens. Each process
backpropagates what it finds of that, and the sum over processes is exactly that loss's gradient, however the batch was
split and the model spread.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import psutil
import torch
from torch import nn

from pantheraml.engine import optim
from pantheraml.engine.feed import StepBatches
from pantheraml.engine.guard.verdict import StepNumbers
from pantheraml.engine.parallelize import Traits, parallelize
from pantheraml.engine.passes import WholePasses
from pantheraml.models.adapters import trainable_parameters
from pantheraml.parallel.consistency import check_copies
from pantheraml.parallel.data import OwnTime
from pantheraml.parallel.local import hand_over_gradients, local_parts, local_squares
from pantheraml.parallel.process_group import World
from pantheraml.specs.plan import Plan
from pantheraml.specs.train import TrainConfig

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class StepReport:
    numbers: StepNumbers
    tokens: int
    """Tokens of the global batch, padding excluded."""
    memory_bytes: int
    """The largest memory of any process: peak allocated on a GPU, resident on a CPU."""
    left_out: tuple[int, ...]
    """Ranks whose gradient was not finite and did not enter."""
    rank_tokens: list[float]
    rank_seconds: list[float]
    """Of each rank's own passes, without waiting for others; 0 where that is not measured."""


class Stepper:
    """The parts that a step moves: the spread model, trainable parameters, optimizer, loss scaler."""

    def __init__(self, model: nn.Module, config: TrainConfig, world: World, plan: Plan) -> None:
        """Spreads `model` over the processes, in place."""
        self.model, self.world = model, world
        self.autocast_dtype = AUTOCAST.get(plan.precision)
        traits = Traits(
            graph=plan.cuda_graph,
            compiled=plan.compile,
            accumulates=plan.micro_batch_size * plan.dims.data < plan.global_batch_size,
        )
        self._parallelised = parallelize(model, world, config.parallel, self.autocast, traits)
        self.passes = self._parallelised.passes
        self.parameters = trainable_parameters(model)
        """By name; DTensors where they are cut."""
        self.parts = local_parts(self.parameters)
        """What this process holds of them, which is what the optimizer works on."""
        self.optimizer = optim.build_optimizer(self.parts, config.train)
        self.scaler = torch.amp.GradScaler(world.device.type, enabled=plan.precision == "fp16")
        self._max_grad_norm = config.train.max_grad_norm
        self._check_every = config.parallel.check_every
        self._process = psutil.Process()
        measured = config.parallel.batch_shares == "adaptive" and world.size > 1
        self._own_time = OwnTime(self.parameters, world.device) if measured else None
        self._graph = self.passes.graph if isinstance(self.passes, WholePasses) else None

    def autocast(self) -> AbstractContextManager[object]:
        if self.autocast_dtype is None:
            return nullcontext()
        return torch.autocast(self.world.device.type, dtype=self.autocast_dtype)

    def backward(self, batches: StepBatches, *, stop_requested: bool) -> StepReport:
        """Gradients of the global batch on every rank, and what all ranks know about them."""
        factor = self._parallelised.mean_over / max(1, batches.target_tokens)
        if self._own_time is not None:
            self._own_time.start()
        if self.scaler.is_enabled():
            factor = self.scaler.scale(torch.tensor(factor, device=self.world.device)).item()
        total = self.passes.backward(batches.micro_batches, factor)
        own_targets = sum(batch.target_count for batch in batches.micro_batches)
        left_out = self._parallelised.finish(target_tokens=own_targets, factor=factor)
        hand_over_gradients(self.parameters, self.parts)
        self.scaler.unscale_(self.optimizer)
        layout = self.world.layout
        rows = self.world.gather(
            [
                float(total) if layout.counts_loss else 0.0,
                float(self._squares()),
                float(batches.tokens) if layout.counts_tokens else 0.0,
                float(own_targets) if layout.counts_tokens else 0.0,
                float(stop_requested),
                float(self._memory_bytes()),
                self._own_time.seconds() if self._own_time is not None else 0.0,
            ]
        )
        losses, squares, tokens, targets, stops, memory, seconds = rows.unbind(dim=1)
        # What a rank brought that was left out is neither in the gradient nor in the loss.
        losses[list(left_out)] = 0.0
        numbers = StepNumbers(
            loss_sums=losses.tolist(),
            grad_norm=float(squares.sum().sqrt()),
            target_tokens=batches.target_tokens - int(targets[list(left_out)].sum()),
            stop_requested=bool(stops.any()),
        )
        return StepReport(numbers, int(tokens.sum()), int(memory.max()), left_out, tokens.tolist(), seconds.tolist())

    def _squares(self) -> torch.Tensor:
        """This rank's share of the squared gradient norm."""
        twice = self._parallelised.held_twice
        counted = [index for index, (name, _) in enumerate(self.parameters) if name not in twice]
        parameters, parts = ([named[index] for index in counted] for named in (self.parameters, self.parts))
        return local_squares(parameters, parts, ranks=self.world.layout.stage_ranks)

    def check_copies(self, step: int) -> None:
        """DriftError if ranks that should hold the same weights and gradients do not; now and then."""
        dims = self.world.layout.dims
        if self._check_every == 0 or step % self._check_every or dims.replicate == 1:
            return
        gradients = [(name, part.grad) for name, part in self.parts]
        group = self.world.layout.group("replicate")
        check_copies(self.parts, gradients, step=step, device=self.world.device, group=group)

    def apply(self, numbers: StepNumbers, learning_rate: float) -> None:
        """Clip and take the step."""
        optim.clip(self.optimizer, self.parts, numbers.grad_norm, self._max_grad_norm)
        optim.set_learning_rate(self.optimizer, learning_rate)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.clear_gradients()

    def skip(self, numbers: StepNumbers) -> None:
        """Drop the gradients; under fp16 an overflow on any rank lowers the loss scale on all."""
        if self.scaler.is_enabled():
            overflow = not math.isfinite(numbers.grad_norm)
            factor = self.scaler.get_backoff_factor() if overflow else 1.0
            self.scaler.update(self.scaler.get_scale() * factor)
        self.clear_gradients()

    def clear_gradients(self) -> None:
        if self._graph is not None:
            self._graph.clear_gradients()
        else:
            self.optimizer.zero_grad(set_to_none=True)

    def _memory_bytes(self) -> int:
        if self.world.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.world.device)
        return int(self._process.memory_info().rss)
