"""Mixtures of experts: N ranks match one, with and without the auxiliary loss."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import toy
from tests.distributed.launching import run_ranks


@pytest.mark.extended
def test_experts_on_two_ranks_match_one(tmp_path: Path) -> None:
    toy.write_jsonl(tmp_path / "data.jsonl", toy.arithmetic(80))
    toy.write_mixtral(tmp_path / "mixtral")
    toy.write_qwen3_moe(tmp_path / "qwen3_moe")
    toy.write_mixtral(tmp_path / "plain", output_router_logits=False)
    run_ranks("experts_ranks", 2, tmp_path, "mixtral", "qwen3_moe", "plain")
    results = json.loads((tmp_path / "results.json").read_text())
    assert len(results) == 27
    for name, result in results.items():
        assert max(result["loss"], result["gradient"]) <= 1e-5, (name, result)
        # AdamW divides by the gradient: where that is rounding noise, an update can have either sign
        assert result["weights"] <= 1e-3, (name, result)
