"""`pantheraml profile` runs the plan of a run with the same configuration."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pantheraml.cli import profile
from pantheraml.cli.main import main
from pantheraml.planner.known_models import known_config
from pantheraml.specs.plan import Plan
from pantheraml.specs.tasks import ProfileResult

NOTHING = {
    "device": "cuda", "precision": "bf16", "world_size": 1, "steps": 1, "warmup": 1, "step_seconds": 1.0,
    "tokens_per_second": 1.0, "memory_bytes": 1, "phases": [], "parts": [], "operators": [],
}  # fmt: skip


def test_a_model_that_would_not_fit_is_profiled_as_it_is_trained(
    host: Callable[[str], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host("1xRTX4090")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(known_config("meta-llama/Llama-3.1-8B")))
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    plans: list[Plan] = []

    def planned(config: Any, plan: Plan, *rest: Any) -> ProfileResult:
        plans.append(plan)
        return ProfileResult.model_validate(NOTHING)

    monkeypatch.setattr(profile, "_profile", planned)
    places = ["--model", str(tmp_path / "model"), "--data", str(tmp_path / "rows.jsonl")]
    assert main(["profile", *places, "--set", "data.seq_len=2048"]) == 0
    (plan,) = plans
    assert plan.prediction is not None, "the rules alone predict nothing"
    assert plan.activation_checkpointing != "none"
