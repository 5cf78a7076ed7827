"""Ablation of pieces without a setting: every switch takes its piece out and puts it back; every piece has a row."""

from __future__ import annotations

import json

import pytest

from tests.unit.benchmarks.conftest import Python


def test_runs_with_everything_on_come_between_the_others(python: Python) -> None:
    sides = json.loads(python("import ablation_pieces as a, json; print(json.dumps(a.order(['a', 'b', 'c', 'd'])))"))
    assert sides == ["", "a", "b", "c", "", "d", "", "d", "c", "b", "", "a"]


SWITCHES = """
import contextlib, json
from pathlib import Path
import ablation_pieces as a
from pantheraml.engine.compile import compile_steady_shapes
from pantheraml.hooks.registry import REGISTRY
from pantheraml.models import async_scalars, causal_lm

folder = Path(sys.argv[1])
scale = a.Scale("tiny", 1, 16, 1)
a._write_inputs(folder, scale)
model = a._Session(folder, scale, "lora", "bf16").model
fast = a._fast(model)
plain = a._Session(folder, scale, "full", "bf16").model
compile_steady_shapes(plain)

def state():
    return {
        "layer_cuda_graphs": a._graphs(model) is not None,
        "prelaunch": fast.prelaunch is not None,
        "hooks": sorted(patch.name for patch in REGISTRY.applied),
        "algebra": bool(async_scalars._METRIC_OPS),
        "metrics": causal_lm.mirror_metrics_on_host is async_scalars.mirror_metrics_on_host,
        "loss": causal_lm.mirror_on_host is async_scalars.mirror_on_host,
        "steady_shapes": not a._steady_shapes(plain)._off,
    }

before, changed = state(), {}
for piece in (*a.LORA_PIECES, *a.FULL_PIECES):
    with piece.off(plain if piece in a.FULL_PIECES else model):
        now = state()
        changed[piece.name] = sorted(key for key in before if now[key] != before[key])
    assert state() == before, piece.name
print(json.dumps(changed))
"""


@pytest.mark.extended
def test_every_switch_takes_its_piece_out_and_puts_it_back(python: Python, tmp_path: object) -> None:
    changed = json.loads(python(SWITCHES, str(tmp_path)).splitlines()[-1])
    assert changed == {
        "prelaunch": ["prelaunch"],
        "prefetch_batches": ["hooks"],
        "async_metrics": ["hooks"],
        "metric_algebra": ["algebra", "metrics"],
        "async_scalars": ["algebra", "loss", "metrics"],
        "all_host_overlap": ["algebra", "hooks", "loss", "metrics", "prelaunch"],
        "layer_cuda_graphs": ["layer_cuda_graphs", "prelaunch"],
        "steady_shapes": ["steady_shapes"],
    }


@pytest.mark.extended
def test_every_piece_has_a_row_on_a_cpu(python: Python) -> None:
    code = (
        "import ablation, json\n"
        "done = ablation.run(tricks='pieces', steps=4, shapes='tiny', minutes=5, batch=1, seq_len=16)\n"
        "print(json.dumps(done['results']))"
    )
    rows = {row["piece"]: row for row in json.loads(python(code).splitlines()[-1])}
    needs_cuda = {name for name, row in rows.items() if row["reason"] == "it needs CUDA"}
    assert needs_cuda == {"fp8_layouts", "step_cuda_graph", "prelaunch", "layer_cuda_graphs", "steady_shapes"}
    for row in (row for name, row in rows.items() if name not in needs_cuda):
        assert row["acted"], row
        assert len(row["on_runs"]) >= len(row["off_runs"]) == 2
        assert row["off_tokens_per_second"] > 0
