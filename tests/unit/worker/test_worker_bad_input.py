"""Bad input in the tasks of a worker: an error of its class that names what is wrong.

That the command line shows such an error and ends with its code is shown in tests/e2e.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pantheraml.base.errors import DataError, ModelError, NonFiniteError, PantheraError
from pantheraml.base.event_stream import EventWriter
from pantheraml.specs.run_dir import RunDir
from pantheraml.specs.train import TrainConfig
from pantheraml.worker.prepare import prepare_task
from tests import toy
from tests.event_log import raw_events
from tests.harness import make_plan, make_run, merged, train_here, values

Changed = Callable[..., TrainConfig]

CHAT = [{"messages": [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]}] * 8
LONG = {"prompt": "1=", "completion": "9" * 200}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.write_llama(tmp_path_factory.mktemp("bad") / "model")


@pytest.fixture
def changed(model: Path, tmp_path: Path) -> Changed:
    """A configuration of a run that would work, but for the changes."""
    data = toy.write_jsonl(tmp_path / "data.jsonl", toy.arithmetic(50))

    def change(**sections: dict[str, Any]) -> TrainConfig:
        whole = {
            "model": {"path": str(model)},
            "data": {"path": str(data), "seq_len": 64, "cache_dir": str(tmp_path / "cache")},
            "train": {"global_batch_size": 4, "max_steps": 1},
        }
        return TrainConfig.model_validate(merged(whole, sections))

    return change


def prepare(folder: Path, config: TrainConfig) -> RunDir:
    run = RunDir(folder)
    run.mark()
    run.write_config(config)
    with EventWriter(folder) as emit:
        prepare_task(folder, emit)
    return run


def refused(folder: Path, config: TrainConfig, kind: type[PantheraError]) -> str:
    """What the error says."""
    with pytest.raises(kind) as caught:
        prepare(folder, config)
    assert type(caught.value) is kind
    assert not RunDir(folder).data_file.exists()
    return str(caught.value)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "empty"),
        (b'{"prompt": "a", "completion": "b"}\n{"prompt": "a", "compl', "line 2"),
        (b'{"prompt": "a", "completion": "b"}\n{"prompt": "\xff\xfe", "completion": "b"}\n', "UTF-8"),
        (b'{"prompt": "a", "completion": "b"}\n{"prompt": "a", "completion": 7}\n', "completion"),
        (b'{"question": "a", "reply": "b"}\n', "question"),
    ],
    ids=["empty", "not JSON", "encoding", "wrong type", "no usable column"],
)
def test_data_that_cannot_be_used(changed: Changed, tmp_path: Path, content: bytes, expected: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content)
    message = refused(tmp_path / "run", changed(data={"path": str(path)}), DataError)
    assert expected in message
    assert "bad.jsonl" in message


def test_data_that_is_not_there(changed: Changed, tmp_path: Path) -> None:
    assert "nowhere.jsonl" in refused(tmp_path / "run", changed(data={"path": "nowhere.jsonl"}), DataError)


def test_a_long_row_that_stops(changed: Changed, tmp_path: Path) -> None:
    path = toy.write_jsonl(tmp_path / "long.jsonl", [*toy.arithmetic(20), LONG])
    config = changed(data={"path": str(path), "on_long_row": "stop"})
    assert "64" in refused(tmp_path / "run", config, DataError)


def test_rows_that_are_skipped_or_cut_are_counted(changed: Changed, tmp_path: Path) -> None:
    bad = [{"prompt": "x"}, {"prompt": "y", "completion": 3}]
    path = toy.write_jsonl(tmp_path / "some.jsonl", [*toy.arithmetic(50), *bad, LONG])
    run = prepare(tmp_path / "run", changed(data={"path": str(path), "on_bad_row": "skip"}))
    (ready,) = [event for event in raw_events(run.path) if event["kind"] == "data.ready"]
    assert (ready["rows"], ready["skipped_rows"], ready["truncated_rows"]) == (51, 2, 1)


def test_a_tokenizer_without_chat_template(changed: Changed, model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "model")
    toy.write_tokenizer(tmp_path / "model")
    (tmp_path / "model/chat_template.jinja").unlink(missing_ok=True)
    path = toy.write_jsonl(tmp_path / "chat.jsonl", CHAT)
    config = changed(model={"path": str(tmp_path / "model")}, data={"path": str(path)})
    assert "chat template" in refused(tmp_path / "run", config, ModelError)


def test_a_tokenizer_without_pad_token_trains_all_the_same(changed: Changed, model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "model")
    toy.write_tokenizer(tmp_path / "model", pad=False)
    config = changed(model={"path": str(tmp_path / "model")}, data={"packing": False})
    run = make_run(tmp_path / "run", config, make_plan(config))
    assert values(train_here(run), "train.finished", "stopped_by") == ["end"]


def test_weights_that_became_nan_are_never_saved(changed: Changed, tmp_path: Path) -> None:
    config = changed(method={"kind": "full"}, train={"learning_rate": 1e38, "max_grad_norm": 0})
    run = make_run(tmp_path / "run", config, make_plan(config))
    with pytest.raises(NonFiniteError, match="they are not saved"):
        train_here(run)
    assert not (run.path / "model").exists()


def test_notices_of_a_run_that_works(changed: Changed, tmp_path: Path) -> None:
    """Rows longer than the model has positions for, and a warm-up longer than the run."""
    config = changed(data={"seq_len": 512}, train={"warmup_steps": 9, "max_steps": 2})
    events = train_here(make_run(tmp_path / "run", config, make_plan(config)))
    (notice,) = [text for text in values(events, "notice", "message") if "data.seq_len" in text]
    assert "data.seq_len=512 is above the model's 256 positions" in notice
    (warning,) = [text for text in values(events, "warning", "message") if "warmup" in text]
    assert "takes the whole run of 2 step(s)" in warning


def test_an_architecture_that_nobody_knows(changed: Changed, model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "model")
    settings = tmp_path / "model/config.json"
    settings.write_text(settings.read_text().replace('"llama"', '"future"'))
    message = refused(tmp_path / "run", changed(model={"path": str(tmp_path / "model")}), ModelError)
    assert "If the model is newer than transformers" in message
    settings.write_text(settings.read_text().replace('"num_hidden_layers": 2', '"num_hidden_layers": 20000'))
    message = refused(tmp_path / "run2", changed(model={"path": str(tmp_path / "model")}), ModelError)
    assert "num_hidden_layers=20000, above the limit of 2,048" in message
