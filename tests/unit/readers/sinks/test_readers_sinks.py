"""Every sink writes through its real package, in its own process, and the test reads the tracker's files."""

from __future__ import annotations

import json
import math
import sqlite3
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pantheraml.base.env import child_environment
from pantheraml.base.errors import ConfigError, MissingExtraError
from pantheraml.readers.sinks import open_sink, sink, sink_names, wandb
from pantheraml.readers.sinks.sink import RunIdentity, metrics_of, register, require

PUSH = """
import sys
from pathlib import Path
from pantheraml.readers.follow import Follower
from pantheraml.readers.sinks import open_sink, sink
sink.CLOSE_SECONDS = 200  # CI hosts may be busy
run_dir = Path(sys.argv[2])
follower = Follower(run_dir, [open_sink(sys.argv[1], run_dir=run_dir, project="kittens")])
follower.poll()
follower.close()
assert "torch" not in sys.modules, "a sink imported torch"
"""

CONFIG = "model:\n  path: models/tiny\ntrain:\n  max_steps: 120\n  seed: 7\n"


@pytest.fixture
def run_dir(complete: Any, tmp_path: Path) -> Path:
    complete.step(121, 121, loss="nan", memory_bytes=None)
    written = complete.write(tmp_path / "first")
    (written / "config.yaml").write_text(CONFIG, encoding="utf-8")
    return written


def push(name: str, run_dir: Path) -> str:
    home = run_dir.parent
    environment = child_environment(
        HOME=str(home), TRACKIO_DIR=str(home / "trackio"), HF_HUB_OFFLINE="1", WANDB_MODE="offline",
        WANDB__SERVICE_WAIT="200", WANDB_INIT_TIMEOUT="200",
        MLFLOW_TRACKING_URI=None, WANDB_API_KEY=None, XDG_CONFIG_HOME=None, XDG_CACHE_HOME=None,
    )  # fmt: skip
    command = [sys.executable, "-c", PUSH, name, str(run_dir)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    assert "disabled" not in done.stderr, done.stderr
    assert "cleanly" not in done.stderr, done.stderr
    return done.stdout


def losses(run_dir: Path) -> dict[int, float]:
    """Expected training loss by step."""
    lines = (run_dir / "events.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [event for event in map(json.loads, lines) if event["kind"] == "train.step"]
    return {event["step"]: float(event["loss"]) for event in steps}


def check_losses(found: dict[int, float], run_dir: Path) -> None:
    expected = losses(run_dir)
    assert found.keys() == expected.keys()
    for step, loss in expected.items():
        assert found[step] == pytest.approx(loss, rel=1e-6, nan_ok=True)
    assert math.isnan(found[121])


@pytest.mark.seed("S3-011")
def test_tensorboard(run_dir: Path) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    assert push("tensorboard", run_dir) == ""
    read = accumulators.EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
    read.Reload()
    check_losses({scalar.step: scalar.value for scalar in read.Scalars("train/loss")}, run_dir)
    assert [scalar.step for scalar in read.Scalars("eval/perplexity")] == [30, 60, 90, 120]
    assert [scalar.step for scalar in read.Scalars("train/memory_bytes")][-1] == 120, "an unknown number is not logged"
    status = read.Tensors("status")[0].tensor_proto.string_val[0]
    config = read.Tensors("config")[0].tensor_proto.string_val[0].decode()
    assert status == b"succeeded"
    assert "| train.max_steps | `120` |" in config


@pytest.mark.seed("S3-012")
def test_wandb(run_dir: Path) -> None:
    protos = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    assert push("wandb", run_dir) == ""
    (path,) = run_dir.glob("wandb/offline-run-*/run-*.wandb")
    records = [protos.Record.FromString(data) for data in _wandb_records(path.read_bytes())]
    rows = [_wandb_row(record.history.item) for record in records if record.WhichOneof("record_type") == "history"]
    check_losses({row["step"]: float(row["train/loss"]) for row in rows if "train/loss" in row}, run_dir)
    assert [row["step"] for row in rows if "eval/loss" in row] == [30, 60, 90, 120]
    (run,) = [record.run for record in records if record.WhichOneof("record_type") == "run"]
    assert (run.project, run.display_name) == ("kittens", "first")
    assert {item.key: item.value_json for item in run.config.update}["train.max_steps"] == "120"
    assert (run_dir / "sinks" / "wandb.id").read_text().strip() == run.run_id
    summaries = [i for r in records if r.WhichOneof("record_type") == "summary" for i in r.summary.update]
    assert any(_wandb_key(item) == "status" and item.value_json == '"succeeded"' for item in summaries)
    (end,) = [record.exit for record in records if record.WhichOneof("record_type") == "exit"]
    assert end.exit_code == 0


def _wandb_records(data: bytes) -> list[bytes]:
    """W&B's offline file is a LevelDB log: after a header of 7 bytes, chunks in blocks of 32 KiB."""
    records, whole, at = [], b"", 7
    while at < len(data):
        room = 32_768 - at % 32_768
        if room < 7:
            at += room  # a chunk's header never crosses the end of a block
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a full record, or the last chunk of one
            records.append(whole)
            whole = b""
    return records


def _wandb_key(item: Any) -> str:
    return item.key or "/".join(item.nested_key)


def _wandb_row(items: Any) -> dict[str, Any]:
    return {_wandb_key(item): json.loads(item.value_json) for item in items}


def test_mlflow_continues_the_same_run_on_resume(run_dir: Path) -> None:
    pytest.importorskip("mlflow")
    assert push("mlflow", run_dir) == ""
    run_id = (run_dir / "sinks" / "mlflow.id").read_text().strip()
    (folder,) = run_dir.glob(f"mlflow/*/{run_id}")
    rows = [line.split() for line in (folder / "metrics" / "train" / "loss").read_text().splitlines()]
    check_losses({int(step): float(value) for _, value, step in rows}, run_dir)
    assert int(rows[0][0]) == 1_800_000_004_300, "the time is the event's, not the sending's"
    assert (folder / "params" / "train.max_steps").read_text() == "120"
    assert (folder / "tags" / "pantheraml.status").read_text() == "succeeded"
    assert "end_time: 1" in (folder / "meta.yaml").read_text()
    assert "name: kittens" in (folder.parent / "meta.yaml").read_text()

    push("mlflow", run_dir)
    assert (run_dir / "sinks" / "mlflow.id").read_text().strip() == run_id
    assert len((folder / "metrics" / "train" / "loss").read_text().splitlines()) == 2 * len(rows)


def test_trackio(run_dir: Path) -> None:
    pytest.importorskip("trackio")
    assert push("trackio", run_dir) == "", "stdout belongs to the command"
    (path,) = (run_dir.parent / "trackio").glob("kittens*.db")
    with sqlite3.connect(path) as database:
        rows = database.execute("select run_name, step, metrics from metrics order by step").fetchall()
        configs = database.execute("select config from configs").fetchall()
        alerts = database.execute("select title, level from alerts").fetchall()
    database.close()
    assert {name for name, _, _ in rows} == {(run_dir / "sinks" / "trackio.id").read_text().strip()}
    metrics = [(step, json.loads(text)) for _, step, text in rows]
    check_losses({step: float(found["train/loss"]) for step, found in metrics if "train/loss" in found}, run_dir)
    assert [step for step, found in metrics if "eval/loss" in found] == [30, 60, 90, 120]
    assert json.loads(configs[0][0])["train.max_steps"] == 120
    assert alerts == [("run succeeded", "info")]


def test_an_unknown_sink_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        open_sink("tensorbord", run_dir=tmp_path, project="p")
    assert caught.value.fix == "Known sinks: mlflow, tensorboard, trackio, wandb."
    assert sink_names() == ["mlflow", "tensorboard", "trackio", "wandb"]


def test_a_missing_package_names_the_extra() -> None:
    with pytest.raises(MissingExtraError) as caught:
        require("no_such_package_anywhere", extra="wandb")
    assert caught.value.fix == "pip install 'pantheraml[wandb]'"
    assert "no_such_package_anywhere" in caught.value.what


def test_duplicate_sink_name_is_rejected() -> None:
    with pytest.raises(ValueError, match="already registered"):
        register("wandb")(lambda identity: pytest.fail("not called"))


def test_metrics_have_the_same_names_everywhere(fake_run: Any) -> None:
    fake_run.step(3, 10, grad_norm=None, loss="inf")
    assert metrics_of(fake_run.events[-1]) == {
        "train/epoch": 0.03,
        "train/loss": math.inf,
        "train/learning_rate": pytest.approx(2e-4 * 0.5 * (1 + math.cos(math.pi * 0.3))),
        "train/tokens_per_second": 64_000.0,
        "train/memory_bytes": 17_000_003_000.0,
    }
    assert metrics_of(fake_run.emit("notice", message="hello")) == {}


def test_received_folder_does_not_choose_the_tracker_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PANTHERAML_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "run"
    (folder / "sinks").mkdir(parents=True)
    identity = RunIdentity(folder, "p", {})
    assert identity.recorded_id("wandb") is None
    assert identity.notices == []
    (folder / "sinks" / "wandb.id").write_text("someone-elses-run\n")
    assert identity.recorded_id("wandb") is None
    (notice,) = identity.notices
    assert "wandb starts a new run" in notice
    identity.record_id("wandb", "own")
    identity.record_id("mlflow", "other")
    assert RunIdentity(folder, "p", {}).recorded_id("wandb") == "own", "this user started it here"
    assert RunIdentity(folder, "p", {}).recorded_id("mlflow") == "other"
    (folder / "sinks" / "wandb.id").write_text("someone-elses-run\n")
    assert RunIdentity(folder, "p", {}).recorded_id("wandb") is None
    (folder / "sinks" / "wandb.id").write_text("own\n")
    folder.rename(tmp_path / "copied")
    moved = RunIdentity(tmp_path / "copied", "p", {})
    assert moved.recorded_id("wandb") is None, "a moved folder is not trusted either"
    (record,) = (tmp_path / "cache" / "sinks").iterdir()
    assert record.stat().st_mode & 0o777 == 0o600
    assert record.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("name", ["wandb", ".wandb"])
@pytest.mark.parametrize("place", ["run", "here"])
def test_wandb_takes_no_settings_from_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, name: str
) -> None:
    """W&B reads those of the current folder, and sends the API key to the server that they name."""
    pytest.importorskip("wandb")
    monkeypatch.setattr(wandb, "require", lambda *_, **__: pytest.fail("W&B was loaded"))
    (tmp_path / "run").mkdir()
    settings = tmp_path / place / name / "settings"
    settings.parent.mkdir(parents=True)
    settings.write_text("[default]\nbase_url = https://elsewhere.example\n")
    (tmp_path / "here").mkdir(exist_ok=True)
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(ConfigError, match="settings of its own") as raised:
        open_sink("wandb", run_dir=tmp_path / "run", project="p")
    assert raised.value.where == str(settings)


class Quiet:
    """A backend that accepts everything."""

    def log(self, step: int, seconds: float, metrics: dict[str, float]) -> None: ...

    def finish(self, status: str) -> None: ...


def test_sink_carries_the_notices_of_its_opener(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PANTHERAML_CACHE", str(tmp_path / "cache"))
    (tmp_path / "sinks").mkdir()
    (tmp_path / "sinks" / "quiet.id").write_text("x")

    def opener(identity: RunIdentity) -> Quiet:
        identity.recorded_id("quiet")
        return Quiet()

    monkeypatch.setitem(sink._OPENERS, "quiet", opener)
    opened = open_sink("quiet", run_dir=tmp_path, project="p")
    opened.close()
    (notice,) = opened.notices
    assert notice.startswith("quiet starts a new run")
