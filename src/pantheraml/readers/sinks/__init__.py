"""Sinks: experiment trackers that receive a run's metrics (TensorBoard, Weights & Biases, MLflow, trackio).

`open_sink(name, ...)` returns a reader. The tracker's package is imported only then; if it is missing, the error names
the extra to install.
"""

from pantheraml.readers.sinks import mlflow, tensorboard, trackio, wandb  # noqa: F401 - each registers itself
from pantheraml.readers.sinks.sink import open_sink, sink_names

__all__ = ["open_sink", "sink_names"]
