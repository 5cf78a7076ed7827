from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pantheraml.base.errors import CheckpointError, ConfigError
from pantheraml.specs.config_file import all_keys, validate
from pantheraml.specs.resume import (
    MAY_CHANGE,
    MAY_NOT_CHANGE,
    SECTIONS_THAT_MAY_CHANGE,
    check_resumable,
    is_allowed,
    with_absolute_paths,
)
from pantheraml.specs.train import TrainConfig

WEIGHTED = {"aggregation": "weighted", "aggregation_weights": [1.0, 2.0]}


def config(**sections: dict[str, Any]) -> TrainConfig:
    return validate({"model": {"path": "m"}, "data": {"path": "d"}, **sections})


def test_a_run_may_be_made_longer_watched_and_spread_otherwise() -> None:
    longer = config(
        train={"max_steps": 9, "log_every_steps": 3, "schedule": "constant"},
        parallel={"world_size": 2, "shard": 2, "batch_shares": "adaptive"},
        stability={"on_nonfinite": "skip", "max_skipped_steps": 9},
        checkpoint={"keep": 7},
    )
    assert check_resumable(config(train={"schedule": "constant"}), longer) == []


@pytest.mark.parametrize(("key", "value"), [("max_steps", 9), ("epochs", 7.0)])
def test_where_the_learning_rate_goes_by_the_length_that_may_not_change(key: str, value: float) -> None:
    longer = config(train={key: value})
    with pytest.raises(CheckpointError, match=rf"train\.{key} was .*\(Under train.schedule=cosine"):
        check_resumable(config(), longer)
    with pytest.raises(CheckpointError, match="schedule was 'constant'") as refused:
        check_resumable(config(train={"schedule": "constant"}), config())
    assert key not in str(refused.value), "it is the same"


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("train", "seed", 3),
        ("model", "path", "other"),
        ("method", "rank", 3),
        ("train", "learning_rate", 1.0),
        ("parallel", "aggregation", "median"),
        ("stability", "clipping", "zclip"),
        ("stability", "clip_percentile", 50.0),
    ],
)
def test_what_makes_the_numbers_may_not_change_unless_somebody_insists(section: str, key: str, value: Any) -> None:
    base: dict[str, Any] = {"model": {"path": "m"}}
    changed = {**base, section: {**base.get(section, {}), key: value}}
    with pytest.raises(CheckpointError, match=rf"{section}\.{key} was") as refused:
        check_resumable(config(), config(**changed))
    assert f"--allow-change {section}.{key}" in str(refused.value)
    for name in (f"{section}.{key}", section):
        (insisted,) = check_resumable(config(), config(**changed, checkpoint={"allow_change": [name]}))
        assert insisted.key == f"{section}.{key}"
        assert insisted.after == value


def test_leave_for_one_field_is_not_leave_for_others() -> None:
    changed = config(train={"seed": 3, "learning_rate": 1.0}, checkpoint={"allow_change": ["train.seed"]})
    with pytest.raises(CheckpointError, match="learning_rate") as refused:
        check_resumable(config(), changed)
    assert "train.seed" not in str(refused.value)


def test_all_differences_are_shown() -> None:
    changed = config(train={"seed": 3}, parallel=WEIGHTED)
    with pytest.raises(CheckpointError, match=r"aggregation was 'mean', is 'weighted';.*; train\.seed was 0, is 3"):
        check_resumable(config(), changed)


@pytest.mark.parametrize(("key", "name"), [("data", "data.path"), ("method", "method"), ("train.seed", "train")])
def test_leave_covers_what_is_above_and_below(key: str, name: str) -> None:
    assert is_allowed(key, [name])
    assert not is_allowed("model", [name])
    assert not is_allowed(f"{name}s", [name])


def test_leave_for_a_key_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'train\.sed'") as refused:
        check_resumable(config(), config(checkpoint={"allow_change": ["train.sed"]}))
    assert "train.seed" in str(refused.value)


def test_the_lists_name_real_keys() -> None:
    known = {".".join(key) for key in all_keys()}
    assert known >= MAY_CHANGE | MAY_NOT_CHANGE | SECTIONS_THAT_MAY_CHANGE


def test_paths_become_absolute_where_they_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m").mkdir()
    made = with_absolute_paths(config(data={"path": "hub/data", "cache_dir": "c"}))
    assert made.model.path == str(tmp_path / "m")
    assert made.data.path == "hub/data"
    assert made.data.cache_dir == str(tmp_path / "c")
