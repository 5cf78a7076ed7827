"""Memory that torch's allocator reserves beyond what a step allocates at its peak.

The tensors that a prediction lists go through the simulated allocator in the order of a step: forward, loss, backward
and optimizer of an eager step, of which the optimizer's states stay, and then a second one, which is captured as a CUDA
graph, with memory of its own, where the run does that. What kernels hold between two of these tensors is not listed, so
this is what the listed ones cost, rounding and gaps included. On an H200 the median of its errors is 3.5 %, and the
worst 23 %, of a run of 3 GiB (docs/planner.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pantheraml.planner.memory.allocator import SMALL, Allocator, Block
from pantheraml.planner.memory.blocks import MIB, UNIT, round_up
from pantheraml.planner.memory.head import HeadUse

TYPICAL_UNUSED = 0.07
"""Share of the allocated peak that is reserved beyond it by others' experience, 5 to 7 %. No less is predicted, as
tensors that are not listed make gaps, too."""
CONTEXT_BYTES = 1474 * MIB
"""CUDA's own and its loaded kernels': the largest of 17 runs on an H200, 13 of which had 1,400 MiB or more."""
OLDER_CONTEXT_BYTES = 1268 * MIB
"""That of an A100, the largest that is known of GPUs before Hopper."""
NCCL_BYTES = 600 * MIB
"""NCCL's buffers, the largest that are known."""
MOST_STEPS = 4
"""The first has no optimizer states before its end; steps are alike from the one on that takes nothing more."""

WARM_LAYERS = 2
"""Layers whose forward holds what is recomputed later; the others mostly find the same blocks, and cost time here."""


@dataclass(frozen=True)
class LayerTensors:
    """Sizes of the tensors of one decoder layer of a rank."""

    stored: tuple[int, ...]
    """Kept between its forward and its backward."""
    recomputed: tuple[int, ...]
    """Made again for its backward, with checkpointing."""
    moments: tuple[tuple[int, ...], ...]
    """Held besides at moments of its backward."""


@dataclass(frozen=True)
class StepTensors:
    """Sizes of the tensors of a rank."""

    lasting: tuple[int, ...]
    """Weights, adapters, workspaces, and gradients that outlive a step."""
    states: tuple[int, ...]
    """States of the optimizer, made by the first step."""
    layer: LayerTensors
    layers: int
    passes: int
    """Forward passes before the first backward."""
    gradients: tuple[int, ...]
    """Gradients of a layer."""
    outer_gradients: tuple[int, ...]
    """Gradients outside of layers, except the head's."""
    summed_gradient: int
    """Gradient of a tied embedding and head, summed in a third tensor; 0: not tied or not trained."""
    head: HeadUse | None
    gathered: tuple[int, int]
    """FSDP: whole weights of a layer, and what its gradients take until they are reduced; 0: not sharded."""
    captured: bool
    """Steps after the first are a CUDA graph."""


def driver_bytes(world_size: int, *, hopper: bool) -> int:
    """Return what the driver counts for a process beyond what torch's allocator has reserved, at most."""
    return (CONTEXT_BYTES if hopper else OLDER_CONTEXT_BYTES) + (NCCL_BYTES if world_size > 1 else 0)


def unused_bytes(step: StepTensors) -> int:
    """Bytes that are reserved beyond those that are allocated at the peak of a step."""
    allocator = Allocator()
    for size in _merged(step.lasting):
        allocator.allocate(size)
    eager, before = _Pass(allocator, step), -1
    for number in range(1 if step.captured else MOST_STEPS):
        eager.run()
        if allocator.peak_reserved == before:
            break
        before = allocator.peak_reserved
        for size in _merged(step.states) if number == 0 else ():
            allocator.allocate(size)
        eager.drop_gradients()
    if not step.captured:
        return allocator.peak_reserved - allocator.peak_allocated
    allocator.empty_cache()
    graph = Allocator()
    _Pass(graph, step).run()
    reserved = max(allocator.peak_reserved, allocator.reserved + graph.peak_reserved)
    return reserved - max(allocator.peak_allocated, allocator.allocated + graph.peak_allocated)


def _merged(sizes: Iterable[int]) -> tuple[int, ...]:
    """The same with small tensors, of which there may be thousands, taken together in pieces of one size."""
    found = [round_up(size, UNIT) for size in sizes if size]
    whole, rest = divmod(sum(size for size in found if size <= SMALL), SMALL)
    return (*(size for size in found if size > SMALL), *[SMALL] * whole, *[rest] * (rest > 0))


class _Pass:
    """Forward and backward."""

    def __init__(self, allocator: Allocator, step: StepTensors) -> None:
        layer = step.layer
        self._allocator, self._step = allocator, step
        self._layer = LayerTensors(
            _merged(layer.stored), _merged(layer.recomputed), tuple(_merged(moment) for moment in layer.moments)
        )
        self._layer_gradients = _merged(step.gradients)
        self._gradients: list[Block] = []

    def run(self) -> None:
        step, layer = self._step, self._layer
        kept: list[list[Block]] = []
        for number in range(step.passes * step.layers):
            gathered = self._allocate(step.gathered[:1])
            kept.append(self._allocate(layer.stored))
            if number < WARM_LAYERS:
                self._hold(layer.recomputed)
            self._free(gathered)
        self._loss()
        for number in range(step.passes * step.layers):
            gathered = self._allocate(step.gathered)
            recomputed = self._allocate(layer.recomputed)
            for moment in layer.moments:
                self._hold(moment)
            if number < step.layers:  # later passes add to them
                self._gradients += self._allocate(self._layer_gradients)
            self._free([*recomputed, *kept.pop(), *gathered])
        added = self._allocate([step.summed_gradient])
        self._gradients += self._allocate(step.outer_gradients)
        self._free(added)

    def drop_gradients(self) -> None:
        self._free(self._gradients)
        self._gradients.clear()

    def _loss(self) -> None:
        head = self._step.head
        if head is None:
            return
        rows = self._allocate(head.rows)
        self._gradients += self._allocate([head.gradient])
        for _ in range(head.chunks):
            self._hold(head.logits)
        self._hold(head.backward)
        self._free(rows)

    def _allocate(self, sizes: Sequence[int]) -> list[Block]:
        return [self._allocator.allocate(size) for size in sizes if size]

    def _free(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            self._allocator.free(block)

    def _hold(self, sizes: Sequence[int]) -> None:
        self._free(self._allocate(sizes))
