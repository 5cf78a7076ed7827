"""Continuing a run from the command line: elsewhere, after damage, and with changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.conftest import Playground
from tests.event_log import raw_events
from tests.harness import values

pytestmark = pytest.mark.extended

SETTINGS = ("--set", "train.schedule=constant", "--set", "checkpoint.every_steps=2", "--set", "method.rank=4")


def flip(run: Path, step: int) -> None:
    file = run / "checkpoints" / f"step-{step:08d}" / "weights.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


@pytest.mark.seed("S0-112", "S0-113")
def test_a_run_goes_on_with_another_number_of_processes_and_past_damage(playground: Playground) -> None:
    whole, moved = playground.root / "runs/whole", playground.root / "runs/moved"
    assert playground.train("runs/whole", *SETTINGS, "--set", "train.max_steps=6").code == 0
    sharded = ["--nproc", "2", "--set", "parallel.shard=2", "--set", "train.max_steps=3"]
    begun = playground.train("runs/moved", *SETTINGS, *sharded)
    assert begun.code == 0, begun
    assert len(list((moved / "checkpoints/step-00000003").glob("weights-*"))) == 2, "each process saved its part"
    alone = ["--nproc", "1", "--set", "parallel.shard=1", "--set", "train.max_steps=6"]
    resumed = playground("resume", "runs/moved", *alone)
    assert resumed.code == 0, resumed
    losses = values(raw_events(moved), "train.step", "loss")
    assert losses == pytest.approx(values(raw_events(whole), "train.step", "loss"), rel=1e-5)
    assert values(raw_events(moved), "train.started", "world_size") == [2, 1]
    assert values(raw_events(moved), "train.started", "first_step") == [1, 4]

    adapter = (moved / "adapter/adapter_model.safetensors").read_bytes()
    flip(moved, 6)
    again = playground.train("runs/moved", *SETTINGS, *alone, "--resume", "auto")
    assert again.code == 0, again
    (message,) = values(raw_events(moved), "warning", "message")
    assert "step-00000006 is damaged: weights.safetensors fails its checksum" in message
    assert "continues from step 4" in message
    assert (moved / "adapter/adapter_model.safetensors").read_bytes() == adapter
    for step in (4, 6):
        flip(moved, step)
    refused = playground("resume", "runs/moved")
    assert refused.code == 27, refused
    assert "No checkpoint of this run is intact" in refused.err
    assert "Traceback" not in refused.err


def test_a_change_that_breaks_the_promise_has_to_be_insisted_on(playground: Playground) -> None:
    assert playground.train("runs/changed", *SETTINGS, "--set", "train.max_steps=2").code == 0
    run = playground.root / "runs/changed"
    settings = (run / "config.yaml").read_text()
    more = ["resume", "runs/changed", "--set", "train.max_steps=4", "--set", "train.learning_rate=0.001"]
    refused = playground(*more)
    assert refused.code == 7
    assert "train.learning_rate was" in refused.err
    assert "--allow-change train.learning_rate" in refused.err
    assert playground(*more, "--allow-change", "train.learning").code == 2
    assert (run / "config.yaml").read_text() == settings, "a refused change changes nothing"
    done = playground(*more, "--allow-change", "train.learning_rate")
    assert done.code == 0, done
    assert values(raw_events(run), "train.step", "learning_rate")[2:] == [0.001, 0.001]
    assert "although train.learning_rate was" in values(raw_events(run), "warning", "message")[0]
    assert playground("resume", "runs/changed", "--set", "train.learning_rate=0.1").code == 7, "leave is for one start"


def test_other_data_is_refused_and_the_run_still_knows_its_own(playground: Playground) -> None:
    assert playground.train("runs/own-data", *SETTINGS, "--set", "train.max_steps=2").code == 0
    run = playground.root / "runs/own-data"
    settings, plan = ((run / name).read_text() for name in ("config.yaml", "plan.json"))
    other = playground.root / "other.jsonl"
    other.write_text('{"text": "something else"}\n' * 20)
    more = ["--set", "train.max_steps=4"]
    for path, code, said in ((other, 7, "data was"), (playground.root / "nowhere.jsonl", 3, "no data at")):
        refused = playground("resume", "runs/own-data", "--set", f"data.path={path}", *more)
        assert refused.code == code, refused
        assert said in refused.err
        assert [(run / name).read_text() for name in ("config.yaml", "plan.json")] == [settings, plan]
    done = playground("resume", "runs/own-data", *more)
    assert done.code == 0, done
    assert values(raw_events(run), "train.step", "step") == [1, 2, 3, 4]
