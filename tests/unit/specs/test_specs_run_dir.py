from __future__ import annotations

from pathlib import Path

import pytest

from pantheraml.base.errors import RunDirectoryError
from pantheraml.base.events import EventWriter
from pantheraml.specs.run_dir import RunDir
from pantheraml.specs.train import DataConfig, ModelConfig, TrainConfig


def trained_run(path: Path) -> RunDir:
    run = RunDir(path)
    run.create(resume=False, overwrite=False)
    run.write_config(TrainConfig(model=ModelConfig(path="m"), data=DataConfig(path="d")))
    (path / "checkpoints").mkdir()
    return run


def test_another_run_is_refused_unless_resumed_or_overwritten(tmp_path: Path) -> None:
    run = trained_run(tmp_path / "r")
    with pytest.raises(RunDirectoryError, match="already holds a run"):
        run.create(resume=False, overwrite=False)
    run.create(resume=True, overwrite=False)
    assert run.config_file.exists()
    run.create(resume=False, overwrite=True)
    assert not run.config_file.exists()


def test_foreign_files_are_never_touched(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    for overwrite in (False, True):
        with pytest.raises(RunDirectoryError, match="holds other files"):
            RunDir(tmp_path).create(resume=False, overwrite=overwrite)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_a_run_that_never_trained_may_be_replaced(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "r")
    run.create(resume=False, overwrite=False)
    with EventWriter(run.path) as emit:
        emit("notice", message="the data was bad")
    run.create(resume=False, overwrite=False)
    with EventWriter(run.path) as emit:
        emit("train.started", first_step=1, total_steps=2, world_size=1, device="cpu", global_batch_size=1)
    with pytest.raises(RunDirectoryError):
        run.create(resume=False, overwrite=False)


def test_resuming_deletes_nothing_even_before_the_first_step(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "r")
    run.create(resume=False, overwrite=False)
    run.write_config(TrainConfig(model=ModelConfig(path="m"), data=DataConfig(path="d")))
    (run.path / "base").mkdir()
    run.create(resume=True, overwrite=False)
    assert (run.path / "base").is_dir()


def test_folders_that_are_no_runs_say_so(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="not a run folder"):
        RunDir(tmp_path).config()
    with pytest.raises(RunDirectoryError, match="no trained weights"):
        trained_run(tmp_path / "r").trained()
    (tmp_path / "file").touch()
    with pytest.raises(RunDirectoryError, match="is a file"):
        RunDir(tmp_path / "file").create(resume=False, overwrite=False)
