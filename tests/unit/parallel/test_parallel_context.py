from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pantheraml.base.errors import UnsupportedModelError
from pantheraml.parallel.context import check_heads, heads_to_sequence, sequence_to_heads, shard_sequence


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    """Process group with world size 1."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    group = dist.group.WORLD
    assert group is not None
    yield group
    dist.destroy_process_group()


def test_uneven_heads_are_rejected_with_degrees_that_work() -> None:
    check_heads(12, 4)
    with pytest.raises(UnsupportedModelError, match=r"5 ranks.*12 attention heads") as caught:
        check_heads(12, 5)
    assert caught.value.fix == "Use a parallel.context that divides 12: 2, 3, 4, 6, 12."


def test_one_head_allows_no_context_parallelism() -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        check_heads(1, 2)
    assert caught.value.fix == "Use parallel.context=1."


def test_heads_are_counted_per_tensor_parallel_rank() -> None:
    check_heads(8, 4, tensor=2)
    with pytest.raises(UnsupportedModelError, match=r"over 4 ranks with tensor parallelism over 2 .* 4 ") as caught:
        check_heads(4, 4, tensor=2)
    assert caught.value.fix == "Use a parallel.context that divides 2: 2."
    check_heads(4, 2, tensor=3)  # rejected by tensor parallelism itself


def test_group_of_one_is_identity(alone: dist.ProcessGroup) -> None:
    rows = torch.arange(12).view(2, 6)
    assert torch.equal(shard_sequence(rows, alone), rows)
    query, key, value = torch.rand(2, 4, 6, 8), torch.rand(2, 2, 6, 8), torch.rand(2, 2, 6, 5)
    for found, given in zip(sequence_to_heads(query, key, value, alone), (query, key, value), strict=True):
        assert torch.equal(found, given)
    mixed = torch.rand(2, 6, 4, 5)
    assert torch.equal(heads_to_sequence(mixed, alone), mixed)
