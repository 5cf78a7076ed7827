"""The guard over several processes: every kind of clipping equals that of one process, and all ranks decide alike.

`--equality full` adds the cases of four processes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pantheraml.base.events import read_events
from pantheraml.specs.parallel import ParallelDims
from tests.distributed.guard_ranks import CASES, LEARNERS, LOOSE, MODES, TWO, rollback_run, write_inputs
from tests.distributed.launching import run_ranks
from tests.harness import train_here, values

TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("guard")
    write_inputs(root)
    one, two = ParallelDims(), MODES["fsdp x2"]
    alone, _ = rollback_run(root, "roll back alone", one), rollback_run(root, "roll back fsdp x2", two)
    train_here(alone)
    found: dict[str, Any] = {"root": str(root)}
    for size in (2, 4) if request.config.getoption("equality") == "full" else (2,):
        run_ranks("guard_ranks", size, root, size)
        found |= json.loads((root / f"results-{size}.json").read_text())
    return found


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        largest = 4 if metafunc.config.getoption("equality") == "full" else 2
        metafunc.parametrize("case", [case for case in CASES if MODES[case[0]].world_size <= largest], ids=" ".join)


def test_clipping_equals_that_of_one_process(results: dict[str, Any], case: tuple[str, str]) -> None:
    found = results[" ".join(case)]
    assert found["loss"] <= TOLERANCE
    # Adam divides a gradient by its own size, so one near zero brings its last digits into the weight at full strength
    assert found["weights"] <= 10 * TOLERANCE


@pytest.mark.parametrize("mode", TWO)
def test_a_bad_sample_is_found_on_its_rank(results: dict[str, Any], mode: str) -> None:
    found = results[f"{mode} poisoned"]
    culprit, holders = found["culprit"], found["holders"]
    assert any(holders)
    assert holders[culprit["rank"]]
    assert culprit["phase"] == "forward"
    assert found["bad"] in culprit["samples"]
    if mode != "pp x2":
        assert culprit["samples"] == [found["bad"]]
    assert "embed_tokens" in culprit["module"]
    assert found["culprits"] == [culprit, culprit]


@pytest.mark.parametrize("mode", TWO)
def test_all_ranks_decide_alike_and_go_on(results: dict[str, Any], mode: str) -> None:
    found = results[f"{mode} poisoned"]
    first, second = found["verdicts"]
    assert first == second
    assert (first["action"], first["anomaly"]) == ("zero", "nonfinite")
    assert found["finite"] == [True, True]
    assert found["finite next"]


@pytest.mark.parametrize("mode", TWO)
def test_a_fault_of_one_rank_that_passes_leaves_no_trace(results: dict[str, Any], mode: str) -> None:
    found = results[f"{mode} retried"]
    assert found["equal"] == [True, True]
    for told in found["told"]:
        (verdict,) = [event for event in told if event["kind"] == "verdict"]
        assert (verdict["step"], verdict["action"], verdict["transient"]) == (2, "retry", True)


@pytest.mark.parametrize("mode", ["ddp x2", "fsdp x2"])
def test_under_fp16_a_nan_of_one_rank_is_met_by_all_alike(results: dict[str, Any], mode: str) -> None:
    found = results[f"{mode} fp16"]
    first, second = found["verdicts"]
    assert first == second
    assert first["never"] == []
    assert first["once"] == [["overflow", "retry"]]
    assert first["always"] == [["overflow", "retry"]] * 2 + [["nonfinite", "skip"]]
    assert found["equal"] == [True, True], "what passes leaves no trace"
    assert found["skipped"] == [True, True]
    assert found["finite"] == [True, True]
    assert found["scales"] == [[4.0, 4.0, 4.0]] * 2, "it was not the scale's fault"


@pytest.mark.parametrize("kind", LOOSE)
@pytest.mark.parametrize("mode", ["ddp x2", "fsdp x2"])
def test_clean_steps_with_the_guard_are_bit_equal_to_those_without(
    results: dict[str, Any], mode: str, kind: str
) -> None:
    assert results[f"{mode} clean"][kind] == [True, True]


@pytest.mark.parametrize("mode", TWO)
def test_norms_layer_by_layer_are_those_of_one_process(results: dict[str, Any], mode: str) -> None:
    """The embeddings are the head, too, which two stages of a pipeline hold."""
    expected = [flat(groups) for groups in results["alone layered"]["groups"]]
    assert {name.rpartition(".")[0] for name in expected[0]} >= {"layers.0", "layers.1", "embed_tokens", "norm"}
    for rank in results[f"{mode} layered 1"]:
        assert [flat(groups) for groups in rank["groups"]] == [pytest.approx(norms, rel=1e-4) for norms in expected]


@pytest.mark.parametrize("mode", TWO)
def test_a_step_tells_all_its_numbers_in_one_exchange(results: dict[str, Any], mode: str) -> None:
    """The loss, the norm, norms layer by layer: with those a step exchanges as often as without. Numbers are float64,
    and what the passes exchange is not."""
    for without, with_groups in zip(results[f"{mode} layered 0"], results[f"{mode} layered 1"], strict=True):
        assert without["groups"] == []
        assert with_groups["exchanges"] == without["exchanges"]
        numbers = {name: count for name, count in without["exchanges"].items() if "float64" in name}
        assert numbers == {"c10d::allgather_ torch.float64": 1}


@pytest.mark.parametrize("mode", [*TWO, "cp x2"])
def test_the_gradient_that_shows_an_anomaly_is_named_by_all(results: dict[str, Any], mode: str) -> None:
    found = results[f"{mode} found out"]
    assert found["jump"] == found["nonfinite"] == [found["expected"]] * 2


@pytest.mark.parametrize("mode", [*TWO, "cp x2"])
def test_ranks_that_hold_the_same_weights_are_compared(results: dict[str, Any], mode: str) -> None:
    """Those of a pipeline and of sharding hold none in common; of tensor parallelism, those that are not cut."""
    found = results[f"{mode} found out"]
    assert found["in step"] == [None, None]
    drift = found.get("drift", {})
    assert len(drift) == (0 if mode in ("fsdp x2", "pp x2") else 1)
    for name, (ranks, told) in drift.items():
        assert ranks == 2
        assert told[0] == told[1]
        assert told[0].startswith("Ranks 0, 1 no longer hold the same")
        assert f"the weight {name}." in told[0]


@pytest.mark.parametrize("mode", [*TWO, "cp x2"])
def test_the_operation_that_gave_nan_is_named_with_its_rank_and_line(results: dict[str, Any], mode: str) -> None:
    first, second = results[f"{mode} found out"]["operation"]
    assert first == second
    assert "rank 1: BadGradientBackward gave NaN" in first
    assert "BadGradient.apply(output)" in first
    if mode in ("ddp x2", "fsdp x2"):
        assert "rank 0" not in first, "the others' backward passes were in order"


def test_ranks_roll_back_together(results: dict[str, Any]) -> None:
    root = Path(results["root"])
    alone, sharded = (read_events(root / f"roll back {mode}") for mode in ("alone", "fsdp x2"))
    assert values(sharded, "verdict", "action") == values(alone, "verdict", "action") == ["roll_back"]
    told = [[m for m in values(events, "warning", "message") if "rolled back" in m] for events in (alone, sharded)]
    assert told[0] == told[1]
    losses = [float(loss) for loss in values(alone, "train.step", "loss")]
    assert [float(loss) for loss in values(sharded, "train.step", "loss")] == (
        pytest.approx(losses, rel=TOLERANCE, nan_ok=True)
    )


@pytest.mark.parametrize("kind", LEARNERS)
def test_all_ranks_would_save_the_same_whatever_the_mode(results: dict[str, Any], kind: str) -> None:
    """So a checkpoint of one mode resumes in another."""
    (sharded, other), (first, last) = results[f"learnt {kind}"].values()
    assert sharded == other
    assert first == last
    assert flat(sharded) == pytest.approx(flat(first), rel=1e-4, abs=1e-9)


def flat(state: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers in a state, by name."""
    found: dict[str, float] = {}
    for key, value in state.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{key}.")
        elif isinstance(value, list):
            found |= flat(dict(enumerate(value)), f"{prefix}{key}.")  # type: ignore[arg-type]
        elif value is not None and not isinstance(value, str):
            found[f"{prefix}{key}"] = value
    return found
