"""Calls as a CUDA graph, so that starting kernels from Python is not what is measured."""

from __future__ import annotations

from collections.abc import Callable


def recorded(calls: Callable[[], None]) -> Callable[[], None] | None:
    """They must have run before. None: they ask the GPU for something on their way, or there is none."""
    import torch

    if not torch.cuda.is_available():
        return None
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph):
            calls()
    except RuntimeError:
        torch.cuda.set_stream(stream)  # a recording that fails leaves its own behind
        torch.cuda.synchronize()
        return None
    graph.replay()
    return graph.replay
