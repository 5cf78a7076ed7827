"""Forward and backward of a micro-batch as one CUDA graph.

A step of a small model is more than a thousand short kernels, and the CPU may take longer to launch them than the GPU
to run them (1B LoRA on an H200: 59 ms of kernels, 68 to 80 ms of launching). Packed batches all have one shape, so the
pass is captured once and replayed. A graph has fixed addresses: batches are copied into its static inputs, and
gradients are not freed. The graph for the first micro-batch of a step overwrites the gradients of the previous step,
which saves zeroing and accumulating them (8B LoRA on an H200: 449 launches and 1.0 of 286 ms); other graphs accumulate.
Each batch shape has its own graph, in a shared memory pool. Batches with too few targets run eagerly, because the
number of targets decides about shapes.

The GPU is idle from the end of a step until the next graph is launched, so the next batch can be copied into the static
inputs as soon as the last graph has been launched: the copies queue behind it on the stream.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from pantheraml.data.batch import Batch
from pantheraml.kernels.linear_cross_entropy import NEARLY_ALL
from pantheraml.models.cuda_capture import CapturedGraph, capture

Run = Callable[[Batch, Tensor], Tensor]
"""Forward and backward of a batch on the device, with the loss times the given factor; returns the summed loss."""

MOST_GRAPHS = 8
"""Further shapes run eagerly."""

_Shape = tuple[object, ...]


class StaticInputs:
    """Static input tensors of a graph."""

    def __init__(self, batch: Batch, factor: Tensor) -> None:
        self.batch, self.factor = batch, factor
        self._current: tuple[Batch, float] | None = None

    def fill(self, batch: Batch, factor: float) -> None:
        """Copy `batch` and `factor` in, unless they are already there."""
        current, value = self._current or (None, None)
        self._current = None  # in case copying fails
        if current is not batch:
            for source, target in zip(_tensors(batch), _tensors(self.batch), strict=True):
                target.copy_(source, non_blocking=True)
        if value != factor:
            self.factor.fill_(factor)
        self._current = batch, factor


@dataclass(frozen=True)
class CapturedStep:
    graph: CapturedGraph
    inputs: StaticInputs
    loss: Tensor
    overwrites_grads: bool
    """Overwrites gradients instead of accumulating."""


class StepGraph:
    """Runs micro-batches, by graph replay once their shape has been captured."""

    def __init__(self, run: Run, parameters: Sequence[nn.Parameter], device: torch.device) -> None:
        self._run, self._parameters, self._device = run, parameters, device
        self._captured: dict[tuple[_Shape, bool], CapturedStep] = {}
        """By shape and whether gradients are overwritten. All graphs share the gradient tensors, which the first
        capture allocated or found; only the first can therefore be one that allocates them."""
        self._seen: set[_Shape] = set()
        self._is_first = True
        """Whether the next batch is the first of a step; gradients of the previous step may still be there."""
        self._pool: Any = None
        """Memory pool of all graphs."""

    def __call__(self, batch: Batch, factor: float) -> Tensor:
        """Accumulate gradients and return the summed loss of `batch`, a tensor that the next call overwrites."""
        first, self._is_first = self._is_first, False
        captured = self._graph_for(batch, first)
        if first and self._captured and not (captured is not None and captured.overwrites_grads):
            torch._foreach_zero_([p.grad for p in self._parameters if p.grad is not None])
        if captured is None:
            return self._run(batch.to(self._device), torch.tensor(factor, device=self._device))
        captured.inputs.fill(batch, factor)
        captured.graph.replay()
        return captured.loss

    def expect(self, batch: Batch, factor: float) -> None:
        """Copy `batch`, the likely first batch of the next step, ahead of time; call after the last batch of a step."""
        shape = _shape(batch)
        captured = self._captured.get((shape, (shape, True) in self._captured)) if _all_rows(batch) else None
        if captured is not None:
            captured.inputs.fill(batch, factor)

    def _graph_for(self, batch: Batch, first: bool) -> CapturedStep | None:
        """Graph to replay for `batch`, capturing it if needed; None: run eagerly."""
        if not _all_rows(batch):
            return None
        shape = _shape(batch)
        if shape not in self._seen:  # kernels must be compiled and autotuned before capture
            self._seen.add(shape)
            return None
        key = shape, first and (not self._captured or (shape, True) in self._captured)
        if key not in self._captured and len(self._captured) < MOST_GRAPHS:
            self._captured[key] = self._capture_step(batch, overwrites_grads=key[1])
        return self._captured.get(key)

    @property
    def is_captured(self) -> bool:
        """From now on gradients keep their addresses, until `reset`."""
        return bool(self._captured)

    def clear_gradients(self) -> None:
        """Mark the next batch as the first of a step; gradients that a graph may overwrite are kept until then."""
        self._is_first = True
        if not self._captured:
            for parameter in self._parameters:
                parameter.grad = None

    def reset(self) -> None:
        """Drop all graphs and their memory. The caller drops the gradients."""
        self._captured.clear()
        self._seen.clear()
        self._is_first = True

    def _capture_step(self, batch: Batch, *, overwrites_grads: bool) -> CapturedStep:
        # Valid for every batch of this shape: a document is at most a row long, and all rows may have targets.
        rows, width = batch.input_ids.shape
        static = replace(batch.to(self._device), max_length=width, target_count=rows * width)
        factor = torch.zeros((), device=self._device)
        for parameter in self._parameters:
            if overwrites_grads:
                parameter.grad = None  # capture allocates it, and every replay writes to that address
            elif parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        graph, loss = self._capture(static, factor)
        return CapturedStep(graph, StaticInputs(static, factor), loss, overwrites_grads)

    def _capture(self, batch: Batch, factor: Tensor) -> tuple[CapturedGraph, Tensor]:
        gc.collect()  # torch then empties its cache: the graph has its own pool
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        return capture(lambda: self._run(batch, factor), self._device, self._pool)


def _shape(batch: Batch) -> _Shape:
    return tuple(batch.input_ids.shape), None if batch.boundaries is None else len(batch.boundaries)


def _all_rows(batch: Batch) -> bool:
    return batch.target_count >= NEARLY_ALL * batch.targets.numel()


def _tensors(batch: Batch) -> list[Tensor]:
    found = [batch.input_ids, batch.targets, batch.position_ids]
    return found if batch.boundaries is None else [*found, batch.boundaries]
