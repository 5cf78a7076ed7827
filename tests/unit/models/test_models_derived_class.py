"""Models whose classes are made at run time can be pickled like any other."""

from __future__ import annotations

import io
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from pantheraml.models.causal_lm import FastCausalLM, make_fast
from tests.unit.models.test_models_fast import (
    IDS,
    adapted,
    assert_same,
    base_model,
    fused,
    quantize_to_fp8,
    results,
    runs_fused,
)


def pickled(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3"])
@pytest.mark.parametrize("fp8", [False, True], ids=["plain", "fp8"])
def test_a_fused_model_survives_pickling(family: str, fp8: bool) -> None:
    base = base_model(family)
    model = fused(adapted(quantize_to_fp8(base) if fp8 else base))
    other = pickled(model)
    assert runs_fused(other)
    assert [type(module) for module in other.modules()] == [type(module) for module in model.modules()]
    assert_same(results(other), results(model), tolerance=0)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_every_protocol_of_pickle(protocol: int) -> None:
    model: Any = make_fast(base_model("llama")).train()
    other: Any = pickle.loads(pickle.dumps(model, protocol))
    assert issubclass(type(other), FastCausalLM)
    assert type(other) is type(model)
    losses = [each(input_ids=IDS, labels=IDS).loss.item() for each in (other, model)]
    assert losses[0] == losses[1]


def test_another_process_can_unpickle_it(tmp_path: Path) -> None:
    model: Any = fused(adapted(base_model("llama"))).train()
    torch.save((model, IDS), tmp_path / "model.pt")
    code = (
        "import sys, torch; model, ids = torch.load(sys.argv[1], weights_only=False);"
        " print(model(input_ids=ids, labels=ids).loss.item())"
    )
    read = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "model.pt"], capture_output=True, text=True, check=True
    )
    assert float(read.stdout) == pytest.approx(model(input_ids=IDS, labels=IDS).loss.item(), rel=1e-6)
