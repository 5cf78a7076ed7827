"""Capture calls as a CUDA graph, so that kernel launches from Python are not part of the measurement."""

from __future__ import annotations

from collections.abc import Callable


def recorded(calls: Callable[[], None]) -> Callable[[], None] | None:
    """Return the replay of `calls`, which must have run before. None if they synchronize, or without a GPU."""
    import torch

    if not torch.cuda.is_available():
        return None
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph):
            calls()
    except RuntimeError:
        torch.cuda.set_stream(stream)  # a failed capture leaves its own stream set
        torch.cuda.synchronize()
        return None
    graph.replay()
    return graph.replay
