"""Run token: one per run, shared by its nodes, readable only by its user, and removed in the end."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from pantheraml.base import env
from pantheraml.base.errors import LaunchError
from pantheraml.launch import run_token
from pantheraml.launch.run_token import shared_token, token_file


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "runs/mine"


def test_all_nodes_share_one_token_and_the_first_removes_it(run: Path) -> None:
    with shared_token(run, remove=False):
        second = env.run_token()
    with shared_token(run, remove=True):
        first = env.run_token()
        assert stat.S_IMODE(token_file(run).stat().st_mode) == 0o600
    assert first == second
    assert first is not None
    assert len(first) == 64
    assert not token_file(run).exists()
    assert env.run_token() is None
    with shared_token(run, remove=True):
        assert env.run_token() != first, "every run has its own"
    assert not run.exists(), "nodes meet before the run folder is made"


def test_token_set_by_the_user(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PANTHERAML_RUN_TOKEN", "s" * 16)
    with shared_token(run, remove=True):
        assert env.run_token() == "s" * 16
        assert not token_file(run).exists()
    monkeypatch.setenv("PANTHERAML_RUN_TOKEN", "short")
    with pytest.raises(LaunchError, match="has only 5 characters and could be guessed"), shared_token(run, remove=True):
        pass


def test_token_goes_to_the_cache_if_the_folder_is_read_only(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a container's --output /output, for a user who may not write to /."""
    monkeypatch.setenv("PANTHERAML_CACHE", str(tmp_path / "cache"))
    real = os.open

    def refusing(path: Path, *arguments: Any) -> int:
        if Path(path).parent == run.parent:
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(path, *arguments)

    monkeypatch.setattr(run_token.os, "open", refusing)
    with shared_token(run, remove=False) as second:
        pass
    with shared_token(run, remove=True) as first:
        assert first == second
        (file,) = (tmp_path / "cache/tokens").iterdir()
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert not file.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_token_file_of_another_user_is_refused(run: Path) -> None:
    """The folder's owner can write there, and would know the token."""
    file = token_file(run)
    file.parent.mkdir()
    file.write_text("0" * 64)
    file.chmod(0o600)
    for path in (file, file.parent):
        os.chown(path, 12345, 12345)
    with pytest.raises(LaunchError, match="not private to this user"), shared_token(run, remove=False):
        pytest.fail("taken")


@pytest.mark.parametrize("bad", ["readable", "link", "owner", "empty"])
def test_token_file_that_is_not_private_is_refused(run: Path, bad: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_token, "WRITTEN_SECONDS", 0.1)
    file = token_file(run)
    file.parent.mkdir()
    target = run.parent / "elsewhere"
    target.write_text("0" * 64)
    target.chmod(0o600)
    if bad == "link":
        file.symlink_to(target)
    else:
        file.write_text("" if bad == "empty" else "0" * 64)
        file.chmod(0o644 if bad == "readable" else 0o600)
    if bad == "owner":
        if os.geteuid() != 0:
            pytest.skip("only root gives files away")
        os.chown(file, 12345, 12345)
    with pytest.raises(LaunchError) as raised, shared_token(run, remove=False):
        pass
    assert "run token" in str(raised.value)
    assert target.read_text() == "0" * 64
