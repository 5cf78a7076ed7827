"""Forward and backward passes over the micro-batches of a step.

`Passes` is the interface that a step uses, whatever the parallel layout. The implementations here are for ranks that
hold every layer, sharded or not; for pipeline stages see `engine.step.pipeline_step`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pantheraml.data.batch import Batch
from pantheraml.engine.step.cuda_graph import StepGraph
from pantheraml.engine.step.loss import LossModel, Routing
from pantheraml.models.router_loss import RouterSums
from pantheraml.parallel.context import shard_sequence
from pantheraml.parallel.device_map import DataParallelLoss
from pantheraml.parallel.gradient_sum import sum_gradients
from pantheraml.parallel.process_group import World
from pantheraml.parallel.tp_mappings import PartialGradients

Autocast = Callable[[], AbstractContextManager[object]]


class Passes(Protocol):
    full_logits_reason: str | None
    """Reason why the loss needs full logits; None if it does not."""
    uses_collectives: bool
    """Whether the current pass communicates: if it aborts, other ranks are left waiting."""

    def backward(self, batches: Sequence[Batch], factor: float) -> Tensor:
        """Accumulate the gradient of `factor` times the summed loss; return this rank's part of that sum."""
        ...

    def evaluate(self, batch: Batch) -> Tensor:
        """Return this rank's part of the summed loss of `batch`."""
        ...


@dataclass(frozen=True)
class PeerSync:
    """Communication of a rank that holds every layer; by default none."""

    without_sync: Callable[[], AbstractContextManager[None]] = nullcontext
    """Context without gradient reduction, for all micro-batches of a step but the last."""
    last_pass_only: bool = False
    """Only the last pass of a step communicates."""
    tp_gradients: PartialGradients | None = None
    """Gradients of which every tensor parallel rank has a partial sum."""
    reduce_group: dist.ProcessGroup | None = None
    """Group to sum gradients over after the last backward, where no wrapper (DDP, FSDP) reduces them."""
    context_group: dist.ProcessGroup | None = None
    """Context parallel group: each rank has a part of the tokens of every row."""


class FullModelPasses:
    def __init__(
        self,
        loss_model: LossModel,
        wrapped: nn.Module,
        peers: PeerSync,
        *,
        device: torch.device,
        autocast: Autocast,
        graph: bool = False,
    ) -> None:
        """`wrapped`: the module that training calls, `loss_model` itself or its DDP wrapper."""
        self._loss_model, self._wrapped, self._peers = loss_model, wrapped, peers
        self._device, self._autocast = device, autocast
        self.full_logits_reason, self.uses_collectives = loss_model.full_logits_reason, True
        self._trained = [p for p in loss_model.parameters() if p.requires_grad]
        self.graph = StepGraph(self._run, self._trained, device) if graph else None
        self._aux_scale = 0.0
        self._routed: RouterSums | None = None
        """Router sums of the global batch; None: each pass uses those of its own batch."""

    @property
    def balances_experts(self) -> bool:
        """Whether an auxiliary loss is added, which requires `gather_routing` before each step."""
        return self._loss_model.balance is not None

    @torch.no_grad()
    def gather_routing(self, batches: Sequence[Batch], target_tokens: int, world: World) -> None:
        """Compute the routing of the global batch's tokens to experts, before the passes of a step. A collective.

        The auxiliary loss is a sum over micro-batches only if it uses the expert shares of the global batch. Computing
        them takes an extra forward pass over every micro-batch, unless there is just one.
        """
        assert self._loss_model.balance is not None
        self._aux_scale, self._routed = self._loss_model.balance.coefficient * max(1, target_tokens), None
        if world.size == len(batches) == 1:
            return
        self.uses_collectives = True
        sums = []
        for batch in batches:
            self._loss(self._loss_model, self._own_part(batch), self._routing(batch))
            assert self._loss_model.routed is not None
            sums.append(torch.cat([value.flatten().double() for value in self._loss_model.routed]))
        total = world.gather(torch.stack(sums).sum(dim=0).tolist()).sum(dim=0)
        experts = len(total) // 2
        self._routed = RouterSums(total[:experts], total[experts:-1], total[-1])

    def aux_loss(self) -> float | None:
        """Load-balancing loss of the last step, before its coefficient; None if there is none."""
        routed = self._routed or self._loss_model.routed
        return None if routed is None else float(routed.loss())

    def _routing(self, batch: Batch) -> Routing | None:
        if self._loss_model.balance is None:
            return None
        weights = None
        if self._routed is not None:
            weights = (self._routed.chosen / self._routed.rows.clamp(min=1).square()).to(self._device)
        mask, group = batch.mask(), self._peers.context_group
        own = mask if group is None else shard_sequence(mask, group)
        return Routing(own.to(self._device), self._aux_scale, weights)

    def backward(self, batches: Sequence[Batch], factor: float) -> Tensor:
        total: Tensor | None = None  # no kernel launch ahead of the first pass, which the GPU may be waiting for
        last = len(batches) - 1
        for index, batch in enumerate(batches):
            self.uses_collectives = index == last or not self._peers.last_pass_only
            if self.graph is not None:
                loss = self.graph(batch, factor)
            else:
                with nullcontext() if index == last else self._peers.without_sync():
                    loss = self._run(self._own_part(batch), factor, self._routing(batch))
            # a copy: the next graph replay overwrites the loss
            total = loss.to(self._device, torch.float64, copy=True) if total is None else total.add_(loss)
        if self._peers.tp_gradients is not None:
            self._peers.tp_gradients.all_reduce()
        if self._peers.reduce_group is not None:
            sum_gradients(self._trained, self._peers.reduce_group)
        return torch.zeros((), dtype=torch.float64, device=self._device) if total is None else total

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Tensor:
        return self._loss(self._loss_model, self._own_part(batch))

    def _run(self, batch: Batch, factor: float | Tensor, routing: Routing | None = None) -> Tensor:
        """Forward and backward of one micro-batch with its loss times `factor`; return the summed loss."""
        loss = self._loss(self._wrapped, batch, routing)
        (loss * factor).backward()
        return loss.detach()

    def _loss(self, module: nn.Module, batch: Batch, routing: Routing | None = None) -> Tensor:
        batch = batch.to(self._device)
        with self._autocast():
            loss: Tensor = module(
                batch.input_ids,
                batch.position_ids,
                batch.targets,
                batch.boundaries,
                batch.max_length,
                batch.target_count,
                *(() if routing is None else (routing,)),
            )
        return loss

    def _own_part(self, batch: Batch) -> Batch:
        """This rank's tokens of every row. Document boundaries stay those of full rows, as attention needs them."""
        group = self._peers.context_group
        if group is None:
            return batch
        targets = shard_sequence(batch.targets, group)
        return replace(
            batch,
            input_ids=shard_sequence(batch.input_ids, group),
            position_ids=shard_sequence(batch.position_ids, group),
            targets=targets,
            target_count=int((targets >= 0).sum()),
        )


class DataParallelPasses:
    """Passes by replicas on several devices of this process (DataParallel), which split the rows of every batch."""

    def __init__(
        self, loss_model: LossModel, device_ids: Sequence[int], *, device: torch.device, autocast: Autocast
    ) -> None:
        self.full_logits_reason, self.uses_collectives = loss_model.full_logits_reason, False
        self._device = device
        self._loss = DataParallelLoss(loss_model, device_ids, autocast)

    def backward(self, batches: Sequence[Batch], factor: float) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for batch in batches:
            loss = self._summed_loss(batch)
            (loss * factor).backward()
            total += loss.detach()
        return total

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Tensor:
        return self._summed_loss(batch)

    def _summed_loss(self, batch: Batch) -> Tensor:
        """Summed loss. The batch's boundaries are for all rows, so each replica computes those of its own rows."""
        batch = batch.to(self._device)
        loss: Tensor = self._loss(batch.input_ids, batch.position_ids, batch.targets)
        return loss
