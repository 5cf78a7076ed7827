"""Pipeline parallel training matches one process: losses, every gradient, weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launching import run_ranks
from tests.distributed.pipeline_ranks import CASES, STEPS, Case

pytestmark = pytest.mark.extended

PROCESSES = 4


def launch(folder: Path, device: str, *names: str) -> list[dict[str, Any]]:
    """Findings of each rank in the named cases (none: all)."""
    run_ranks("pipeline_ranks", PROCESSES, folder, device, *names)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(PROCESSES)]


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return launch(tmp_path_factory.mktemp("pipeline"), "cpu")


def of_case(findings: list[dict[str, Any]], case: Case) -> list[dict[str, Any]]:
    """Findings of the ranks that ran the case."""
    found = [process["cases"][case.name] for process in findings if case.name in process["cases"]]
    assert len(found) == case.pipeline * (2 if case.replicate else 1)
    assert all(len(process["steps"]) == STEPS for process in found)
    return found


@pytest.mark.seed("S0-108", "S1-130", "S4-163")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_pipeline_matches_one_process(findings: list[dict[str, Any]], case: Case) -> None:
    check_equality(findings, case)


def check_equality(findings: list[dict[str, Any]], case: Case) -> None:
    for process in of_case(findings, case):
        for step in process["steps"]:
            for quantity in ("loss", "evaluation"):
                found, expected = step[quantity]
                assert found == (pytest.approx(expected, rel=case.tolerance) if process["last"] else 0), quantity
            for quantity in ("gradients", "weights"):
                assert {name: by for name, by in step[quantity].items() if not by <= case.tolerance} == {}, quantity


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_parameter_is_on_one_stage_under_its_name(findings: list[dict[str, Any]], case: Case) -> None:
    processes = of_case(findings, case)
    copies = len(processes) // case.pipeline
    (names,) = {tuple(process["all names"]) for process in processes}
    (shared,) = {name for process in processes for name in process["shared"]} or {None}
    tied = case.kind == "full" and case.family in ("tied llama", "gpt2", "gemma2")
    assert (shared is not None) == tied
    held = [name for process in processes for name in process["names"]]
    assert set(held) == set(names)
    assert {name: held.count(name) for name in names} == {name: copies * (2 if name == shared else 1) for name in names}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_parameters_of_other_stages_are_freed(findings: list[dict[str, Any]], case: Case) -> None:
    assert [process["leaked"] for process in of_case(findings, case)] == [0] * len(of_case(findings, case))


@pytest.mark.parametrize("stages_per_process", [1, 2])
def test_micro_batches_cross_each_stage_boundary_once_each_way(
    findings: list[dict[str, Any]], stages_per_process: int
) -> None:
    micro_batches, borders = 4, 2 * stages_per_process - 1
    sent = [process["sends"][stages_per_process - 1] for process in findings]
    pipelines = PROCESSES // 2
    assert sum(counts["c10d::send"] for counts in sent) == pipelines * 2 * micro_batches * borders
    others = {name for counts in sent for name in counts if name.startswith("c10d::")}
    assert others == {"c10d::send", "c10d::recv_"}, "a step has no collective of its own"


def test_gradients_of_two_calls_accumulate(findings: list[dict[str, Any]]) -> None:
    assert max(process["accumulated"] for process in findings) < 1e-6


def test_recomputed_layers_use_the_same_dropout_masks(findings: list[dict[str, Any]]) -> None:
    for process in findings:
        assert process["dropped"]["again"] < 1e-6
        assert process["dropped"]["another draw"] > 0.1


@pytest.mark.seed("C20")
def test_unsupported_model_is_rejected_by_the_pipeline(findings: list[dict[str, Any]]) -> None:
    for process in findings:
        assert process["refused"] == {
            "gptj": "GPTJModel cannot be split into pipeline stages: "
            "its layers return a tuple instead of hidden states alone.",
            "xglm": "XGLMModel cannot be split into pipeline stages: it changes hidden states outside its layers.",
            "opt": "OPTModel cannot be split into pipeline stages: its embedding or its list of layers was not found.",
        }
