"""Forward and backward of a micro-batch as one CUDA graph.

A step of a small model is more than a thousand short kernels, and a server's CPU may take longer to launch them than
the GPU to run them (1B LoRA on an H200: 59 ms of kernels, 68 to 80 ms of launching). Packed batches have one shape, so
their launches are recorded once and then replayed as a whole. What a graph reads and writes stays where it was: batches
are copied into the tensors that it was recorded with, and gradients are zeroed, not dropped. Batches that differ in
shape have graphs of their own, in one memory; those of which too few targets count run as ever, because how many
decides about shapes.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from pantheraml.data.batch import Batch
from pantheraml.kernels.linear_cross_entropy import NEARLY_ALL

Run = Callable[[Batch, Tensor], Tensor]
"""Forward and backward of a batch on the device, the loss times the given factor; returns the summed loss."""

MOST_GRAPHS = 8
"""Shapes beyond that many run without a graph."""


@dataclass(frozen=True)
class _Recorded:
    graph: torch.cuda.CUDAGraph
    batch: Batch
    factor: Tensor
    loss: Tensor


class StepGraph:
    """Runs micro-batches, recorded ones by replaying them."""

    def __init__(self, run: Run, parameters: Sequence[nn.Parameter], device: torch.device) -> None:
        self._run, self._parameters, self._device = run, parameters, device
        self._recorded: dict[tuple[object, ...], _Recorded] = {}
        self._seen: set[tuple[object, ...]] = set()
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, batch: Batch, factor: float) -> Tensor:
        """The summed loss of `batch`; gradients are added to the parameters'. It is overwritten by the next call."""
        key = _key(batch)
        if key not in self._recorded and key in self._seen and len(self._recorded) < MOST_GRAPHS:
            self._recorded[key] = self._record(batch)
        recorded = self._recorded.get(key)
        if recorded is None or not _all_rows(batch):
            if _all_rows(batch):  # the first of its shape: kernels are compiled and chosen outside of a recording
                self._seen.add(key)
            return self._run(batch.to(self._device), torch.tensor(factor, device=self._device))
        for here, there in zip(_tensors(batch), _tensors(recorded.batch), strict=True):
            there.copy_(here, non_blocking=True)
        recorded.factor.fill_(factor)
        recorded.graph.replay()
        return recorded.loss

    @property
    def is_recorded(self) -> bool:
        """Gradients stay where they are from now on, until `forget`."""
        return bool(self._recorded)

    def clear_gradients(self) -> None:
        """Zeros where a graph adds to; as always before there is one."""
        if self._recorded:
            torch._foreach_zero_([p.grad for p in self._parameters if p.grad is not None])
        else:
            for parameter in self._parameters:
                parameter.grad = None

    def forget(self) -> None:
        """Drop what was recorded, and its memory."""
        self._recorded.clear()
        self._seen.clear()

    def _record(self, batch: Batch) -> _Recorded:
        # What fits every batch of this shape: documents are at most a row long, and all rows are looked at.
        rows, width = batch.input_ids.shape
        static = replace(batch.to(self._device), max_length=width, target_count=rows * width)
        factor = torch.zeros((), device=self._device)
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gc.collect()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()  # a recording has memory of its own, and the first step's is not needed any more
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            loss = self._run(static, factor)
        return _Recorded(graph, static, factor, loss)


def _key(batch: Batch) -> tuple[object, ...]:
    return tuple(batch.input_ids.shape), None if batch.boundaries is None else len(batch.boundaries)


def _all_rows(batch: Batch) -> bool:
    return batch.target_count >= NEARLY_ALL * batch.targets.numel()


def _tensors(batch: Batch) -> list[Tensor]:
    found = [batch.input_ids, batch.targets, batch.position_ids]
    return found if batch.boundaries is None else [*found, batch.boundaries]
