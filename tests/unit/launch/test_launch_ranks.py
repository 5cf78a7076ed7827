"""The command line as a rank of another launcher."""

from __future__ import annotations

from pathlib import Path

import pytest

from pantheraml.base.env import ProcessRank
from pantheraml.base.errors import ConfigError
from pantheraml.cli.main import build_parser
from pantheraml.cli.train import resume_overrides
from pantheraml.launch.ranks import join_command, own_rank, with_world_size
from pantheraml.specs.config_file import load_config
from pantheraml.specs.train import TrainConfig

PLACE = ProcessRank(rank=1, local_rank=1, world_size=2)


def config(**parallel: int) -> TrainConfig:
    changes = {("parallel", name): value for name, value in parallel.items()}
    return load_config(None, {("model", "path"): "m", ("data", "path"): "d", **changes})


def test_world_size_comes_from_the_launcher() -> None:
    assert with_world_size(config(), PLACE).parallel.world_size == 2
    assert with_world_size(config(world_size=2, timeout_seconds=7), PLACE).parallel.timeout_seconds == 7


def test_a_different_world_size_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"4 processes were requested .* the launcher started 2"):
        with_world_size(config(world_size=4), PLACE)


def test_a_run_may_go_on_under_a_launcher_with_another_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torchrun -n 3 ... resume`: that the run had two processes is in its folder, and nobody has asked for it now."""
    asked = build_parser().parse_args(["resume", "runs/old"])
    assert ("parallel", "world_size") not in resume_overrides(asked), "without a launcher, as many as before"
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "3"}.items():
        monkeypatch.setenv(name, value)
    resumed = config(world_size=2)
    begun = load_config(None, {("model", "path"): "m", ("data", "path"): "d", **resume_overrides(asked)})
    assert with_world_size(begun, ProcessRank(1, 1, 3)).parallel.world_size == 3
    with pytest.raises(ConfigError, match="2 processes were requested") as raised:
        with_world_size(resumed, ProcessRank(1, 1, 3))
    assert "Leave --nproc out" not in str(raised.value)


def test_world_size_must_be_a_number() -> None:
    with pytest.raises(ConfigError, match="not 'two'") as raised:
        resume_overrides(build_parser().parse_args(["resume", "runs/old", "--nproc", "two"]))
    assert "For example: --nproc 2" in str(raised.value)


@pytest.mark.seed("S1-018", "S1-019", "S1-020", "C10")
def test_a_rank_by_its_own_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    assert own_rank(config().parallel) is None
    second = config(world_size=2, rank=1, local_rank=1)
    assert own_rank(second.parallel) == PLACE
    assert own_rank(config(world_size=1, rank=0, local_rank=0).parallel) is None, "a lone process is no rank"
    assert with_world_size(second, PLACE) == with_world_size(config(), PLACE), "or ranks would have other settings"
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert own_rank(config().parallel) == ProcessRank(0, 0, 2)
    with pytest.raises(ConfigError, match=r"parallel.rank=1 .* made this process rank 0"):
        own_rank(second.parallel)


def test_ranks_can_tell_whether_they_have_the_same_configuration(tmp_path: Path) -> None:
    same = join_command(tmp_path, config(timeout_seconds=7, max_retries=1))
    assert same == join_command(tmp_path, config(timeout_seconds=7, max_retries=1))
    assert "--timeout-seconds=7" in same
    assert "--max-retries=1" in same
    other = join_command(tmp_path, config(timeout_seconds=7, max_retries=1, bucket_cap_mb=3))
    assert [a == b for a, b in zip(same, other, strict=True)].count(False) == 1
