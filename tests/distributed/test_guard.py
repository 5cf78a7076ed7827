"""The guard on several ranks: clipping matches one process, and all ranks reach the same verdict.

`--equality full` adds the cases of four processes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pantheraml.specs.parallel import ParallelDims
from tests.distributed.guard_ranks import CASES, LEARNERS, LOOSE, MODES, TWO, rollback_run, write_inputs
from tests.distributed.launching import run_ranks
from tests.event_log import raw_events
from tests.harness import train_here, values

pytestmark = pytest.mark.extended

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


@pytest.mark.seed("S1-083")
def test_clipping_matches_one_process(results: dict[str, Any], case: tuple[str, str]) -> None:
    found = results[" ".join(case)]
    assert found["loss"] <= TOLERANCE
    # Adam divides a gradient by its own size, so one near zero brings its last digits into the weight at full strength
    assert found["weights"] <= 10 * TOLERANCE


@pytest.mark.parametrize("mode", TWO)
def test_bad_sample_is_found_on_its_rank(results: dict[str, Any], mode: str) -> None:
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


@pytest.mark.seed("S1-083")
@pytest.mark.parametrize("mode", TWO)
def test_all_ranks_reach_the_same_verdict_and_continue(results: dict[str, Any], mode: str) -> None:
    found = results[f"{mode} poisoned"]
    first, second = found["verdicts"]
    assert first == second
    assert (first["action"], first["anomaly"]) == ("zero", "nonfinite")
    assert found["finite"] == [True, True]
    assert found["finite next"]


@pytest.mark.parametrize("mode", TWO)
def test_transient_fault_of_one_rank_does_not_change_the_result(results: dict[str, Any], mode: str) -> None:
    found = results[f"{mode} retried"]
    assert found["equal"] == [True, True]
    for events in found["events"]:
        (verdict,) = [event for event in events if event["kind"] == "verdict"]
        assert (verdict["step"], verdict["action"], verdict["transient"]) == (2, "retry", True)


@pytest.mark.parametrize("mode", ["ddp x2", "fsdp x2"])
def test_fp16_nan_of_one_rank_is_handled_by_all(results: dict[str, Any], mode: str) -> None:
    found = results[f"{mode} fp16"]
    first, second = found["verdicts"]
    assert first == second
    assert first["never"] == []
    assert first["once"] == [["overflow", "retry"]]
    assert first["always"] == [["overflow", "retry"]] * 2 + [["nonfinite", "skip"]]
    assert found["equal"] == [True, True], "a transient fault does not change the result"
    assert found["skipped"] == [True, True]
    assert found["finite"] == [True, True]
    assert found["scales"] == [[4.0, 4.0, 4.0]] * 2, "the loss scale was not the cause"


@pytest.mark.parametrize("kind", LOOSE)
@pytest.mark.parametrize("mode", ["ddp x2", "fsdp x2"])
def test_guard_does_not_change_clean_distributed_steps(results: dict[str, Any], mode: str, kind: str) -> None:
    assert results[f"{mode} clean"][kind] == [True, True]


@pytest.mark.parametrize("mode", TWO)
def test_group_norms_match_one_process(results: dict[str, Any], mode: str) -> None:
    """The embeddings are tied to the head, so two pipeline stages hold them."""
    expected = [flat(groups) for groups in results["alone group_norms"]["groups"]]
    assert {name.rpartition(".")[0] for name in expected[0]} >= {"layers.0", "layers.1", "embed_tokens", "norm"}
    for rank in results[f"{mode} group_norms 1"]:
        assert [flat(groups) for groups in rank["groups"]] == [pytest.approx(norms, rel=1e-4) for norms in expected]


@pytest.mark.parametrize("mode", TWO)
def test_step_gathers_all_numbers_in_one_collective(results: dict[str, Any], mode: str) -> None:
    """Loss, norm and group norms share one all-gather: with group norms a step has as many collectives as without. The
    scalars are float64, unlike anything in the passes."""
    for without, with_groups in zip(results[f"{mode} group_norms 0"], results[f"{mode} group_norms 1"], strict=True):
        assert without["groups"] == []
        assert with_groups["exchanges"] == without["exchanges"]
        numbers = {name: count for name, count in without["exchanges"].items() if "float64" in name}
        assert numbers == {"c10d::allgather_ torch.float64": 1}


@pytest.mark.parametrize("mode", [*TWO, "cp x2"])
def test_all_ranks_name_the_same_suspect_gradient(results: dict[str, Any], mode: str) -> None:
    found = results[f"{mode} joint findings"]
    assert found["jump"] == found["nonfinite"] == [found["expected"]] * 2


@pytest.mark.parametrize("mode", [*TWO, "cp x2"])
def test_replicated_weights_are_compared(results: dict[str, Any], mode: str) -> None:
    """None with pipeline and FSDP; with tensor parallel, those that are not sharded."""
    found = results[f"{mode} joint findings"]
    assert found["in step"] == [None, None]
    drift = found.get("drift", {})
    assert len(drift) == (0 if mode in ("fsdp x2", "pp x2") else 1)
    for name, (ranks, told) in drift.items():
        assert ranks == 2
        assert told[0] == told[1]
        assert told[0].startswith("Ranks 0, 1 diverged")
        assert f"the weight {name}." in told[0]


@pytest.mark.parametrize("mode", [*TWO, "cp x2"])
def test_nan_operation_is_named_with_its_rank_and_line(results: dict[str, Any], mode: str) -> None:
    first, second = results[f"{mode} joint findings"]["operation"]
    assert first == second
    assert "rank 1: BadGradientBackward gave NaN" in first
    assert "BadGradient.apply(output)" in first
    if mode in ("ddp x2", "fsdp x2"):
        assert "rank 0" not in first, "no NaN in backward on the other ranks"


def test_ranks_roll_back_together(results: dict[str, Any]) -> None:
    root = Path(results["root"])
    alone, sharded = (raw_events(root / f"roll back {mode}") for mode in ("alone", "fsdp x2"))
    assert values(sharded, "verdict", "action") == values(alone, "verdict", "action") == ["roll_back"]
    told = [[m for m in values(events, "warning", "message") if "rolled back" in m] for events in (alone, sharded)]
    assert told[0] == told[1]
    losses = [float(loss) for loss in values(alone, "train.step", "loss")]
    assert [float(loss) for loss in values(sharded, "train.step", "loss")] == (
        pytest.approx(losses, rel=TOLERANCE, nan_ok=True)
    )


@pytest.mark.parametrize("kind", LEARNERS)
def test_guard_state_is_equal_on_all_ranks_and_layouts(results: dict[str, Any], kind: str) -> None:
    """So a checkpoint of one layout resumes in another."""
    (sharded, other), (first, last) = results[f"guard_states {kind}"].values()
    assert sharded == other
    assert first == last
    assert flat(sharded) == pytest.approx(flat(first), rel=1e-4, abs=1e-9)


def flat(state: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """Numbers in a state, by name."""
    found: dict[str, float] = {}
    for key, value in state.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{key}.")
        elif isinstance(value, list):
            found |= flat(dict(enumerate(value)), f"{prefix}{key}.")  # type: ignore[arg-type]
        elif value is not None and not isinstance(value, str):
            found[f"{prefix}{key}"] = value
    return found
