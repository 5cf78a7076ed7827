"""The profile of a step: it runs, and its record becomes a section."""

from __future__ import annotations

import json

import pytest

from tests.unit.benchmarks.conftest import Python

PROFILE = """
import json, step_profile
found = step_profile.run(shape="tiny", precision="fp32", batch=2, seq=64, device="cpu")
record = {"benchmark": "step_profile", "date": "2030-01-01", "hardware": {"gpus": ["a GPU"]}, **found}
record["parameters"] = record["parameters"] | {"shape": "qwen3-4b"}
print(json.dumps([found, step_profile.section([]), step_profile.section([record])]))
"""


@pytest.mark.extended
def test_a_step_is_profiled(python: Python) -> None:
    found, nothing, section = json.loads(python(PROFILE).splitlines()[-1])
    step, *rest = found["results"]
    kinds = [row for row in rest if row["part"] == "kind"]
    assert {"matmuls", "attention", "optimizer"} <= {row["name"] for row in kinds}
    assert 0 < sum(row["milliseconds"] for row in kinds) <= step["milliseconds"] * 1.01
    assert len(rest) > len(kinds)
    assert nothing == ""
    assert f"| whole step | {step['milliseconds']:.1f} ms | 1 |" in section
    assert "a GPU, 2030-01-01" in section
