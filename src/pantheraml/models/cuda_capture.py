"""Capture of CUDA graphs, for whole steps, for fused layers and for the optimizer.

When to capture differs too much to be shared: a step has one shape and gradients of its own, layers under a third-party
trainer depend on the addresses of all weights and on when their backward ran. What they share is here: the capture, and
that a failed one, which may run out of memory, leaves the process as it was.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch

_Result = TypeVar("_Result")


class CapturedGraph(Protocol):
    """Interface of torch.cuda.CUDAGraph."""

    def replay(self) -> None: ...


def capture(run: Callable[[], _Result], device: torch.device, pool: Any = None) -> tuple[CapturedGraph, _Result]:
    """Capture what `run` launches; return the graph, and what `run` returned.

    `pool`: memory pool to share with other graphs. After a failed capture torch's own stream would stay the current
    one, and the generator of random numbers would be unusable.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    graph, generator = torch.cuda.CUDAGraph(), torch.cuda.default_generators[index]
    before = generator.clone_state()
    try:
        with (
            torch.cuda.stream(torch.cuda.current_stream(index)),
            torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"),
        ):
            result = run()
    except RuntimeError:
        generator.graphsafe_set_state(before)
        raise
    return graph, result
