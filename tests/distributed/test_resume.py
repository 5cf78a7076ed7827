"""A stopped and resumed run matches an uninterrupted one.

Bit for bit on the same layout; within tolerance, with the same samples at every step, on another.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from safetensors.numpy import load_file

from pantheraml.specs.run_dir import RunDir
from pantheraml.specs.train import TrainConfig
from tests import toy
from tests.distributed.launching import run_ranks
from tests.event_log import raw_events
from tests.harness import make_plan, make_run, merged, values

TOLERANCE = 1e-5
STEPS = 8

ALONE: dict[str, int] = {}
DDP, FSDP, PIPELINE, TENSOR = {"replicate": 2}, {"shard": 2}, {"pipeline": 2}, {"tensor": 2}
FSDP4, MIXED = {"shard": 4}, {"shard": 2, "tensor": 2}

PADDED: dict[str, Any] = {"data": {"packing": False}}
DROPOUT: dict[str, Any] = {"method": {"dropout": 0.2}}
FULL: dict[str, Any] = {"method": {"kind": "full"}}
KEPT: dict[str, Any] = {"checkpoint": {"keep": 9}}
ADAPTIVE: dict[str, Any] = {"parallel": {"batch_shares": "adaptive"}, **KEPT}

SCALED: dict[str, Any] = {"model": {"precision": "fp16"}, "stability": {"on_nonfinite": "skip"}}


def learning(clipping: str) -> dict[str, Any]:
    """Settings of clipping kinds with state."""
    return {"stability": {"clipping": clipping, "clip_warmup_steps": 2, "spike_warmup_steps": 2}}


T = TypeVar("T")
Legs = list[tuple[dict[str, int], int | None]]

# Changes to the config, layout of the uninterrupted run, and layouts and end steps of the legs.
SAME: dict[str, tuple[dict[str, Any], dict[str, int], Legs]] = {
    "one process": (DROPOUT, ALONE, [(ALONE, 3), (ALONE, None)]),
    "one process padded": (merged(PADDED, DROPOUT), ALONE, [(ALONE, 4), (ALONE, 5), (ALONE, None)]),
    "one process fp16": (SCALED, ALONE, [(ALONE, 4), (ALONE, None)]),
    "ddp": (DROPOUT, DDP, [(DDP, 3), (DDP, None)]),
    "fsdp": (merged(merged(PADDED, FULL), learning("zclip")), FSDP, [(FSDP, 5), (FSDP, None)]),
    "pipeline": (learning("adagc"), PIPELINE, [(PIPELINE, 4), (PIPELINE, None)]),
    "ddp damaged": ({}, DDP, [(DDP, 5), (DDP, None)]),
    "fsdp damaged": (FULL, FSDP, [(FSDP, 5), (FSDP, None)]),
}
OTHER: dict[str, tuple[dict[str, Any], dict[str, int], Legs]] = {
    "lora ddp fsdp alone pipeline": ({}, ALONE, [(DDP, 2), (FSDP, 4), (ALONE, 6), (PIPELINE, None)]),
    "full pipeline alone fsdp pipeline": (FULL, ALONE, [(PIPELINE, 2), (ALONE, 4), (FSDP, 6), (PIPELINE, None)]),
    "adaptive": (merged(PADDED, ADAPTIVE), DDP, [(DDP, 3), (DDP, 5), (ALONE, None)]),
    "full ddp fsdp4 mixed alone tensor": (
        merged(FULL, KEPT),
        ALONE,
        [(DDP, 2), (FSDP4, 4), (MIXED, 5), (ALONE, 6), (TENSOR, None)],
    ),
}


def config(changes: dict[str, Any], root: Path) -> TrainConfig:
    base = {
        "model": {"path": str(root / "model")},
        "data": {
            "path": str(root / "data.jsonl"),
            "seq_len": 48,
            "cache_dir": str(root / "cache"),
            "eval_fraction": 0.2,
        },
        "method": {"rank": 4},
        "train": {"global_batch_size": 7, "max_steps": STEPS, "learning_rate": 1e-2, "eval_every_steps": 2},
        "checkpoint": {"every_steps": 3},
    }
    return TrainConfig.model_validate(merged(base, changes))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[RunDir, RunDir]]:
    """Name -> the uninterrupted run, and the resumed one."""
    root = tmp_path_factory.mktemp("resume")
    toy.write_llama(root / "model", num_hidden_layers=2)
    toy.write_jsonl(root / "data.jsonl", toy.arithmetic(60))
    found: dict[str, tuple[RunDir, RunDir]] = {}
    legs: list[dict[str, Any]] = []
    for name, (changes, place, stops) in (SAME | OTHER).items():
        settings = config(changes, root)
        pair = [make_run(root / name.replace(" ", "-") / kind, settings, make_plan(settings)) for kind in "ab"]
        straight: Legs = [(place, None)]
        for run, parts in zip(pair, (straight, stops), strict=True):
            legs += [{"run": str(run.path), "dims": dims, "stop_at": stop, "micro": 2} for dims, stop in parts]
        if name.endswith("damaged"):
            legs[-1]["damage"] = 5
        found[name] = (pair[0], pair[1])
    for number, (processes, together) in enumerate(by_processes(legs)):
        file = root / f"legs{number}.json"
        file.write_text(json.dumps(together))
        run_ranks("resume_ranks", processes, file)
    return found


def by_processes(legs: list[dict[str, Any]]) -> list[tuple[int, list[dict[str, Any]]]]:
    """Group the legs, in order, into as few launches as possible; a leg of one rank fits into any."""
    found: list[tuple[int, list[dict[str, Any]]]] = []
    for leg in legs:
        processes = max(2, math.prod(leg["dims"].values()))
        if not found or found[-1][0] != processes:
            found.append((processes, []))
        found[-1][1].append(leg)
    return found


def samples(run: RunDir) -> dict[int, list[int]]:
    lines = [json.loads(line) for line in (run.path / "samples.jsonl").read_text().splitlines()]
    return _by_step((line["step"], line["samples"]) for line in lines)


def _by_step(pairs: Iterable[tuple[int, T]]) -> dict[int, T]:
    """Values by step; steps repeated after damage must give equal values."""
    found: dict[int, T] = {}
    for step, value in pairs:
        assert found.setdefault(step, value) == value, step
    return found


def weights(run: RunDir) -> Path:
    (file,) = run.trained().glob("*.safetensors")
    return file


def numbers(run: RunDir) -> dict[str, list[float]]:
    events = raw_events(run.path)
    kinds = [("train.step", "loss"), ("train.step", "grad_norm"), ("eval.done", "loss")]
    found = {}
    for kind, field in kinds:
        pairs = zip(values(events, kind, "step"), values(events, kind, field), strict=True)
        found[f"{kind} {field}"] = list(_by_step(pairs).values())
    return found


@pytest.mark.seed("S4-009", "S0-048")
@pytest.mark.parametrize("name", SAME)
def test_resume_on_the_same_layout_is_bit_equal(runs: dict[str, tuple[RunDir, RunDir]], name: str) -> None:
    straight, stopped = runs[name]
    assert samples(stopped) == samples(straight)
    assert list(samples(straight)) == list(range(1, STEPS + 1))
    assert numbers(stopped) == numbers(straight)
    assert len(numbers(straight)["eval.done loss"]) == STEPS / 2
    assert weights(stopped).read_bytes() == weights(straight).read_bytes()
    assert state(stopped) == state(straight)
    assert bool(state(straight)["scaler"]) == name.endswith("fp16")


def state(run: RunDir) -> dict[str, Any]:
    """State of the last checkpoint, as far as two runs should agree."""
    found: dict[str, Any] = json.loads((run.checkpoints / f"step-{STEPS:08d}" / "state.json").read_text())
    assert found["guard"]
    return found


@pytest.mark.seed("S4-009")
@pytest.mark.parametrize("name", OTHER)
def test_resume_on_another_layout_matches(runs: dict[str, tuple[RunDir, RunDir]], name: str) -> None:
    straight, stopped = runs[name]
    assert samples(stopped) == samples(straight)
    expected = numbers(straight)
    assert expected["train.step loss"][0] != expected["train.step loss"][-1]
    for what, found in numbers(stopped).items():
        assert found == pytest.approx(expected[what], rel=TOLERANCE), what
    first, second = load_file(weights(straight)), load_file(weights(stopped))
    assert first.keys() == second.keys()
    for key in first:
        difference = np.linalg.norm(first[key] - second[key]) / max(float(np.linalg.norm(first[key])), 1e-12)
        # as without a stop: Adam amplifies the last digits of gradients near zero
        assert difference <= 10 * TOLERANCE, key


def test_cases_stop_in_the_middle_of_a_shuffled_epoch(runs: dict[str, tuple[RunDir, RunDir]]) -> None:
    for straight, _ in runs.values():
        seen = [sample for step in samples(straight).values() for sample in step]
        assert seen != sorted(seen), "the samples are shuffled"
        assert len(seen) % len(set(seen)), "the last epoch is partial"
        assert len(seen) > len(set(seen)), "there is more than one epoch"


def test_adaptive_shares_resume_with_their_measurements(runs: dict[str, tuple[RunDir, RunDir]]) -> None:
    _, stopped = runs["adaptive"]
    state = json.loads((stopped.checkpoints / "step-00000005" / "state.json").read_text())["progress"]["shares"]
    assert len(state["tokens"]) == 2
    so_far = sum(values(raw_events(stopped.path), "train.step", "tokens")[:5])
    assert sum(state["tokens"]) == so_far, "measurements of both legs"


@pytest.mark.parametrize("name", [name for name in SAME if name.endswith("damaged")])
def test_all_ranks_fall_back_from_a_damaged_checkpoint(runs: dict[str, tuple[RunDir, RunDir]], name: str) -> None:
    events = raw_events(runs[name][1].path)
    (message,) = values(events, "warning", "message")
    assert "step-00000005 is damaged" in message
    assert values(events, "train.started", "first_step")[1] < 6


def test_each_rank_saves_only_its_shards(runs: dict[str, tuple[RunDir, RunDir]]) -> None:
    straight, stopped = runs["full ddp fsdp4 mixed alone tensor"]
    whole = (straight.checkpoints / "step-00000006" / "optimizer.safetensors").stat().st_size
    for step in (4, 5):  # of four ranks
        sizes = [file.stat().st_size for file in (stopped.checkpoints / f"step-{step:08d}").glob("optimizer-*")]
        assert len(sizes) == 4
        assert sum(sizes) < 1.2 * whole, "nothing is saved twice, except the file headers"
        assert max(sizes) < 0.3 * whole, "shards are balanced"
