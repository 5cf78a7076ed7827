"""What the command line does with a rank that somebody else gave it."""

from __future__ import annotations

from pathlib import Path

import pytest

from pantheraml.base.env import ProcessRank
from pantheraml.base.errors import ConfigError
from pantheraml.launch.ranks import join_command, own_place, with_world_size
from pantheraml.specs.config_file import load_config
from pantheraml.specs.train import TrainConfig

PLACE = ProcessRank(rank=1, local_rank=1, world_size=2)


def config(**parallel: int) -> TrainConfig:
    changes = {("parallel", name): value for name, value in parallel.items()}
    return load_config(None, {("model", "path"): "m", ("data", "path"): "d", **changes})


def test_the_launcher_decides_how_many() -> None:
    assert with_world_size(config(), PLACE).parallel.world_size == 2
    assert with_world_size(config(world_size=2, timeout_seconds=7), PLACE).parallel.timeout_seconds == 7


def test_another_number_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"4 processes were asked for .* the launcher started 2"):
        with_world_size(config(world_size=4), PLACE)


def test_a_rank_by_its_own_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    assert own_place(config().parallel) is None
    second = config(world_size=2, rank=1, local_rank=1)
    assert own_place(second.parallel) == PLACE
    assert own_place(config(world_size=1, rank=0, local_rank=0).parallel) is None, "a lone process is no rank"
    assert with_world_size(second, PLACE) == with_world_size(config(), PLACE), "or ranks would have other settings"
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert own_place(config().parallel) == ProcessRank(0, 0, 2)
    with pytest.raises(ConfigError, match=r"parallel.rank=1 .* made this process rank 0"):
        own_place(second.parallel)


def test_ranks_can_tell_whether_they_have_the_same_configuration(tmp_path: Path) -> None:
    same = join_command(tmp_path, config(timeout_seconds=7, max_retries=1))
    assert same == join_command(tmp_path, config(timeout_seconds=7, max_retries=1))
    assert "--timeout-seconds=7" in same
    assert "--max-retries=1" in same
    other = join_command(tmp_path, config(timeout_seconds=7, max_retries=1, bucket_cap_mb=3))
    assert [a == b for a, b in zip(same, other, strict=True)].count(False) == 1
