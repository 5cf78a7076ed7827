"""FastVisionModel under PantheraMLDistributedTrainer: two ranks equal one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests import toy_vision
from tests.distributed.launching import run_ranks


@pytest.mark.seed("S0-102")
@pytest.mark.parametrize("family", ["qwen2_5_vl", pytest.param("gemma3", marks=pytest.mark.extended)])
def test_two_ranks_equal_one_process(family: str, tmp_path: Path) -> None:
    model = toy_vision.write(family, tmp_path / "model")
    for ranks in (1, 2):
        (tmp_path / str(ranks)).mkdir()
        run_ranks("vision_ranks", ranks, tmp_path / str(ranks), family, model)
    one, *two = (
        (json.loads((tmp_path / run / f"rank-{rank}.json").read_text()),
         load_file(tmp_path / run / f"rank-{rank}.safetensors"))
        for run, rank in (("1", 0), ("2", 0), ("2", 1))
    )  # fmt: skip
    assert two[0][0]["wrapped"] == "DistributedDataParallel"
    assert len(set(one[0]["loss"])) == 4, "a model that does not train would pass the checks below"
    assert two[0][0]["loss"] == pytest.approx(one[0]["loss"], rel=1e-5)
    towers = {"vision" if "vis" in name else "language" for name in one[1] if one[1][name].any()}
    assert towers == {"vision", "language"}
    for _, weights in two:
        assert weights.keys() == one[1].keys()
        for name, expected in one[1].items():
            torch.testing.assert_close(weights[name], expected, rtol=0, atol=1e-5, msg=name)
