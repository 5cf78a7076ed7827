from __future__ import annotations

import numpy as np
import pytest
import torch

from pantheraml.parallel.data import gradient_scale, shard
from pantheraml.parallel.process_group import World


@pytest.mark.parametrize(("samples", "size", "micro"), [(8, 1, 8), (7, 2, 2), (3, 4, 1), (10, 3, 4), (16, 4, 4)])
def test_shards_cover_the_batch_once_in_order(samples: int, size: int, micro: int) -> None:
    ids = np.arange(100, 100 + samples)
    parts = [shard(ids, rank=rank, size=size, micro_batch=micro) for rank in range(size)]
    assert np.concatenate([part for rank in parts for part in rank]).tolist() == ids.tolist()
    counts = [sum(len(part) for part in rank) for rank in parts]
    assert max(counts) - min(counts) <= 1
    assert all(1 <= len(part) <= micro for rank in parts for part in rank)


def test_gradient_scale_undoes_the_mean_over_ranks() -> None:
    world = World(rank=0, size=4, device=torch.device("cpu"))
    assert gradient_scale(world, 100) == pytest.approx(4 / 100)


def test_one_process_gathers_itself() -> None:
    rows = World(rank=0, size=1, device=torch.device("cpu")).gather([1.0, 2.0])
    assert rows.tolist() == [[1.0, 2.0]]
