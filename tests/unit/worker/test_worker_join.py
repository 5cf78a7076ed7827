"""A rank of another launcher trains in the folder named by its own command, if owner and configuration match."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import pytest

from pantheraml.base.errors import ConfigError, LaunchError
from pantheraml.launch.ranks import config_fingerprint
from pantheraml.specs.config_file import load_config
from pantheraml.specs.run_dir import RunDir
from pantheraml.specs.train import TrainConfig
from pantheraml.worker.entry.join import run_folder


@pytest.fixture
def config() -> TrainConfig:
    """With values that a YAML round trip could change, such as a float and a list."""
    values = {("model", "path"): "m", ("data", "path"): "d", ("train", "learning_rate"): 1.1e-5,
              ("parallel", "world_size"): 2, ("report", "sinks"): ["wandb"]}  # fmt: skip
    return load_config(None, values)


@pytest.fixture
def run(tmp_path: Path, config: TrainConfig) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.mark()
    run.write_config(config)
    return run


def make_args(folder: Path, config: TrainConfig) -> argparse.Namespace:
    return argparse.Namespace(folder=folder, config_fingerprint=config_fingerprint(config))


def test_own_folder(run: RunDir, config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_folder(make_args(run.path, config)) == run.path
    monkeypatch.chdir(run.path.parent)
    assert run_folder(make_args(Path("run"), config)) == run.path, "relative to the current folder"


def test_other_configuration_is_refused(run: RunDir, config: TrainConfig) -> None:
    other = config.model_copy(update={"model": config.model.model_copy(update={"trust_remote_code": True})})
    run.write_config(other)
    with pytest.raises(ConfigError, match="a different config than this rank was started with") as raised:
        run_folder(make_args(run.path, config))
    assert raised.value.where == str(run.path)


def test_missing_folder(tmp_path: Path, config: TrainConfig) -> None:
    with pytest.raises(LaunchError, match="does not exist on this node") as raised:
        run_folder(make_args(tmp_path / "elsewhere", config))
    assert "absolute path" in str(raised.value)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to somebody else")
@pytest.mark.parametrize("whose", ["folder", "link"])
def test_folder_of_another_user_is_refused(run: RunDir, config: TrainConfig, whose: str) -> None:
    folder = run.path
    if whose == "link":
        folder = run.path.with_name("link")
        folder.symlink_to("run")
    os.chown(folder, 12345, 12345, follow_symlinks=False)
    with pytest.raises(LaunchError, match="another user"):
        run_folder(make_args(folder, config))
