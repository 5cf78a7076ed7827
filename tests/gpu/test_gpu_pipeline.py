"""A pipeline whose ranks share one GPU, with gloo between them, matches the whole model on it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.conftest import rank_server  # noqa: F401 (a fixture)
from tests.distributed.pipeline_ranks import CASES
from tests.distributed.test_pipeline import check_equality, launch

NAMES = (
    "llama full packed float64",
    "llama full padded",
    "llama full checkpointed",
    "llama tied",
    "llama lora padded float64",
    "gpt2 full packed",
    "llama interleaved",
    "tied llama dp 2 x pp 2",
)


@pytest.mark.timeout(400)
def test_pipeline_on_one_gpu_matches_the_whole_model(tmp_path: Path) -> None:
    findings = launch(tmp_path, "cuda", *NAMES)
    for case in CASES:
        if case.name in NAMES:
            check_equality(findings, case)
