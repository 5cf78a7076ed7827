"""Forward and backward of a micro-batch as one CUDA graph.

A step of a small model is more than a thousand short kernels, and a server's CPU may take longer to launch them than
the GPU to run them (1B LoRA on an H200: 59 ms of kernels, 68 to 80 ms of launching). Packed batches have one shape, so
their launches are recorded once and then replayed as a whole. What a graph reads and writes stays where it was: batches
are copied into the tensors that it was recorded with, and gradients are not dropped. A graph for the first batch of a
step writes over the gradients of the step before, which spares zeroing them and adding to each (8B LoRA on an H200:
449 launches and 1.0 of 286 ms); a graph for any other adds to them. Batches that differ in shape have graphs of their
own, in one memory; those of which too few targets count run as ever, because how many decides about shapes.

A GPU has nothing to do from the end of one step until the next one's graph is launched. So the next batch can be put
where a graph reads it as soon as the last graph before it is launched: the copies wait in line behind that.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from pantheraml.data.batch import Batch
from pantheraml.kernels.linear_cross_entropy import NEARLY_ALL

Run = Callable[[Batch, Tensor], Tensor]
"""Forward and backward of a batch on the device, the loss times the given factor; returns the summed loss."""

MOST_GRAPHS = 8
"""Shapes beyond that many run without a graph."""

_Shape = tuple[object, ...]


class Graph(Protocol):
    """Such as torch.cuda.CUDAGraph."""

    def replay(self) -> None: ...


class Inputs:
    """Where a graph reads what changes from batch to batch."""

    def __init__(self, batch: Batch, factor: Tensor) -> None:
        self.batch, self.factor = batch, factor
        self._holds: tuple[Batch, float] | None = None

    def fill(self, batch: Batch, factor: float) -> None:
        """Nothing is copied that is there already."""
        held, value = self._holds or (None, None)
        self._holds = None  # should copying fail
        if held is not batch:
            for here, there in zip(_tensors(batch), _tensors(self.batch), strict=True):
                there.copy_(here, non_blocking=True)
        if value != factor:
            self.factor.fill_(factor)
        self._holds = batch, factor


@dataclass(frozen=True)
class Recorded:
    graph: Graph
    inputs: Inputs
    loss: Tensor
    writes_over: bool
    """Gradients, instead of adding to them."""


class StepGraph:
    """Runs micro-batches, recorded ones by replaying them."""

    def __init__(self, run: Run, parameters: Sequence[nn.Parameter], device: torch.device) -> None:
        self._run, self._parameters, self._device = run, parameters, device
        self._recorded: dict[tuple[_Shape, bool], Recorded] = {}
        """By shape, and by whether gradients are written over. All know the same gradients, which the first of them
        made, or found; so no other than the first can be one that makes them."""
        self._seen: set[_Shape] = set()
        self._is_first = True
        """Whether the next batch is the first of a step; the gradients of the step before may still be there."""
        self._pool: Any = None
        """The memory of all graphs."""

    def __call__(self, batch: Batch, factor: float) -> Tensor:
        """The summed loss of `batch`; gradients are added to the parameters'. It is overwritten by the next call."""
        first, self._is_first = self._is_first, False
        recorded = self._recording(batch, first)
        if first and self._recorded and not (recorded is not None and recorded.writes_over):
            torch._foreach_zero_([p.grad for p in self._parameters if p.grad is not None])
        if recorded is None:
            return self._run(batch.to(self._device), torch.tensor(factor, device=self._device))
        recorded.inputs.fill(batch, factor)
        recorded.graph.replay()
        return recorded.loss

    def expect(self, batch: Batch, factor: float) -> None:
        """After the last batch of a step: the next step begins with `batch`, unless its own call says otherwise."""
        shape = _shape(batch)
        recorded = self._recorded.get((shape, (shape, True) in self._recorded)) if _all_rows(batch) else None
        if recorded is not None:
            recorded.inputs.fill(batch, factor)

    def _recording(self, batch: Batch, first: bool) -> Recorded | None:
        """What is to be replayed for `batch`; None: it runs by itself."""
        if not _all_rows(batch):
            return None
        shape = _shape(batch)
        if shape not in self._seen:  # kernels are compiled and chosen outside of a recording
            self._seen.add(shape)
            return None
        key = shape, first and (not self._recorded or (shape, True) in self._recorded)
        if key not in self._recorded and len(self._recorded) < MOST_GRAPHS:
            self._recorded[key] = self._record(batch, writes_over=key[1])
        return self._recorded.get(key)

    @property
    def is_recorded(self) -> bool:
        """Gradients stay where they are from now on, until `forget`."""
        return bool(self._recorded)

    def clear_gradients(self) -> None:
        """The next batch is the first of a step. What a graph may write over stays until then."""
        self._is_first = True
        if not self._recorded:
            for parameter in self._parameters:
                parameter.grad = None

    def forget(self) -> None:
        """Drop what was recorded, and its memory; the gradients are dropped, too."""
        self._recorded.clear()
        self._seen.clear()
        self._is_first = True

    def _record(self, batch: Batch, *, writes_over: bool) -> Recorded:
        # What fits every batch of this shape: documents are at most a row long, and all rows are looked at.
        rows, width = batch.input_ids.shape
        static = replace(batch.to(self._device), max_length=width, target_count=rows * width)
        factor = torch.zeros((), device=self._device)
        for parameter in self._parameters:
            if writes_over:
                parameter.grad = None  # what the recording puts there is where every replay will put it
            elif parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        graph, loss = self._capture(static, factor)
        return Recorded(graph, Inputs(static, factor), loss, writes_over)

    def _capture(self, batch: Batch, factor: Tensor) -> tuple[Graph, Tensor]:
        gc.collect()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()  # a recording has memory of its own, and the first step's is not needed any more
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            loss = self._run(batch, factor)
        return graph, loss


def _shape(batch: Batch) -> _Shape:
    return tuple(batch.input_ids.shape), None if batch.boundaries is None else len(batch.boundaries)


def _all_rows(batch: Batch) -> bool:
    return batch.target_count >= NEARLY_ALL * batch.targets.numel()


def _tensors(batch: Batch) -> list[Tensor]:
    found = [batch.input_ids, batch.targets, batch.position_ids]
    return found if batch.boundaries is None else [*found, batch.boundaries]
