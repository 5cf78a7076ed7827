"""N processes equal one in every mode of parallelism: losses, gradients, and weights after some steps.

`--equality full` (`make equality`) goes through the whole product of properties.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.distributed.launching import run_ranks
from tests.distributed.matrix import Case, chosen, full, write_inputs

TOLERANCE = 1e-5


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    cases = full() if metafunc.config.getoption("equality") == "full" else chosen()
    metafunc.parametrize("case", cases, ids=str)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    """Case -> how far it is from one process."""
    root = tmp_path_factory.mktemp("matrix")
    write_inputs(root)
    which = request.config.getoption("equality")
    found: dict[str, dict[str, Any]] = {}
    for size in (2, 4):
        timeout = 300 if which == "chosen" else 7200
        run_ranks("matrix_ranks", size, root, size, which, timeout=timeout)
        found |= json.loads((root / f"results-{size}.json").read_text())
    return found


@pytest.mark.timeout(7500)
def test_a_mode_equals_one_process(results: dict[str, dict[str, Any]], case: Case) -> None:
    found = results[str(case)]
    assert found["losses"][0] != found["losses"][-1], "the case learns nothing, and so compares nothing"
    assert found["loss"] <= TOLERANCE
    assert found["gradient"] <= TOLERANCE
    # Adam divides a gradient by its own size, so one near zero brings its last digits into the weight at full strength
    assert found["weights"] <= 10 * TOLERANCE
