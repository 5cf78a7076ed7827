"""PANTHERAML_ALLOWED_ROOTS restricts every path of a configuration."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from pydantic import ValidationError

from pantheraml.base.errors import ConfigError, ModelError
from pantheraml.cli.main import main
from pantheraml.models.hub import local_folder
from pantheraml.specs.config_file import all_keys
from pantheraml.specs.consent import Consent
from pantheraml.specs.paths import check_roots, path_keys
from pantheraml.specs.run_dir import RunDir
from pantheraml.specs.train import DataConfig, ModelConfig, TrainConfig

KEYS = ["data.path", "data.eval_path", "data.cache_dir", "model.path", "model.tokenizer"]


def with_paths(folder: Path | str, **changes: str) -> TrainConfig:
    """Config with all path keys in `folder`, except those in `changes` (as data_path)."""
    paths = {key: changes.get(key.replace(".", "_"), f"{folder}/{key}") for key in KEYS}
    return TrainConfig(
        model=ModelConfig(path=paths["model.path"], tokenizer=paths["model.tokenizer"]),
        data=DataConfig(path=paths["data.path"], eval_path=paths["data.eval_path"], cache_dir=paths["data.cache_dir"]),
    )


def test_path_keys_is_complete(tmp_path: Path) -> None:
    assert sorted(path_keys(with_paths(tmp_path))) == sorted(KEYS)
    named_like_paths = {
        ".".join(key) for key in all_keys() if key[-1].endswith(("path", "_dir", "tokenizer", "_file", "folder"))
    }
    assert named_like_paths == set(KEYS), "add new path keys to `path_keys`"


@pytest.mark.parametrize("key", KEYS)
def test_paths_outside_the_roots_are_refused(key: str, tmp_path: Path) -> None:
    root, other = tmp_path / "root", tmp_path / "other"
    root.mkdir()
    other.mkdir()
    (root / "link").symlink_to(other)
    check_roots(with_paths(root), [root])
    check_roots(with_paths(root), [tmp_path / "nothing", root])
    check_roots(with_paths(other), [])
    for outside in (f"{other}/x", f"{root}/../other/x", f"{root}/link/x", "/etc/shadow", f"{root}x", "~/x", "a\0b"):
        with pytest.raises(ConfigError, match=key) as caught:
            check_roots(with_paths(root, **{key.replace(".", "_"): outside}), [root])
        assert str(root) in str(caught.value) or "cannot be resolved" in str(caught.value)


def test_hub_name_is_a_path_only_if_the_folder_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "root"
    root.mkdir()
    monkeypatch.chdir(tmp_path)
    config = with_paths(root, model_path="owner/model")
    check_roots(config, [root])
    (tmp_path / "owner" / "model").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"model\.path"):
        check_roots(config, [root])


REVISIONS = ["main", "refs/pr/1", "v1.0.2", "feature/x_y-z", "0123456789" * 4, "step1000-tokens4B"]
OUTSIDE = ["../../../../jobs/mallory/ref", "..", "a/../../b", "/etc", "a//b", "./a", "a..b", ""]


@pytest.mark.parametrize("revision", [*REVISIONS, *OUTSIDE])
def test_revision_is_a_name_and_not_a_path(revision: str) -> None:
    if revision in REVISIONS:
        assert ModelConfig(path="owner/name", revision=revision).revision == revision
    else:
        with pytest.raises(ValidationError, match="revision"):
            ModelConfig(path="owner/name", revision=revision)


def test_snapshot_outside_the_hub_cache_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder that the hub client returns for a revision is checked too."""
    cache, other = tmp_path / "cache", tmp_path / "jobs/mallory/ref"
    own = cache / "models--me--tiny" / "snapshots" / ("0" * 40)
    for folder in (own, other):
        folder.mkdir(parents=True)
    (own.parent / "link").symlink_to(other)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    for snapshot in (own, other, own.parent / "link", own / "../../../../jobs/mallory/ref"):
        monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, snapshot=snapshot, **__: str(snapshot))
        if snapshot == own:
            assert local_folder("me/tiny", revision="main") == own
        else:
            with pytest.raises(ModelError, match="outside the hub cache"):
                local_folder("me/tiny", revision="main")


def test_allowed_roots_variable_applies_to_every_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root, other = tmp_path / "root", tmp_path / "other"
    for folder in (root, other):
        (folder / "model").mkdir(parents=True)
        (folder / "data.jsonl").touch()
    monkeypatch.setenv("PANTHERAML_ALLOWED_ROOTS", f"{root}{os.pathsep}{tmp_path / 'second'}")
    inside = ["--model", f"{root}/model", "--data", f"{root}/data.jsonl"]
    run = RunDir(other / "run")
    run.mark()
    run.config_file.write_text(f"model: {{path: {root}/model}}\ndata: {{path: {root}/data.jsonl}}\n")
    for command, key in (
        (["train", *inside, "--output", f"{other}/run2"], "--output"),
        (["train", "--model", f"{other}/model", "--data", f"{root}/data.jsonl"], "model.path"),
        (["plan", "--model", f"{root}/model", "--data", f"{other}/data.jsonl"], "data.path"),
        (["plan", *inside, "--set", f"data.cache_dir={other}"], "data.cache_dir"),
        (["quantize", *inside, "--output", f"{other}/quantized"], "--output"),
        (["resume", str(run.path)], "the run folder"),
        (["generate", str(run.path), "--prompt", "x"], "the run folder"),
        (["export", str(run.path), "--merge", "--output", f"{root}/out"], "the run folder"),
        (["watch", str(run.path)], "the run folder"),
        (["report", str(run.path)], "the run folder"),
        (["report", f"{root}/run", "--output", f"{other}/page.html"], "--output"),
        (["compare", str(run.path), f"{root}/run"], "the run folder"),
        (["compare", f"{root}/run", "--html", f"{other}/page.html"], "--html"),
        (["import-config", f"{root}/theirs.yaml", "--output", f"{other}/run.yaml"], "--output"),
    ):
        assert main(command) == ConfigError.exit_code, command
        message = capsys.readouterr().err
        assert f"ConfigError: {key}=" in message
        assert "PANTHERAML_ALLOWED_ROOTS" in message
    with pytest.raises(ConfigError, match="outside the folders"):
        local_folder(f"{other}/model")
    run.path.rename(root / "run")
    RunDir(root / "run").received_config(Consent())
