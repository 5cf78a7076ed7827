from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pantheraml.base.errors import CheckpointError
from pantheraml.specs.config_file import all_keys, validate
from pantheraml.specs.resume import MAY_CHANGE, check_resumable, with_absolute_paths
from pantheraml.specs.train import TrainConfig


def config(**sections: dict[str, Any]) -> TrainConfig:
    return validate({"model": {"path": "m"}, "data": {"path": "d"}, **sections})


def test_a_run_may_be_made_longer_watched_and_spread_otherwise() -> None:
    longer = config(train={"max_steps": 9, "log_every_steps": 3}, parallel={"world_size": 2}, checkpoint={"keep": 7})
    check_resumable(config(), longer)


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [("train", "seed", 3), ("model", "path", "other"), ("method", "rank", 3), ("train", "learning_rate", 1.0)],
)
def test_what_makes_the_numbers_may_not_change(section: str, key: str, value: Any) -> None:
    base: dict[str, Any] = {"model": {"path": "m"}}
    changed = config(**{**base, section: {**base.get(section, {}), key: value}})
    with pytest.raises(CheckpointError, match=f"{section}.{key} was"):
        check_resumable(config(), changed)


def test_the_list_names_real_keys() -> None:
    assert {".".join(key) for key in all_keys()} >= MAY_CHANGE


def test_paths_become_absolute_where_they_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m").mkdir()
    made = with_absolute_paths(config(data={"path": "hub/data", "cache_dir": "c"}))
    assert made.model.path == str(tmp_path / "m")
    assert made.data.path == "hub/data"
    assert made.data.cache_dir == str(tmp_path / "c")
