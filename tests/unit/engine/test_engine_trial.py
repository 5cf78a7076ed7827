"""Samples of each rank in a trial."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pantheraml.data.dataset import TokenDataset
from pantheraml.data.prepare import prepare
from pantheraml.engine.trial import configured_shares, trial_feed
from pantheraml.models.loader import load_tokenizer
from pantheraml.parallel.layout import Layout
from pantheraml.parallel.process_group import World
from pantheraml.specs.parallel import DIMENSIONS, ParallelDims
from pantheraml.specs.train import TrainConfig
from tests import toy
from tests.harness import make_plan, silent


def config_of(folder: Path, shares: Any) -> TrainConfig:
    return TrainConfig.model_validate(
        {
            "model": {"path": str(folder / "model")},
            "data": {"path": str(folder / "data.jsonl"), "seq_len": 64, "cache_dir": str(folder / "cache")},
            "train": {"global_batch_size": 7},
            "parallel": {"batch_shares": shares},
        }
    )


@pytest.mark.parametrize(("shares", "sizes"), [([2, 5], [2, 5]), ([2, 2, 3], [4, 3]), ("adaptive", [4, 3])])
def test_each_rank_gets_its_batch_share(tmp_path: Path, shares: Any, sizes: list[int]) -> None:
    toy.write_tokenizer(tmp_path / "model")
    toy.write_jsonl(tmp_path / "data.jsonl", toy.arithmetic(60))
    config, dims = config_of(tmp_path, shares), ParallelDims(replicate=2)
    data = TokenDataset.open(prepare(config.data, tokenizer=load_tokenizer(config.model), emit=silent).train)
    plan = make_plan(config, dims=dims, micro=2)
    for rank, size in enumerate(sizes):
        place = {**dict.fromkeys(DIMENSIONS, 0), "replicate": rank}
        world = World(rank=rank, size=2, device=torch.device("cpu"), layout=Layout(dims, place, None))
        with trial_feed(data, world, config, plan) as feed:
            assert sum(map(len, feed.step(0).own_samples)) == size


def test_configured_shares_apply_only_to_matching_data_ranks(tmp_path: Path) -> None:
    config = config_of(tmp_path, [2, 5])
    assert configured_shares(config, ParallelDims(shard=2)) == [2, 5]
    assert configured_shares(config, ParallelDims(tensor=2)) is None
    assert configured_shares(config, ParallelDims()) is None
