"""Captures: replays rerun what was captured, and a failed capture leaves the process as it was."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pantheraml.models.cuda_capture import capture

GPU = torch.device("cuda")


def test_replay_reruns_what_was_captured() -> None:
    x, total = torch.ones(8, device=GPU), torch.zeros(8, device=GPU)
    graph, doubled = capture(lambda: 2 * total.add_(x), GPU)
    assert total.sum() == 0, "captured only"
    x.fill_(3)
    for count in (1, 2):
        graph.replay()
        assert torch.equal(doubled, torch.full_like(x, 6 * count))


def test_graphs_share_a_pool() -> None:
    pool = torch.cuda.graph_pool_handle()
    x = torch.ones(8, device=GPU)
    first, halved = capture(lambda: x / 2, GPU, pool)
    second, result = capture(lambda: halved + 1, GPU, pool)
    x.fill_(4)
    first.replay()
    second.replay()
    assert result.tolist() == [3.0] * 8


def test_failed_capture_leaves_stream_and_generator_as_they_were() -> None:
    def fail() -> Tensor:
        torch.randn(4, device=GPU)
        raise torch.OutOfMemoryError("no memory")

    torch.manual_seed(3)
    expected = [torch.randn(4, device=GPU) for _ in range(2)]
    torch.manual_seed(3)
    torch.testing.assert_close(torch.randn(4, device=GPU), expected[0], rtol=0, atol=0)
    stream = torch.cuda.current_stream()
    with pytest.raises(torch.OutOfMemoryError, match="no memory"):
        capture(fail, GPU)
    assert torch.cuda.current_stream() == stream
    assert not torch.cuda.is_current_stream_capturing()
    torch.testing.assert_close(torch.randn(4, device=GPU), expected[1], rtol=0, atol=0)


def test_failed_synchronization_leaves_stream_as_it_was() -> None:
    """Ending this capture fails as well, before torch restores the stream."""
    x, stream = torch.ones(8, device=GPU), torch.cuda.current_stream()
    with pytest.raises(RuntimeError):
        capture(lambda: x.sum().item(), GPU)
    assert torch.cuda.current_stream() == stream
    assert (2 * x).tolist() == [2.0] * 8
