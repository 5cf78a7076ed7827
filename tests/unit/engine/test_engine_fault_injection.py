"""Fault injection: each fault happens once, where a real one would, and does not change the result."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from pantheraml.base.errors import ConfigError
from pantheraml.engine.fault_injection import SLOW_SECONDS, FaultInjector, InjectedError, flip_bit
from pantheraml.specs.faults import Fault
from pantheraml.specs.run_dir import RunDir
from pantheraml.specs.train import TrainConfig
from tests import toy
from tests.harness import make_plan, make_run, train_here, values


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("faults")
    toy.write_llama(root / "model")
    toy.write_jsonl(root / "data.jsonl", toy.arithmetic(60))
    return root


def make(root: Path, folder: Path, *, micro: int = 2) -> RunDir:
    config = TrainConfig.model_validate(
        {
            "model": {"path": str(root / "model")},
            "data": {"path": str(root / "data.jsonl"), "seq_len": 48, "cache_dir": str(root / "cache")},
            "method": {"rank": 4, "dropout": 0.1},
            "train": {"global_batch_size": 4, "max_steps": 4, "learning_rate": 1e-2},
            "checkpoint": {"every_steps": 2},
        }
    )
    return make_run(folder, config, make_plan(config, micro=micro))


def adapter(run: RunDir) -> bytes:
    return (run.path / "adapter" / "adapter_model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def undisturbed(root: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    run = make(root, tmp_path_factory.mktemp("undisturbed") / "run")
    train_here(run)
    return adapter(run)


def test_numeric_faults_do_not_change_the_result(
    root: Path, tmp_path: Path, undisturbed: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PANTHERAML_FAULTS", "0:2:nan,0:4:bit_flip,1:3:nan")
    run = make(root, tmp_path / "run")
    events = train_here(run)
    assert values(events, "verdict", "step") == [2, 4], "faults of other ranks are ignored"
    assert values(events, "verdict", "action") == ["retry", "retry"]
    assert adapter(run) == undisturbed


def test_step_that_runs_out_of_memory_is_retried(
    root: Path, tmp_path: Path, undisturbed: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PANTHERAML_FAULTS", "0:1:oom")
    run = make(root, tmp_path / "run", micro=4)
    (message,) = values(train_here(run), "warning", "message")
    assert "step 1 ran out of memory with 4 sequences at a time" in message
    assert adapter(run) == undisturbed, "which used micro-batches of two from the start, with the same dropout"


def test_injected_error_happens_once_per_run(
    root: Path, tmp_path: Path, undisturbed: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PANTHERAML_FAULTS", "0:3:raise,0:3:slow")
    run = make(root, tmp_path / "run")
    with pytest.raises(InjectedError, match="0:3:raise"):
        train_here(run)
    begin = time.monotonic()
    train_here(run)
    assert time.monotonic() - begin > SLOW_SECONDS
    assert sorted(path.name for path in run.faults.iterdir()) == ["0-3-raise", "0-3-slow"]
    assert adapter(run) == undisturbed


def test_fault_that_cannot_be_injected_is_rejected(tmp_path: Path) -> None:
    model = torch.nn.Linear(1, 1)
    harmless = [Fault.parse("0:3:kill"), Fault.parse("1:3:nan")]
    FaultInjector(harmless, rank=0, model=model, marks=tmp_path, hooks_work=False)
    with pytest.raises(ConfigError, match="0:3:nan needs a model that runs in Python"):
        FaultInjector([Fault.parse("0:3:nan")], rank=0, model=model, marks=tmp_path, hooks_work=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bit_flip_changes_one_value(dtype: torch.dtype) -> None:
    values = torch.tensor([[0.25, -0.5], [0.125, 0.0]], dtype=dtype)
    flipped = flip_bit(values)
    assert (flipped != values).sum() == 1
    assert flipped[0, 1] == -0.5 * 2.0**128 or flipped[0, 1].isinf()
    assert torch.equal(values, torch.tensor([[0.25, -0.5], [0.125, 0.0]], dtype=dtype)), "the original is unchanged"
