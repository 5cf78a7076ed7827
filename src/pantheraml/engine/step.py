"""One optimizer step over a global batch: forward and backward of each micro-batch, the verdict, the update.

The loss of a step is the sum of token losses over the global batch divided by its target tokens. Each rank
backpropagates its own sum times `world / target_tokens`; DDP's mean over ranks then is exactly that loss's gradient,
however the batch was split.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import psutil
import torch
from torch import Tensor, nn

from pantheraml.data.batch import Batch
from pantheraml.engine import optim
from pantheraml.engine.feed import StepBatches
from pantheraml.engine.graph import StepGraph
from pantheraml.engine.guard.verdict import StepNumbers
from pantheraml.engine.loss import LossModel
from pantheraml.models.quantise.packed import packed_buffers
from pantheraml.parallel.data import gradient_scale, without_sync, wrap
from pantheraml.parallel.process_group import World
from pantheraml.specs.train import TrainConfig

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class StepReport:
    numbers: StepNumbers
    tokens: int
    """Tokens of the global batch, padding excluded."""
    memory_bytes: int
    """The largest memory of any process: peak allocated on a GPU, resident on a CPU."""


class Stepper:
    """The parts that a step moves: wrapped model, trainable parameters, optimizer, loss scaler."""

    def __init__(
        self,
        model: nn.Module,
        parameters: optim.NamedParameters,
        config: TrainConfig,
        world: World,
        precision: str,
        *,
        graph: bool = False,
    ) -> None:
        self.world, self.parameters = world, parameters
        self.loss_model = LossModel(model)
        self.wrapped = wrap(self.loss_model, world, config.parallel, constant_buffers=packed_buffers(self.loss_model))
        self.optimizer = optim.build_optimizer(parameters, config.train)
        self.autocast_dtype = AUTOCAST.get(precision)
        self.scaler = torch.amp.GradScaler(world.device.type, enabled=precision == "fp16")
        self._max_grad_norm = config.train.max_grad_norm
        self._process = psutil.Process()
        self._graph = StepGraph(self._run, [p for _, p in parameters], world.device) if graph else None

    def autocast(self) -> AbstractContextManager[object]:
        if self.autocast_dtype is None:
            return nullcontext()
        return torch.autocast(self.world.device.type, dtype=self.autocast_dtype)

    def loss_sum(self, module: nn.Module, batch: Batch) -> Tensor:
        batch = batch.to(self.world.device)
        with self.autocast():
            loss: Tensor = module(
                batch.input_ids,
                batch.position_ids,
                batch.targets,
                batch.boundaries,
                batch.max_length,
                batch.target_count,
            )
        return loss

    def backward(self, batches: StepBatches, *, stop_requested: bool) -> StepReport:
        """Gradients of the global batch on every rank, and what all ranks know about them."""
        scale = gradient_scale(self.world, batches.target_tokens) * float(batches.counted)
        total = torch.zeros((), dtype=torch.float64, device=self.world.device)
        last = len(batches.micro_batches) - 1
        for index, batch in enumerate(batches.micro_batches):
            if self._graph is not None:
                loss = self._graph(batch, scale)
            else:
                with nullcontext() if index == last else without_sync(self.wrapped):
                    loss = self._run(batch, scale)
            total += loss * float(batches.counted)
        self.scaler.unscale_(self.optimizer)
        norm = optim.total_norm(self.parameters)
        rows = self.world.gather(
            [float(total), float(norm), float(batches.tokens), float(stop_requested), float(self._memory_bytes())]
        )
        numbers = StepNumbers(
            loss_sums=rows[:, 0].tolist(),
            grad_norm=float(rows[:, 1].max()) if bool(rows[:, 1].isfinite().all()) else float("nan"),
            target_tokens=batches.target_tokens,
            stop_requested=bool(rows[:, 3].any()),
        )
        return StepReport(numbers=numbers, tokens=int(rows[:, 2].sum()), memory_bytes=int(rows[:, 4].max()))

    def _run(self, batch: Batch, factor: float | Tensor) -> Tensor:
        """Forward and backward of one micro-batch, its loss times `factor`; the summed loss."""
        loss = self.loss_sum(self.wrapped, batch)
        self.scaler.scale(loss * factor).backward()
        return loss.detach()

    def apply(self, numbers: StepNumbers, learning_rate: float) -> None:
        """Clip and take the step."""
        optim.clip(self.optimizer, self.parameters, numbers.grad_norm, self._max_grad_norm)
        optim.set_learning_rate(self.optimizer, learning_rate)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.clear_gradients()

    def skip(self) -> None:
        """Drop the gradients; under fp16 the scaler also lowers its scale if `unscale_` saw an overflow."""
        self.scaler.update()
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
