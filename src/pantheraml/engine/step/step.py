"""One optimizer step over a global batch: forward and backward of each micro-batch, then the update.

The loss of a step is the sum of token losses over the global batch divided by its target tokens. Each rank
backpropagates its part of that sum, so the sum over ranks is exactly the gradient of that loss, however the batch is
split and the model is parallelized. The stepper computes numbers and applies updates; whether a step is taken is
decided elsewhere (`guard.decide`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Self

import psutil
import torch
from torch import Tensor, nn

from pantheraml.engine.guard.guard import Guard
from pantheraml.engine.guard.norms import ShardedParams
from pantheraml.engine.guard.policy import StepNumbers, first_nonfinite
from pantheraml.engine.guard.rng import RngStates
from pantheraml.engine.memory.headroom import Headroom
from pantheraml.engine.optim import optimizer as optim
from pantheraml.engine.optim.graph_adamw import GraphAdamW
from pantheraml.engine.parallelize import Traits, parallelize
from pantheraml.engine.step.async_readback import AsyncReadback
from pantheraml.engine.step.feed import StepBatches
from pantheraml.engine.step.passes import FullModelPasses
from pantheraml.engine.step.step_report import RankNumbers, StepReport, step_numbers
from pantheraml.models.adapters import trainable_parameters
from pantheraml.models.families import vocabulary_of
from pantheraml.parallel.consistency import check_replicas, replica_groups
from pantheraml.parallel.data import ComputeTimer
from pantheraml.parallel.local_shards import local_shards, local_squared_norm, move_gradients_to_shards
from pantheraml.parallel.process_group import World
from pantheraml.specs.plan import Plan
from pantheraml.specs.train import TrainConfig

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Begun:
    """A step whose forward and backward are queued on the device."""

    batches: StepBatches
    left_out: tuple[int, ...]
    group_norms: bool
    known: RankNumbers
    """This rank's numbers, as far as the host knows them before the device is done."""


class Stepper:
    """The moving parts of a step: parallelized model, trainable parameters, optimizer, loss scaler, guard."""

    def __init__(self, model: nn.Module, config: TrainConfig, world: World, plan: Plan) -> None:
        """Takes no collective and changes nothing; call `setup` before the first step."""
        self.model, self.world = model, world
        self.autocast_dtype = AUTOCAST.get(plan.precision)
        self._config, self._plan = config, plan

    def setup(self) -> Self:
        """Parallelize the model in place, then build optimizer, loss scaler and guard. A collective."""
        config, plan, world = self._config, self._plan, self.world
        traits = Traits(
            graph=plan.cuda_graph,
            compiled=plan.compile,
            accumulates=(plan.fits or plan.micro_batch_size) * plan.dims.data < plan.global_batch_size,
        )
        self._parallelized = parallelize(self.model, world, config.parallel, self.autocast, traits)
        self.passes, self.decisions = self._parallelized.passes, self._parallelized.decisions
        self.parameters = trainable_parameters(self.model)
        """By name; DTensors where they are sharded."""
        self.parts = local_shards(self.parameters)
        """This rank's shards of them, which the optimizer updates."""
        self.optimizer = optim.build_optimizer(self.parts, config.train, graph=plan.cuda_graph)
        self.scaler = torch.amp.GradScaler(world.device.type, enabled=plan.precision == "fp16")
        sharded = ShardedParams(self.parameters, self.parts, world.layout, self._parallelized.counted_elsewhere)
        self.guard = Guard(config.stability, config.train.max_grad_norm, sharded, vocabulary_of(self.model))
        self._check_every = config.parallel.check_every
        self._replicas = replica_groups(self.parameters, world.layout) if self._check_every else []
        self._process = psutil.Process()
        self._headroom = Headroom(world.device, plan.memory_fraction)
        wanted = config.parallel.batch_shares == "adaptive" or config.parallel.enable_multi_gpu_monitoring
        measured = wanted and 1 < world.size == plan.dims.replicate
        self._own_time = ComputeTimer(self.parameters, world.device) if measured else None
        self._graph = self.passes.graph if isinstance(self.passes, FullModelPasses) else None
        self._readback = AsyncReadback(world.device)
        self.rng = RngStates(self.model)
        """RNG states as they were before the last forward and backward."""
        return self

    def autocast(self) -> AbstractContextManager[object]:
        if self.autocast_dtype is None:
            return nullcontext()
        return torch.autocast(self.world.device.type, dtype=self.autocast_dtype)

    def backward(self, batches: StepBatches, *, stop_requested: bool, group_norms: bool = False) -> StepReport:
        """Compute the gradients of the global batch, and gather their numbers; with `group_norms`, also per layer."""
        return self.finish(self.begin(batches, group_norms=group_norms), stop_requested=stop_requested)

    def begin(self, batches: StepBatches, *, group_norms: bool = False) -> Begun:
        """Queue forward and backward of a step on the device, and the readback of their numbers. With a captured CUDA
        graph this returns at once, and the host is free until `finish`."""
        self.rng.save()
        if self._own_time is not None:
            self._own_time.start()
        self._weigh_experts(batches)
        total, left_out = self._passes(batches)
        self.scaler.unscale_(self.optimizer)
        found = torch.stack([total, self._squares().to(total.device)])
        if group_norms:
            found = torch.cat([found, self.guard.groups.squares().to(found.device)])
        self._readback.send(found)
        counts = self.world.layout.counts_tokens
        known = RankNumbers(
            loss=0.0,
            squares=0.0,
            tokens=float(batches.tokens) if counts else 0.0,
            targets=float(_targets(batches)) if counts else 0.0,
            stop_requested=0.0,
            memory_bytes=float(self._memory_bytes()),
            seconds=0.0,
            sequences=float(batches.max_sequences or math.inf),
            memory_left=self._headroom.read(),
            update=0.0,
            weights=0.0,
        )
        return Begun(batches, left_out, group_norms, known)

    def has_finished(self) -> bool:
        """Whether the device has finished the work that `begin` queued."""
        return self._readback.has_arrived()

    def finish(self, begun: Begun, *, stop_requested: bool) -> StepReport:
        """Wait for the device, and gather the numbers of all ranks. A collective."""
        layout, groups = self.world.layout, self.guard.groups
        # The host waits for the device here, and from here to the update the device waits for the host.
        loss, squares, *layers = self._readback.read()
        update, weights = self.guard.updates.take()
        mine = begun.known._replace(
            loss=loss if layout.counts_loss else 0.0,
            squares=squares,
            stop_requested=float(stop_requested),
            seconds=self._own_time.seconds() if self._own_time is not None else 0.0,
            update=update,
            weights=weights,
        )
        # Plain floats from here on: one tensor op costs the host as much as a hundred of these.
        rows = self.world.rows([*mine, *(groups.by_group(layers) if begun.group_norms else ())])
        ranks = [RankNumbers(*row[: len(mine)]) for row in rows]
        numbers = step_numbers(ranks, begun.batches.target_tokens, begun.left_out)
        norms = None
        if begun.group_norms:
            norms = groups.norms([list(column) for column in zip(*rows, strict=True)][len(mine) :])
        aux_loss = self.passes.aux_loss() if isinstance(self.passes, FullModelPasses) else None
        return StepReport(numbers, ranks, layout.dims.context > 1, norms, aux_loss)

    def backward_again(self, batches: StepBatches, first: StepReport) -> StepReport:
        """Rerun forward and backward of the step from the same weights and RNG states: bit-identical to an undisturbed
        step where the device is deterministic."""
        self._forget_unscaling()
        self.clear_gradients()
        self.rng.restore()
        again, stop = first.groups is not None, first.numbers.stop_requested
        second = self.backward(batches, stop_requested=stop, group_norms=again)
        # the first run consumed the update ratio of the step before
        return replace(second, numbers=replace(second.numbers, update_ratio=first.numbers.update_ratio))

    def _passes(self, batches: StepBatches) -> tuple[Tensor, tuple[int, ...]]:
        """Compute gradients, still scaled by the loss scale. Returns this rank's loss and the ranks left out."""
        factor = self._factor(batches)
        if self.scaler.is_enabled():
            factor = self.scaler.scale(torch.tensor(factor, device=self.world.device)).item()
        total = self.passes.backward(batches.micro_batches, factor)
        left_out = self._parallelized.finish(target_tokens=_targets(batches), factor=factor)
        move_gradients_to_shards(self.parameters, self.parts)
        return total, left_out

    def _weigh_experts(self, batches: StepBatches) -> None:
        """Gather the routing of mixture-of-experts models for their auxiliary loss, without advancing the RNG."""
        if isinstance(self.passes, FullModelPasses) and self.passes.balances_experts:
            with self.rng.preserved():
                self.passes.gather_routing(batches.micro_batches, batches.target_tokens, self.world)

    def _factor(self, batches: StepBatches) -> float:
        """Factor on token losses, so that their sum over ranks is the loss of the step."""
        return self._parallelized.mean_over / max(1, batches.target_tokens)

    @property
    def is_captured(self) -> bool:
        """Whether forward and backward replay as one CUDA graph, which leaves the host free."""
        return self._graph is not None and self._graph.is_captured

    def expect(self, batches: StepBatches, learning_rate: float) -> None:
        """Stage the likely learning rate and the next step's batches on the device, between `begin` and `finish`. A
        wrong guess costs nothing but the copy."""
        if isinstance(self.optimizer, GraphAdamW):
            self.optimizer.preset_learning_rate(learning_rate)
        if self._graph is not None and batches.micro_batches and not self.scaler.is_enabled():
            self._graph.expect(batches.micro_batches[0], self._factor(batches))

    def replay(self, batches: StepBatches) -> tuple[Tensor, str | None]:
        """Rerun forward and backward in eager mode, for hooks that watch the model. Returns this rank's loss and the
        first parameter with a non-finite gradient. A collective; gradients and RNG states are restored."""
        with self.rng.preserved(), self._gradients_aside(), self._in_python():
            self.rng.restore()
            total, _ = self._passes(batches)
            return total, first_nonfinite([(name, part.grad) for name, part in self.parts if part.grad is not None])

    @contextmanager
    def _gradients_aside(self) -> Iterator[None]:
        """Save gradients to the host and restore them in place: DDP's are bucket views, a CUDA graph's are static."""
        kept = [(part, part.grad, part.grad.to("cpu", copy=True)) for _, part in self.parts if part.grad is not None]
        for part, _, _ in kept:
            part.grad = None
        try:
            yield
        finally:
            for _, parameter in (*self.parameters, *self.parts):
                parameter.grad = None
            for part, gradient, values in kept:
                part.grad = gradient.copy_(values)

    @contextmanager
    def _in_python(self) -> Iterator[None]:
        """Run eagerly: hooks cannot see into a CUDA graph or compiled layers."""
        with torch.compiler.set_stance("force_eager") if self._plan.compile else nullcontext():
            if self._graph is None:
                yield
                return
            assert isinstance(self.passes, FullModelPasses)
            self.passes.graph = None
            try:
                yield
            finally:
                self.passes.graph = self._graph

    def _squares(self) -> Tensor:
        """This rank's part of the squared global gradient norm."""
        twice = self._parallelized.counted_elsewhere
        counted = [index for index, (name, _) in enumerate(self.parameters) if name not in twice]
        parameters, parts = ([named[index] for index in counted] for named in (self.parameters, self.parts))
        return local_squared_norm(parameters, parts, ranks=self.world.layout.stage_ranks)

    def check_replicas(self, step: int) -> None:
        """Raise DriftError if replicas differ in weights or gradients; every `parallel.check_every` steps."""
        if self._check_every == 0 or step % self._check_every:
            return
        for group, names in self._replicas:
            weights = [(name, part) for name, part in self.parts if name in names]
            gradients = [(name, part.grad) for name, part in weights]
            check_replicas(weights, gradients, step=step, device=self.world.device, group=group)

    def apply(self, numbers: StepNumbers, learning_rate: float, *, zero_nonfinite: bool = False) -> None:
        """Clip gradients and run the optimizer; with `zero_nonfinite`, set non-finite gradient values to 0 first."""
        norm = self._zero_nonfinite() if zero_nonfinite else numbers.grad_norm
        if math.isfinite(norm):
            self.guard.clipping.clip(self.optimizer, norm)
        else:
            optim.clip(self.optimizer, self.parts, norm, 0.0)  # no norm to clip by or to remember
        optim.set_learning_rate(self.optimizer, learning_rate)
        with self.guard.updates.measuring():
            if isinstance(self.optimizer, GraphAdamW) and self.optimizer.is_captured and not self.scaler.is_enabled():
                self.optimizer.replay()
            elif numbers.finite:
                self.scaler.step(self.optimizer)
                self.scaler.update()
            else:  # the scaler would skip the step only on ranks with non-finite values
                self.optimizer.step()
                self._forget_unscaling()
        if isinstance(self.optimizer, GraphAdamW) and not self.optimizer.is_captured and self.is_captured:
            self.optimizer.capture()
        self.clear_gradients()

    @property
    def loss_scale(self) -> float | None:
        """fp16 loss scale; None with other precisions."""
        return self.scaler.get_scale() if self.scaler.is_enabled() else None

    def set_loss_scale(self, scale: float) -> None:
        self.scaler.update(scale)

    def _forget_unscaling(self) -> None:
        """Reset the loss scaler, which refuses to unscale the same step's gradients twice."""
        if self.loss_scale is not None:
            self.set_loss_scale(self.loss_scale)

    def _zero_nonfinite(self) -> float:
        """Set non-finite gradient values to 0, and return the global norm of the rest. A collective."""
        for _, part in self.parts:
            if part.grad is not None:
                torch.nan_to_num_(part.grad, nan=0.0, posinf=0.0, neginf=0.0)
        return float(self.world.gather([float(self._squares())]).sum().sqrt())

    def skip(self) -> None:
        """Drop the gradients of a step that is not taken."""
        self._forget_unscaling()
        self.clear_gradients()

    def clear_gradients(self) -> None:
        if self._graph is not None:
            self._graph.clear_gradients()
        else:
            self.optimizer.zero_grad(set_to_none=True)

    @property
    def may_pass_more(self) -> bool:
        """Whether a step may have more passes than planned."""
        static = any(choice.name == "parallel.static_graph" and choice.value for choice in self.decisions.choices)
        return self.world.layout.dims.pipeline == 1 and not static

    def forget_step(self) -> None:
        """Free what a step left that ran out of memory."""
        if self._graph is not None:
            self._graph.reset()
        if isinstance(self.optimizer, GraphAdamW):
            self.optimizer.drop_graphs()
        self.optimizer.zero_grad(set_to_none=True)
        if self.world.device.type == "cuda":
            torch.cuda.empty_cache()

    def _memory_bytes(self) -> int:
        if self.world.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.world.device)
        return int(self._process.memory_info().rss)


def _targets(batches: StepBatches) -> int:
    """Target tokens of this rank's micro-batches."""
    return sum(batch.target_count for batch in batches.micro_batches)
