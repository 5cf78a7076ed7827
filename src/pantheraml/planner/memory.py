"""Predict the peak memory of a training step per rank, by part, as the maximum over named instants of the step."""

from __future__ import annotations

from pantheraml.planner.model_shapes import ModelShapes
from pantheraml.planner.setting import Setting
from pantheraml.specs.prediction import MemoryPrediction


def why_not_predicted(shapes: ModelShapes, setting: Setting) -> str | None:
    """Why the memory of this setting is not known; None: it is predicted."""
    del shapes
    if setting.devices_per_process > 1:
        return "one process uses several devices"
    return "activations are not predicted yet"


def predict_memory(
    shapes: ModelShapes, setting: Setting, *, capacity_bytes: int | None = None
) -> MemoryPrediction | None:
    """Peak memory of the rank that needs most; None: not known, see `why_not_predicted`."""
    del shapes, setting, capacity_bytes
    return None
