"""One optimizer step over a global batch: forward and backward of each micro-batch, the verdict, the update.

The loss of a step is the sum of token losses over the global batch divided by its target tokens. Each process
backpropagates what it finds of that, and the sum over processes is exactly that loss's gradient, however the batch was
split and the model spread.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace

import psutil
import torch
from torch import Tensor, nn

from pantheraml.engine import optim
from pantheraml.engine.adamw_graph import GraphAdamW
from pantheraml.engine.feed import StepBatches
from pantheraml.engine.guard.generators import Generators
from pantheraml.engine.guard.norms import Spread
from pantheraml.engine.guard.state import Guard
from pantheraml.engine.guard.verdict import StepNumbers, first_nonfinite
from pantheraml.engine.parallelize import Traits, parallelize
from pantheraml.engine.passes import WholePasses
from pantheraml.engine.readout import Readout
from pantheraml.engine.step_report import RankNumbers, StepReport, step_numbers
from pantheraml.models.adapters import trainable_parameters
from pantheraml.models.families import vocabulary_of
from pantheraml.parallel.consistency import check_copies, peers_with_copies
from pantheraml.parallel.data import OwnTime
from pantheraml.parallel.local import hand_over_gradients, local_parts, local_squares
from pantheraml.parallel.process_group import World
from pantheraml.specs.plan import Plan
from pantheraml.specs.train import TrainConfig

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Begun:
    """A step whose passes the device was given to do."""

    batches: StepBatches
    left_out: tuple[int, ...]
    group_norms: bool
    known: RankNumbers
    """This rank's row, as far as the host knows it before the device is through."""


class Stepper:
    """The parts that a step moves: the spread model, trainable parameters, optimizer, loss scaler, guard."""

    def __init__(self, model: nn.Module, config: TrainConfig, world: World, plan: Plan) -> None:
        """Spreads `model` over the processes, in place."""
        self.model, self.world = model, world
        self.autocast_dtype = AUTOCAST.get(plan.precision)
        traits = Traits(
            graph=plan.cuda_graph,
            compiled=plan.compile,
            accumulates=(plan.fits or plan.micro_batch_size) * plan.dims.data < plan.global_batch_size,
        )
        self._parallelised = parallelize(model, world, config.parallel, self.autocast, traits)
        self.passes, self.decided = self._parallelised.passes, self._parallelised.decided
        self.parameters = trainable_parameters(model)
        """By name; DTensors where they are cut."""
        self.parts = local_parts(self.parameters)
        """What this process holds of them, which is what the optimizer works on."""
        self.optimizer = optim.build_optimizer(self.parts, config.train, graph=plan.cuda_graph)
        self.scaler = torch.amp.GradScaler(world.device.type, enabled=plan.precision == "fp16")
        self._spread = Spread(self.parameters, self.parts, world.layout, self._parallelised.held_twice)
        self.guard = Guard(config.stability, config.train.max_grad_norm, self._spread, vocabulary_of(model))
        self._check_every = config.parallel.check_every
        self._copies = peers_with_copies(self.parameters, world.layout) if self._check_every else []
        self._compiled = plan.compile
        self._process = psutil.Process()
        wanted = config.parallel.batch_shares == "adaptive" or config.parallel.enable_multi_gpu_monitoring
        measured = wanted and 1 < world.size == plan.dims.replicate
        self._own_time = OwnTime(self.parameters, world.device) if measured else None
        self._graph = self.passes.graph if isinstance(self.passes, WholePasses) else None
        self._readout = Readout(world.device)
        self.generators = Generators(model)
        """What they remember is where they stood before the last passes."""

    def autocast(self) -> AbstractContextManager[object]:
        if self.autocast_dtype is None:
            return nullcontext()
        return torch.autocast(self.world.device.type, dtype=self.autocast_dtype)

    def backward(self, batches: StepBatches, *, stop_requested: bool, group_norms: bool = False) -> StepReport:
        """Gradients of the global batch on every rank, and what all ranks know about them; with `group_norms`, also by
        layer."""
        return self.finish(self.begin(batches, group_norms=group_norms), stop_requested=stop_requested)

    def begin(self, batches: StepBatches, *, group_norms: bool = False) -> Begun:
        """Give the device the passes of a step to do, and what is to be known about them. If they are recorded, that
        takes the host a moment, and it may do something else until `finish`."""
        self.generators.remember()
        if self._own_time is not None:
            self._own_time.start()
        self._weigh_experts(batches)
        total, left_out = self._passes(batches)
        self.scaler.unscale_(self.optimizer)
        found = torch.stack([total, self._squares().to(total.device)])
        if group_norms:
            found = torch.cat([found, self.guard.groups.squares().to(found.device)])
        self._readout.send(found)
        counts = self.world.layout.counts_tokens
        known = RankNumbers(
            loss=0.0,
            squares=0.0,
            tokens=float(batches.tokens) if counts else 0.0,
            targets=float(_targets(batches)) if counts else 0.0,
            stop_requested=0.0,
            memory_bytes=float(self._memory_bytes()),
            seconds=0.0,
            sequences=float(batches.most_at_a_time or math.inf),
            update=0.0,
            weights=0.0,
        )
        return Begun(batches, left_out, group_norms, known)

    def has_finished(self) -> bool:
        """Whether the device is through with what `begin` gave it to do."""
        return self._readout.has_arrived()

    def finish(self, begun: Begun, *, stop_requested: bool) -> StepReport:
        """A collective."""
        layout, groups = self.world.layout, self.guard.groups
        # The host waits for the device here, and from here to the update the device waits for the host.
        loss, squares, *layers = self._readout.read()
        update, weights = self.guard.updates.take()
        mine = begun.known._replace(
            loss=loss if layout.counts_loss else 0.0,
            squares=squares,
            stop_requested=float(stop_requested),
            seconds=self._own_time.seconds() if self._own_time is not None else 0.0,
            update=update,
            weights=weights,
        )
        # Plain numbers from here on: a tensor operation takes the host as long as a hundred of these.
        rows = self.world.rows([*mine, *(groups.by_group(layers) if begun.group_norms else ())])
        ranks = [RankNumbers(*row[: len(mine)]) for row in rows]
        numbers = step_numbers(ranks, begun.batches.target_tokens, begun.left_out)
        norms = None
        if begun.group_norms:
            norms = groups.norms([list(column) for column in zip(*rows, strict=True)][len(mine) :])
        aux_loss = self.passes.aux_loss() if isinstance(self.passes, WholePasses) else None
        return StepReport(numbers, ranks, layout.dims.context > 1, norms, aux_loss)

    def backward_again(self, batches: StepBatches, first: StepReport) -> StepReport:
        """The same step's passes once more, as if `first` had not been: from the same weights and random numbers, they
        come to what an undisturbed step does, bit by bit where the device computes so."""
        self._forget_unscaling()
        self.clear_gradients()
        self.generators.put_back()
        again, stop = first.groups is not None, first.numbers.stop_requested
        second = self.backward(batches, stop_requested=stop, group_norms=again)
        # what the first pass has read of the step before is not there to be read again
        return replace(second, numbers=replace(second.numbers, update_ratio=first.numbers.update_ratio))

    def _passes(self, batches: StepBatches) -> tuple[Tensor, tuple[int, ...]]:
        """Gradients of the global batch, still times the loss scale; the loss found here, and the ranks left out."""
        factor = self._factor(batches)
        if self.scaler.is_enabled():
            factor = self.scaler.scale(torch.tensor(factor, device=self.world.device)).item()
        total = self.passes.backward(batches.micro_batches, factor)
        left_out = self._parallelised.finish(target_tokens=_targets(batches), factor=factor)
        hand_over_gradients(self.parameters, self.parts)
        return total, left_out

    def _weigh_experts(self, batches: StepBatches) -> None:
        """For what a mixture of experts adds to the loss; the passes then draw the same random numbers."""
        if isinstance(self.passes, WholePasses) and self.passes.balances_experts:
            with self.generators.undisturbed():
                self.passes.weigh_experts(batches.micro_batches, batches.target_tokens, self.world)

    def _factor(self, batches: StepBatches) -> float:
        """What losses are multiplied by, for their sum over processes to be that of the step."""
        return self._parallelised.mean_over / max(1, batches.target_tokens)

    @property
    def is_recorded(self) -> bool:
        """Whether passes are launched as a whole: the host is then free while the device runs them."""
        return self._graph is not None and self._graph.is_recorded

    def expect(self, batches: StepBatches, learning_rate: float) -> None:
        """Between `begin` and `finish`: the step will most likely be taken with that learning rate, and the next one be
        that of `batches`. What can be given to the device beforehand it will not have to wait for; neither binds."""
        if isinstance(self.optimizer, GraphAdamW):
            self.optimizer.expect_rate(learning_rate)
        if self._graph is not None and batches.micro_batches and not self.scaler.is_enabled():
            self._graph.expect(batches.micro_batches[0], self._factor(batches))

    def replay(self, batches: StepBatches) -> tuple[Tensor, str | None]:
        """Run the passes of a step again, for someone who watches the model: the loss found here, and the first
        parameter whose gradient is not finite. A collective; the gradients and generators stay what they were."""
        with self.generators.undisturbed(), self._gradients_aside(), self._in_python():
            self.generators.put_back()
            total, _ = self._passes(batches)
            return total, first_nonfinite([(name, part.grad) for name, part in self.parts if part.grad is not None])

    @contextmanager
    def _gradients_aside(self) -> Iterator[None]:
        """In host memory, and back in the same tensors: DDP's are views of its buffers, a graph's are part of it."""
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
        """Nobody can watch a step that is a recorded graph, or layers that are compiled."""
        with torch.compiler.set_stance("force_eager") if self._compiled else nullcontext():
            if self._graph is None:
                yield
                return
            assert isinstance(self.passes, WholePasses)
            self.passes.graph = None
            try:
                yield
            finally:
                self.passes.graph = self._graph

    def _squares(self) -> Tensor:
        """This rank's share of the squared gradient norm."""
        twice = self._parallelised.held_twice
        counted = [index for index, (name, _) in enumerate(self.parameters) if name not in twice]
        parameters, parts = ([named[index] for index in counted] for named in (self.parameters, self.parts))
        return local_squares(parameters, parts, ranks=self.world.layout.stage_ranks)

    def check_copies(self, step: int) -> None:
        """DriftError if ranks that should hold the same weights and gradients do not; now and then."""
        if self._check_every == 0 or step % self._check_every:
            return
        for group, names in self._copies:
            weights = [(name, part) for name, part in self.parts if name in names]
            gradients = [(name, part.grad) for name, part in weights]
            check_copies(weights, gradients, step=step, device=self.world.device, group=group)

    def apply(self, numbers: StepNumbers, learning_rate: float, *, zero_nonfinite: bool = False) -> None:
        """Clip and take the step; with `zero_nonfinite`, after gradient values that are not finite were made 0."""
        norm = self._zero_nonfinite() if zero_nonfinite else numbers.grad_norm
        if math.isfinite(norm):
            self.guard.clipping.clip(self.optimizer, norm)
        else:
            optim.clip(self.optimizer, self.parts, norm, 0.0)  # there is no norm to clip by, nor one to remember
        optim.set_learning_rate(self.optimizer, learning_rate)
        with self.guard.updates.measuring():
            if isinstance(self.optimizer, GraphAdamW) and self.optimizer.is_recorded and not self.scaler.is_enabled():
                self.optimizer.replay()
            elif numbers.finite:
                self.scaler.step(self.optimizer)
                self.scaler.update()
            else:  # the scaler would leave out the step on just those ranks that found a value not finite
                self.optimizer.step()
                self._forget_unscaling()
        if isinstance(self.optimizer, GraphAdamW) and not self.optimizer.is_recorded and self.is_recorded:
            self.optimizer.record()
        self.clear_gradients()

    @property
    def loss_scale(self) -> float | None:
        """Of fp16; None with a precision that needs none."""
        return self.scaler.get_scale() if self.scaler.is_enabled() else None

    def set_loss_scale(self, scale: float) -> None:
        self.scaler.update(scale)

    def _forget_unscaling(self) -> None:
        """The loss scaler counts this step's gradients as unscaled, once and no more, until it is told of the end."""
        if self.loss_scale is not None:
            self.set_loss_scale(self.loss_scale)

    def _zero_nonfinite(self) -> float:
        """The global norm of what is left. A collective, which only a bad step takes."""
        for _, part in self.parts:
            if part.grad is not None:
                torch.nan_to_num_(part.grad, nan=0.0, posinf=0.0, neginf=0.0)
        return float(self.world.gather([float(self._squares())]).sum().sqrt())

    def skip(self) -> None:
        """Drop the gradients."""
        self._forget_unscaling()
        self.clear_gradients()

    def clear_gradients(self) -> None:
        if self._graph is not None:
            self._graph.clear_gradients()
        else:
            self.optimizer.zero_grad(set_to_none=True)

    def forget_step(self) -> None:
        """After a step that ran out of memory in its passes: free what it left."""
        if self._graph is not None:
            self._graph.forget()
        if isinstance(self.optimizer, GraphAdamW):
            self.optimizer.forget_recording()
        self.optimizer.zero_grad(set_to_none=True)
        if self.world.device.type == "cuda":
            torch.cuda.empty_cache()

    def _memory_bytes(self) -> int:
        if self.world.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.world.device)
        return int(self._process.memory_info().rss)


def _targets(batches: StepBatches) -> int:
    """Of this rank's micro-batches."""
    return sum(batch.target_count for batch in batches.micro_batches)
