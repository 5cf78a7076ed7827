"""docs/parallelism.md: its settings are accepted and mean what it says; its numbers match the code and the results."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from pantheraml.planner.dims import check_together, choose_dims
from pantheraml.planner.stages import bubble_fraction
from pantheraml.specs.parallel import DIMENSIONS, ParallelDims
from pantheraml.specs.train import TrainConfig

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/parallelism.md").read_text(encoding="utf-8")


def table(first_title: str) -> list[list[str]]:
    """Return the cells of the table whose header starts with `first_title`, row by row."""
    after = TEXT.partition(f"\n| {first_title} |")[2].partition("\n\n")[0]
    assert after, first_title
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in after.splitlines()[2:]]


SETTINGS = [yaml.safe_load(row[2].strip("`")) for row in table("situation")]
SETTINGS += [yaml.safe_load(block)["parallel"] for block in re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)]


def config(parallel: dict[str, Any]) -> TrainConfig:
    return TrainConfig.model_validate(
        {"model": {"path": "m"}, "data": {"path": "d"}, "train": {"global_batch_size": 21}, "parallel": parallel}
    )


@pytest.mark.seed("S2-028", "S2-049")
@pytest.mark.parametrize("parallel", SETTINGS, ids=str)
def test_settings_are_accepted(parallel: dict[str, Any]) -> None:
    world = math.prod(parallel.get(name, 1) for name in DIMENSIONS)
    run = config(parallel)
    dims, _ = choose_dims(run.parallel, world)
    check_together(run, dims)
    assert {name: degree for name in DIMENSIONS if (degree := getattr(dims, name)) > 1} == {
        name: degree for name, degree in parallel.items() if name in DIMENSIONS
    }


def test_replicate_is_inferred() -> None:
    dims, _ = choose_dims(config({"shard": 4, "tensor": 2}).parallel, 16)
    assert dims == ParallelDims(replicate=2, shard=4, tensor=2)


@pytest.mark.seed("S1-027")
def test_hybrid_strategies_match_the_page() -> None:
    expected = {"pipeline": "pipeline", "model_parallel": "tensor", "data_parallel": "shard"}
    assert [row[0].strip("`") for row in table("`hybrid_strategy`")] == list(expected)
    for strategy, dimension in expected.items():
        dims, _ = choose_dims(config({"mode": "hybrid", "hybrid_strategy": strategy}).parallel, 8)
        assert dims == ParallelDims(replicate=4, **{dimension: 2})


@pytest.mark.seed("S1-095", partly="the bubble is counted and matches theory; not timed on GPUs")
def test_bubbles_match_theory_and_the_newest_result() -> None:
    newest = max((ROOT / "benchmarks/results").glob("pipeline_bubble-*.json"))
    counted = {}
    for row in json.loads(newest.read_text(encoding="utf-8"))["results"]:
        assert row["idle_turns"] == row["expected_idle_turns"]
        assert row["share"] == pytest.approx(row["expected_share"], rel=1e-12)
        counted[row["processes"], row["micro_batches"], row["stages_per_process"]] = row["idle_turns"]
    for processes, *cells in table("processes"):
        count, expected = int(processes), []
        for multiple, stages in ((1, 1), (2, 1), (4, 1), (8, 1), (4, 2)):
            case = (count, multiple * count, stages)
            idle, theory = counted.pop(case), bubble_fraction(*case)
            slots = idle + 2 * stages * multiple * count
            assert idle / slots == pytest.approx(theory, rel=1e-12)
            expected.append(f"{100 * theory:.0f} %: {idle} of {slots}")
        assert cells == expected
    assert not counted, "every result is shown"


@pytest.mark.seed("C13")
@pytest.mark.seed(
    *("S0-066", "S1-088", "S2-037", "S2-038", "S2-039", "S2-071", "S3-070", "S4-027", "S4-028", "S4-029", "S4-034"),
    *("S4-041", "S4-042", "S4-043"),
    partly="measured on two CPU cores",
)
def test_weak_scaling_matches_the_result_files() -> None:
    shown = []
    for file in sorted((ROOT / "benchmarks/results").glob("weak_scaling-*.json")):
        for row in json.loads(file.read_text(encoding="utf-8"))["results"]:
            shares = [row[name] for name in ("efficiency", "machine_efficiency", "plain_efficiency")]
            method = {"lora": "LoRA", "full": "full"}[row["method"]]
            shown.append([method, *(f"{100 * share:.1f} %" for share in shares), f"{row['against_plain']:.3f}x"])
            assert row["efficiency"] >= row["target"] or row["machine_efficiency"] < 0.95, "wherever the host allows it"
            assert row["against_plain"] >= 1
    assert [cells[1:] for cells in table("host | method")] == shown


def test_communication_matches_the_newest_result() -> None:
    newest = max((ROOT / "benchmarks/results").glob("communication-*.json"))
    record = json.loads(newest.read_text(encoding="utf-8"))
    expected = {"hidden": 256, "layers": 4, "vocabulary": 2048}
    assert {name: record["parameters"][name] for name in expected} == expected
    measured = []
    for row in record["results"]:
        assert row["counts"] == row["expected_counts"]
        assert row["whole_bytes"] == row["expected_whole_bytes"]
        assert row["tokens"] == 512
        kinds = ", ".join(f"{count} {kind}" for kind, count in row["counts"].items())
        sizes = [f"{row[name] / 1024:,.0f} KiB" for name in ("whole_bytes", "sent_bytes")]
        measured.append([row["mode"], row["method"], kinds, *sizes])
    assert table("mode | method") == measured
