"""`pantheraml keys` and the folder of the service: what cannot be used is an error that says so."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

import pytest

from pantheraml.cli.main import main


@pytest.mark.parametrize("days", ["nan", "inf", "0", "-1"])
def test_a_lifetime_is_a_positive_number(tmp_path: Path, capsys: pytest.CaptureFixture[str], days: str) -> None:
    """A key that expires at NaN would never expire."""
    assert main(["keys", "create", "ann", "--days", days, "--data-dir", str(tmp_path / "data")]) == 2
    assert "--days must be a positive number" in capsys.readouterr().err
    assert not (tmp_path / "data").exists()


def a_file(folder: Path) -> Path:
    (folder / "data").write_text("precious")
    return folder / "data"


def random_bytes(folder: Path) -> Path:
    (folder / "service.db").write_bytes(bytes(range(256)) * 20)
    return folder


def a_newer_database(folder: Path) -> Path:
    with contextlib.closing(sqlite3.connect(folder / "service.db")) as database:
        database.execute("CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL)")
        database.execute("INSERT INTO alembic_version VALUES ('r9999')")
        database.commit()
    return folder


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (a_file, "it is not a folder"),
        (random_bytes, "file is not a database"),
        (a_newer_database, "of another version"),
    ],
)
def test_what_cannot_be_used_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], make: object, problem: str
) -> None:
    assert callable(make)
    data = str(make(tmp_path))
    (tmp_path / "models").mkdir()
    for command in (["keys", "list"], ["serve", "--port", "0", "--models-dir", str(tmp_path / "models")]):
        assert main([*command, "--data-dir", data]) == 2
        assert problem in capsys.readouterr().err
