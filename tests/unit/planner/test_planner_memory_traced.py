"""The peak of a step, traced tensor by tensor on a CPU with 2 and 4 layers, is the predicted one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed._tools.mem_tracker import MemTracker

from pantheraml.engine.step.loss import LossModel
from pantheraml.planner.memory.predict import instants
from pantheraml.planner.model_shapes import shapes_of_config
from pantheraml.planner.setting import Setting
from tests.unit.planner.tiny_models import CONFIG, build

ROWS, LENGTH = 2, 512
SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
"""From a width of 256 on, selective checkpointing stores the outputs of matmuls."""


def traced(layers: int, setting: Setting) -> int:
    """Peak of live bytes during forward and backward."""
    model = build("llama", layers, setting, **SIZES)
    loss_model = LossModel(model)
    tokens = torch.randint(0, CONFIG["vocab_size"], (ROWS, LENGTH))
    positions = torch.arange(LENGTH)[None].expand(ROWS, -1)
    tracker = MemTracker()
    tracker.track_external(model)
    with tracker:
        loss_model(tokens, positions, tokens, None, LENGTH, ROWS * LENGTH).backward()
    return sum(snapshot["Total"] for snapshot in tracker.get_tracker_snapshot("peak").values())


def predicted(layers: int, setting: Setting) -> int:
    shapes = shapes_of_config({"model_type": "llama", **CONFIG, **SIZES, "num_hidden_layers": layers})
    moments = instants(shapes, setting)
    # the traced pass takes no step, and the tracker does not see what exists before
    return max(
        sum(parts.values()) - parts.get("optimizer", 0) - parts.get("workspace", 0) for parts in moments.values()
    )


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_the_peak_grows_with_depth_as_predicted(mode: Any) -> None:
    setting = Setting(
        device="cpu", method="full", precision="fp32", micro_batch=ROWS, seq_len=LENGTH, activation_checkpointing=mode
    )
    few, many = traced(2, setting), traced(4, setting)
    assert predicted(4, setting) - predicted(2, setting) == many - few
    # on a CPU the softmax of the loss is computed in plain torch, with more tensors
    assert predicted(4, setting) == pytest.approx(many, rel=0.03)


@pytest.mark.seed("S4-040", partly="42 % less for the plain layers of a small model on a CPU")
def test_bf16_takes_little_more_than_half_the_peak() -> None:
    """Weights, gradients and most activations are in bf16; norms, softmax and loss stay in float32."""
    full = Setting(device="cpu", method="full", precision="fp32", micro_batch=ROWS, seq_len=LENGTH)
    mixed = full.model_copy(update={"precision": "bf16", "trained_weights": "bf16"})
    assert traced(4, mixed) == pytest.approx(0.58 * traced(4, full), rel=0.03)
