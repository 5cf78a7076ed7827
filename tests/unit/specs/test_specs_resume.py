from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pantheraml.base.errors import CheckpointError, ConfigError
from pantheraml.specs.config_file import all_keys, validate
from pantheraml.specs.resume import (
    CHANGEABLE_KEYS,
    CHANGEABLE_SECTIONS,
    FIXED_KEYS,
    check_resumable,
    is_allowed,
    with_absolute_paths,
)
from pantheraml.specs.train import TrainConfig

WEIGHTED = {"aggregation": "weighted", "aggregation_weights": [1.0, 2.0]}


def config(**sections: dict[str, Any]) -> TrainConfig:
    return validate({"model": {"path": "m"}, "data": {"path": "d"}, **sections})


def test_length_logging_and_parallelism_may_change_on_resume() -> None:
    longer = config(
        train={"max_steps": 9, "log_every_steps": 3, "schedule": "constant"},
        parallel={"world_size": 2, "shard": 2, "batch_shares": "adaptive"},
        stability={"on_nonfinite": "skip", "max_skipped_steps": 9},
        checkpoint={"keep": 7},
    )
    assert check_resumable(config(train={"schedule": "constant"}), longer) == []


@pytest.mark.parametrize(("key", "value"), [("max_steps", 9), ("epochs", 7.0)])
def test_length_may_not_change_if_the_schedule_depends_on_it(key: str, value: float) -> None:
    longer = config(train={key: value})
    with pytest.raises(CheckpointError, match=rf"train\.{key} was .*\(With train.schedule=cosine"):
        check_resumable(config(), longer)
    with pytest.raises(CheckpointError, match="schedule was 'constant'") as refused:
        check_resumable(config(train={"schedule": "constant"}), config())
    assert key not in str(refused.value), "it did not change"


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
def test_numeric_settings_may_change_only_with_allow_change(section: str, key: str, value: Any) -> None:
    base: dict[str, Any] = {"model": {"path": "m"}}
    changed = {**base, section: {**base.get(section, {}), key: value}}
    with pytest.raises(CheckpointError, match=rf"{section}\.{key} was") as refused:
        check_resumable(config(), config(**changed))
    assert f"--allow-change {section}.{key}" in str(refused.value)
    for name in (f"{section}.{key}", section):
        (allowed,) = check_resumable(config(), config(**changed, checkpoint={"allow_change": [name]}))
        assert allowed.key == f"{section}.{key}"
        assert allowed.after == value


def test_allow_change_of_one_key_does_not_cover_others() -> None:
    changed = config(train={"seed": 3, "learning_rate": 1.0}, checkpoint={"allow_change": ["train.seed"]})
    with pytest.raises(CheckpointError, match="learning_rate") as refused:
        check_resumable(config(), changed)
    assert "train.seed" not in str(refused.value)


def test_all_differences_are_listed() -> None:
    changed = config(train={"seed": 3}, parallel=WEIGHTED)
    with pytest.raises(CheckpointError, match=r"aggregation was 'mean', is 'weighted';.*; train\.seed was 0, is 3"):
        check_resumable(config(), changed)


@pytest.mark.parametrize(("key", "name"), [("data", "data.path"), ("method", "method"), ("train.seed", "train")])
def test_allow_change_covers_sections_and_their_keys(key: str, name: str) -> None:
    assert is_allowed(key, [name])
    assert not is_allowed("model", [name])
    assert not is_allowed(f"{name}s", [name])


def test_allow_change_of_an_unknown_key_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'train\.sed'") as refused:
        check_resumable(config(), config(checkpoint={"allow_change": ["train.sed"]}))
    assert "train.seed" in str(refused.value)


def test_key_lists_name_existing_keys() -> None:
    known = {".".join(key) for key in all_keys()}
    assert known >= CHANGEABLE_KEYS | FIXED_KEYS | CHANGEABLE_SECTIONS


def test_paths_become_absolute_where_they_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m").mkdir()
    absolute = with_absolute_paths(config(data={"path": "hub/data", "cache_dir": "c"}))
    assert absolute.model.path == str(tmp_path / "m")
    assert absolute.data.path == "hub/data"
    assert absolute.data.cache_dir == str(tmp_path / "c")
