"""A rank that runs out of memory outside of collectives retries; then all ranks use smaller micro-batches."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from pantheraml.checkpoint.store import CheckpointStore
from pantheraml.specs.parallel import ParallelDims
from pantheraml.specs.run_dir import RunDir
from pantheraml.specs.train import TrainConfig
from tests import toy
from tests.distributed.launching import run_ranks
from tests.event_log import raw_events
from tests.harness import make_plan, make_run, values


def make(root: Path, name: str, dims: ParallelDims | None = None) -> RunDir:
    config = TrainConfig.model_validate(
        {
            "model": {"path": str(root / "model")},
            "data": {"path": str(root / "data.jsonl"), "seq_len": 48, "cache_dir": str(root / "cache")},
            "method": {"rank": 4},
            "train": {"global_batch_size": 16, "max_steps": 5, "learning_rate": 1e-3},
        }
    )
    return make_run(root / name, config, make_plan(config, world=2, dims=dims, micro=4))


def test_out_of_memory_step_is_retried_without_a_restart(tmp_path: Path) -> None:
    toy.write_llama(tmp_path / "model")
    toy.write_jsonl(tmp_path / "data.jsonl", toy.arithmetic(120))
    runs = [make(tmp_path, "calm"), make(tmp_path, "short")]
    (tmp_path / "runs.json").write_text(json.dumps([str(run.path) for run in runs]))
    run_ranks("faulty_ranks", 2, tmp_path / "runs.json")
    calm, short = (raw_events(run.path) for run in runs)
    assert sorted(path.name for path in runs[1].faults.iterdir()) == ["0-4-oom", "1-2-oom"]
    assert len(values(short, "train.started", "first_step")) == 1
    other, own = values(short, "warning", "message")
    assert "some rank ran out of memory in step 2 and retried it with 2 sequences at a time" in other
    assert "step 4 ran out of memory with 2 sequences at a time and is retried with 1" in own
    assert values(short, "train.step", "loss") == pytest.approx(values(calm, "train.step", "loss"), rel=1e-5)
    weights = [load_file(run.path / "adapter/adapter_model.safetensors") for run in runs]
    for name, expected in weights[0].items():
        assert (weights[1][name] - expected).norm() <= 1e-4 * max(1e-3, expected.norm()), name
    store = CheckpointStore(runs[1].checkpoints)
    state = json.loads((store.path(store.steps()[-1]) / "state.json").read_text())
    assert state["progress"]["micro_batch"] == 1, "a resumed run starts with the smaller size"


def test_all_ranks_take_smaller_micro_batches_before_the_memory_of_one_ends(tmp_path: Path) -> None:
    toy.write_llama(tmp_path / "model")
    toy.write_jsonl(tmp_path / "data.jsonl", toy.arithmetic(120))
    layouts = {"calm": None, "short-ddp": None, "short-fsdp": ParallelDims(shard=2)}
    runs = [make(tmp_path, name, dims) for name, dims in layouts.items()]
    (tmp_path / "runs.json").write_text(json.dumps([str(run.path) for run in runs]))
    run_ranks("short_memory_ranks", 2, tmp_path / "runs.json")
    calm, *short = (raw_events(run.path) for run in runs)
    assert values(calm, "warning", "message") == []
    for events in short:
        (warning,) = values(events, "warning", "message")
        assert "2 sequences at a time from now on instead of 4" in warning
        assert values(events, "train.step", "loss") == pytest.approx(values(calm, "train.step", "loss"), rel=1e-5)
