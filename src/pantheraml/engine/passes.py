"""Forward and backward passes over the batches of a step, by a process that holds every layer, in whole or in part.

`Passes` is what a step asks for, however the model is spread; a process that holds some layers only has
`engine.pipeline_run`.
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
from pantheraml.engine.graph import StepGraph
from pantheraml.engine.loss import LossModel, Routing
from pantheraml.models.routing import RouterSums
from pantheraml.parallel.borders import SharedGradients
from pantheraml.parallel.context import cut_sequence
from pantheraml.parallel.gradient_sum import sum_gradients
from pantheraml.parallel.process_group import World
from pantheraml.parallel.split import DataParallelLoss

Autocast = Callable[[], AbstractContextManager[object]]


class Passes(Protocol):
    full_logits_reason: str | None
    """Why the loss needs full logits; None if it does not."""
    meets_peers: bool
    """Whether the pass that began last exchanges something with peers, who would wait for one that breaks off."""

    def backward(self, batches: Sequence[Batch], factor: float) -> Tensor:
        """Add the gradient of `factor` times the summed loss of `batches`; that sum, as far as it was found here."""
        ...

    def evaluate(self, batch: Batch) -> Tensor:
        """The summed loss of `batch`, as far as it is found here."""
        ...


@dataclass(frozen=True)
class Peers:
    """How a process that holds every layer goes about its peers; by default it has none."""

    without_sync: Callable[[], AbstractContextManager[None]] = nullcontext
    """Inside, gradients stay local: for all micro-batches of a step but the last."""
    last_pass_only: bool = False
    """Passes before the last one of a step exchange nothing at all."""
    shared: SharedGradients | None = None
    """Gradients of which every process that computes the same tokens has a share."""
    sum_over: dist.ProcessGroup | None = None
    """Whose gradients are added up after the last backward pass, where no wrapper does so meanwhile."""
    parts_of_rows: dist.ProcessGroup | None = None
    """Who shares the rows of every batch, each with a part of their tokens."""


class WholePasses:
    def __init__(
        self,
        loss_model: LossModel,
        wrapped: nn.Module,
        peers: Peers,
        *,
        device: torch.device,
        autocast: Autocast,
        graph: bool = False,
    ) -> None:
        """`wrapped` is what training calls: `loss_model` itself, or what holds it together with that of its peers."""
        self._loss_model, self._wrapped, self._peers = loss_model, wrapped, peers
        self._device, self._autocast = device, autocast
        self.full_logits_reason, self.meets_peers = loss_model.full_logits_reason, True
        self._trained = [p for p in loss_model.parameters() if p.requires_grad]
        self.graph = StepGraph(self._run, self._trained, device) if graph else None
        self._aux_scale = 0.0
        self._routed: RouterSums | None = None
        """Of the global batch; None: of the one batch of a pass, when that is run."""

    @property
    def balances_experts(self) -> bool:
        """Whether an auxiliary loss is added, for which `weigh_experts` has to look at each step first."""
        return self._loss_model.balance is not None

    @torch.no_grad()
    def weigh_experts(self, batches: Sequence[Batch], target_tokens: int, world: World) -> None:
        """Before the passes of a step: where do the tokens of its global batch go? A collective.

        Only the shares of the whole batch make the auxiliary loss a sum over its parts. They take a forward pass over
        every batch, unless there is one batch alone.
        """
        assert self._loss_model.balance is not None
        self._aux_scale, self._routed = self._loss_model.balance.coefficient * max(1, target_tokens), None
        if world.size == len(batches) == 1:
            return
        self.meets_peers = True
        found = []
        for batch in batches:
            self._loss(self._loss_model, self._own_part(batch), self._routing(batch))
            assert self._loss_model.routed is not None
            found.append(torch.cat([value.flatten().double() for value in self._loss_model.routed]))
        everyone = world.gather(torch.stack(found).sum(dim=0).tolist()).sum(dim=0)
        experts = len(everyone) // 2
        self._routed = RouterSums(everyone[:experts], everyone[experts:-1], everyone[-1])

    def aux_loss(self) -> float | None:
        """The load-balancing loss of the last step, before its coefficient; None: there is none."""
        routed = self._routed or self._loss_model.routed
        return None if routed is None else float(routed.loss())

    def _routing(self, batch: Batch) -> Routing | None:
        if self._loss_model.balance is None:
            return None
        weights = None
        if self._routed is not None:
            weights = (self._routed.chosen / self._routed.rows.clamp(min=1).square()).to(self._device)
        mask, group = batch.mask(), self._peers.parts_of_rows
        own = mask if group is None else cut_sequence(mask, group)
        return Routing(own.to(self._device), self._aux_scale, weights)

    def backward(self, batches: Sequence[Batch], factor: float) -> Tensor:
        total: Tensor | None = None  # nothing is launched before the first pass, which a GPU may be waiting for
        last = len(batches) - 1
        for index, batch in enumerate(batches):
            self.meets_peers = index == last or not self._peers.last_pass_only
            if self.graph is not None:
                loss = self.graph(batch, factor)
            else:
                with nullcontext() if index == last else self._peers.without_sync():
                    loss = self._run(self._own_part(batch), factor, self._routing(batch))
            # a copy: the next pass of a graph writes over its loss
            total = loss.to(self._device, torch.float64, copy=True) if total is None else total.add_(loss)
        if self._peers.shared is not None:
            self._peers.shared.add_up()
        if self._peers.sum_over is not None:
            sum_gradients(self._trained, self._peers.sum_over)
        return torch.zeros((), dtype=torch.float64, device=self._device) if total is None else total

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Tensor:
        return self._loss(self._loss_model, self._own_part(batch))

    def _run(self, batch: Batch, factor: float | Tensor, routing: Routing | None = None) -> Tensor:
        """Forward and backward of one micro-batch, its loss times `factor`; the summed loss."""
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
        """This process's tokens of every row; the documents stay those of whole rows, as attention sees them."""
        group = self._peers.parts_of_rows
        if group is None:
            return batch
        targets = cut_sequence(batch.targets, group)
        return replace(
            batch,
            input_ids=cut_sequence(batch.input_ids, group),
            position_ids=cut_sequence(batch.position_ids, group),
            targets=targets,
            target_count=int((targets >= 0).sum()),
        )


class CopiesPasses:
    """By copies of the model on several devices of this process, which share the rows of every batch."""

    def __init__(
        self, loss_model: LossModel, device_ids: Sequence[int], *, device: torch.device, autocast: Autocast
    ) -> None:
        self.full_logits_reason, self.meets_peers = loss_model.full_logits_reason, False
        self._device = device
        self._loss = DataParallelLoss(loss_model, device_ids, autocast)

    def backward(self, batches: Sequence[Batch], factor: float) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for batch in batches:
            loss = self._of(batch)
            (loss * factor).backward()
            total += loss.detach()
        return total

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Tensor:
        return self._of(batch)

    def _of(self, batch: Batch) -> Tensor:
        """Borders of documents are told for the rows as a whole; each copy finds those of its own rows by itself."""
        batch = batch.to(self._device)
        loss: Tensor = self._loss(batch.input_ids, batch.position_ids, batch.targets)
        return loss
