from __future__ import annotations

from pathlib import Path

import pytest

from pantheraml.base.errors import RunDirectoryError
from pantheraml.base.event_stream import EventWriter
from pantheraml.base.events import Notice, TrainStarted
from pantheraml.specs.run_dir import RunDir
from pantheraml.specs.train import DataConfig, ModelConfig, TrainConfig


def trained_run(path: Path) -> RunDir:
    run = RunDir(path)
    with run.claim(resume=False, overwrite=False) as replacement:
        replacement.commit()
    run.write_config(TrainConfig(model=ModelConfig(path="m"), data=DataConfig(path="d")))
    (path / "checkpoints" / "step-00000004").mkdir(parents=True)
    (path / "checkpoints" / "step-00000004" / "manifest.json").touch()
    return run


def test_existing_run_needs_resume_or_overwrite(tmp_path: Path) -> None:
    run = trained_run(tmp_path / "r")
    with pytest.raises(RunDirectoryError, match="already contains a run"), run.claim(resume=False, overwrite=False):
        pytest.fail("claimed")
    with run.claim(resume=True, overwrite=False):
        assert run.last_checkpoint() == 4
    with run.claim(resume=False, overwrite=True) as replacement:
        assert not run.checkpoints.exists()
        replacement.commit()
    assert not run.checkpoints.exists()


def test_failed_overwrite_restores_the_old_run(tmp_path: Path) -> None:
    run = trained_run(tmp_path / "r")
    with pytest.raises(KeyError), run.claim(resume=False, overwrite=True):
        run.config_file.write_text("the new run")
        raise KeyError
    assert run.last_checkpoint() == 4
    assert run.config().model.path == "m"
    assert sorted(path.name for path in run.path.iterdir()) == ["checkpoints", "config.yaml", "run.lock"]


def test_foreign_files_are_never_touched(tmp_path: Path) -> None:
    for name in ("thesis.tex", "config.yaml", "events.jsonl"):
        (tmp_path / name).write_text("years of work")
    for overwrite in (False, True):
        refused = RunDir(tmp_path).claim(resume=False, overwrite=overwrite)
        with pytest.raises(RunDirectoryError, match="contains other files"), refused:
            pytest.fail("claimed")
    assert {path.read_text() for path in tmp_path.iterdir()} == {"years of work"}
    run = trained_run(tmp_path / "r")
    (run.path / "notes.txt").write_text("mine")
    with run.claim(resume=False, overwrite=True) as replacement:
        replacement.commit()
    assert (run.path / "notes.txt").read_text() == "mine"


def test_run_folder_is_locked(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "r")
    with run.claim(resume=False, overwrite=False):
        for resume in (True, False):
            second = RunDir(tmp_path / "r").claim(resume=resume, overwrite=True)
            with pytest.raises(RunDirectoryError, match="Another process"), second:
                pytest.fail("claimed twice")


def test_a_run_that_never_trained_may_be_replaced(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "r")
    with run.claim(resume=False, overwrite=False), EventWriter(run.path) as emit:
        emit(Notice(message="the data was bad"))
    with run.claim(resume=False, overwrite=False) as replacement:
        replacement.commit()
        with EventWriter(run.path) as emit:
            emit(TrainStarted(first_step=1, total_steps=2, world_size=1, device="cpu", global_batch_size=1))
    with pytest.raises(RunDirectoryError), run.claim(resume=False, overwrite=False):
        pytest.fail("claimed")


def test_folders_without_a_run_are_errors(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="not a run folder"):
        RunDir(tmp_path).config()
    with pytest.raises(RunDirectoryError, match="no trained weights"):
        trained_run(tmp_path / "r").trained()
    with pytest.raises(RunDirectoryError, match="plan"):
        trained_run(tmp_path / "s").plan()
    (tmp_path / "file").touch()
    for output in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(RunDirectoryError), RunDir(output).claim(resume=False, overwrite=False):
            pytest.fail("claimed")


@pytest.mark.parametrize(
    "text",
    [None, "{", "[]", "{}", '{"train": 1, "eval": null, "format": "text"}', '{"train": "a", "eval": null}',
     '{"train": "a", "eval": null, "format": "evil"}', "[" * 100_000,
     '{"train": "a", "eval": null, "format": "text", "sources": [["a"]]}'],
    ids=["none", "cut", "list", "empty", "number", "no format", "format", "deep", "sources"],
)  # fmt: skip
def test_damaged_data_description_is_an_error(tmp_path: Path, text: str | None) -> None:
    run = RunDir(tmp_path)
    if text is not None:
        run.data_file.write_text(text)
    with pytest.raises(RunDirectoryError, match=r"data\.json.* is missing or damaged") as raised:
        run.data()
    assert raised.value.where == str(run.data_file)
